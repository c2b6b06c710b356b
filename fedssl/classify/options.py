"""Options of ``fedssl-classify``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedssl.config.literal import literal_values, path_of
from fedssl.config.overrides import did_you_mean, parse
from fedssl.config.targets import SEARCHPATH_KEY, search_folders
from fedssl.errors import InputError

_INPUTS = ("labeled", "images")
_OUTPUTS = {"out": ".csv", "report": ".json", "next": ".csv", "onnx": ".onnx"}
_NUMBERS = ("label_next", "seed")
_FLAGS = ("include_labeled", "skip_unreadable")
_WORDS = ("backend", "device")
_SOURCES = ("run", "encoder")
_KEYS = (*_SOURCES, *_INPUTS, *_OUTPUTS, *_NUMBERS, *_FLAGS, *_WORDS)
_PREFIX = "dataset."
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


def read_options(overrides: Sequence[str]) -> Options:
    """Return the options of overrides; `InputError` if they are invalid, or if an output exists."""
    given, settings = dict[str, Any](), dict[str, Any]()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or (key not in _KEYS and not key.startswith(_PREFIX) and key != SEARCHPATH_KEY):
            raise InputError(
                f"{override} has no effect on fedssl-classify{did_you_mean(key, _KEYS)}; allowed are "
                f"{'=, '.join(_KEYS)}= and dataset.KEY="
            )
        if key.startswith(_PREFIX):
            settings[key.removeprefix(_PREFIX)] = parse(literal_values([override]))[0].value()
        elif key != SEARCHPATH_KEY:
            given[key] = _value(key, text)
    source = [given.pop(key) for key in _SOURCES if key in given]
    if len(source) != 1:
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    _check_use(given)
    if "labeled" in given and "images" in given:
        given.setdefault("out", Path("predictions.csv"))
    if given.get("label_next"):
        given.setdefault("next", Path("label_next.csv"))
    _check_outputs({key: given[key] for key in _OUTPUTS if key in given})
    return Options(source=source[0], settings=settings, folders=search_folders(overrides), **given)


def _value(key: str, text: str) -> Any:
    if key in _NUMBERS:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise InputError(f"{key}={text} is not a whole number from 0; correct it")
        return int(text)
    if key in _FLAGS:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{key}={text} is not valid; choose {key}=true or {key}=false")
        return text.lower() == "true"
    if key in _WORDS:
        return text
    if not text:
        raise InputError(f"{key}= names no path; write {key}=PATH")
    return path_of(text)


def _check_use(given: Mapping[str, Any]) -> None:
    """Raise an `InputError` if an option needs another one."""
    if "labeled" not in given and not ("images" in given and given.get("label_next")):
        raise InputError(
            "labeled is missing; add labeled=PATH, or choose first images to label with images=PATH label_next=20"
        )
    for key, other in _NEEDS:
        if key in given and not given.get(other):
            raise InputError(f"{key}={given[key]} needs {other}; add {other}=..., or remove {key}")


def _check_outputs(outputs: Mapping[str, Path]) -> None:
    for key, file in outputs.items():
        if file.suffix.lower() != _OUTPUTS[key]:
            raise InputError(f"{key}={file} must be the name of a file that ends in {_OUTPUTS[key]}; change it")
        if file.exists():
            raise InputError(f"{key}={file} exists already; remove it, or choose another file with {key}=")
        if not file.absolute().parent.is_dir():
            raise InputError(f"{key}={file} is in a folder that does not exist; create {file.parent} first")
    if len(set(outputs.values())) < len(outputs):
        raise InputError(f"two of {'=, '.join(outputs)}= name the same file; choose different ones")
