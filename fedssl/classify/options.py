"""Options of ``fedssl-classify``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedssl.config.commands import check_new, check_output, flag_of, number_of, read_options, source_of
from fedssl.config.literal import path_of
from fedssl.config.targets import search_folders
from fedssl.errors import InputError

OUTPUTS = {"next": ".csv", "out": ".csv", "report": ".json", "onnx": ".onnx"}
_READERS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("labeled", "images", *OUTPUTS), lambda key, text: path_of(text)),
    **dict.fromkeys(("label_next", "seed"), lambda key, text: int(number_of(key, text, 0, 10**9))),
    **dict.fromkeys(("include_labeled", "skip_unreadable"), flag_of),
    **dict.fromkeys(("backend", "device"), lambda key, text: text),
}
_NEEDS = [(key, "labeled") for key in ("out", "report", "onnx", "include_labeled")]
_NEEDS += [("out", "images"), ("include_labeled", "images"), ("next", "label_next")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command, see `fedssl.classify.cli`."""

    source: Path  # folder of a run, or file of an encoder
    labeled: Path | None = None
    images: Path | None = None
    out: Path | None = None
    report: Path | None = None
    next: Path | None = None
    onnx: Path | None = None
    label_next: int = 0
    seed: int = 0
    include_labeled: bool = False
    skip_unreadable: bool = False
    backend: str = "torch"
    device: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of dataset=folder, without the prefix
    folders: Sequence[Path] = ()  # config directories


def classify_options(overrides: Sequence[str]) -> Options:
    """Return the options of overrides; `InputError` if they are invalid."""
    texts, settings = read_options("fedssl-classify", overrides, keys=("run", "encoder", *_READERS))
    source = source_of(texts)
    given = {key: _READERS[key](key, text) for key, text in texts.items() if key in _READERS}
    _check_use(given)
    if "labeled" in given and "images" in given:
        given.setdefault("out", Path("predictions.csv"))
    if given.get("label_next"):
        given.setdefault("next", Path("label_next.csv"))
    outputs = {key: given[key] for key in OUTPUTS if key in given}
    for key, file in outputs.items():
        check_output(key, file, OUTPUTS[key])
    if len({file.resolve() for file in outputs.values()}) < len(outputs):
        raise InputError(f"two of {'=, '.join(outputs)}= name the same file; choose different ones")
    return Options(source=source, settings=settings, folders=search_folders(overrides), **given)


def check_outputs(options: Options) -> None:
    """Raise an `InputError` if an output exists."""
    for key in OUTPUTS:
        file = vars(options)[key]
        if file is not None:
            check_new(key, file)


def _check_use(given: Mapping[str, Any]) -> None:
    """Raise an `InputError` if an option needs another one."""
    if "labeled" not in given and not ("images" in given and given.get("label_next")):
        raise InputError(
            "labeled is missing; add labeled=PATH, or choose first images to label with images=PATH label_next=20"
        )
    for key, other in _NEEDS:
        if key in given and not given.get(other):
            raise InputError(f"{key}={given[key]} needs {other}; add {other}=..., or remove {key}")
