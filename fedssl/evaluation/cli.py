"""The command ``fedssl-evaluate``: evaluate the encoder of a finished run on any data set.

    fedssl-evaluate run=DIR [evaluation=NAME] [dataset=NAME] [key=value ...]
    fedssl-evaluate encoder=FILE dataset=NAME ...

``--config-dir FOLDER`` adds settings of your own encoders and data sets. The default data set is the run's;
``dataset.key=value`` changes its settings (``dataset.path=...``). Images are resized to the encoder's size, unless
``dataset.size=`` is given, and standardized as in its training. The result is printed and written to
``evaluation/<protocol>-<dataset>.json`` beside the encoder; the file of ``fedu/linear`` begins with ``fedu_linear``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedssl.atomic_files import make_subfolder, write_text
from fedssl.command_line import run_command
from fedssl.config.load import compose_evaluation
from fedssl.config.settings import DataSettings, Settings
from fedssl.config.targets import expand_config_dir_flag, user_encoder
from fedssl.errors import InputError
from fedssl.evaluation.protocol import EvaluationInput, evaluate, make_evaluation_input, why_not_evaluable
from fedssl.evaluation.scores import Score, format_table, to_flat_dict, units_of
from fedssl.export import load_encoder, saved_target
from fedssl.machine.devices import select_device
from fedssl.untrusted import sanitize

USAGE = (
    "usage: fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes|semi_supervised|fine_tune|transfer|\n"
    "       PAPER/linear|PAPER/fine_tune] [dataset=NAME] [dataset.path=PATH] [key=value ...]\n"
    "       fedssl-evaluate encoder=FILE dataset=NAME ...\n"
    "       --config-dir FOLDER: folder with the settings of your own encoder or data set"
)


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        return 0 if sys.argv[1:] else 2
    return run_command(
        "fedssl-evaluate", lambda: print(sanitize(run(expand_config_dir_flag(sys.argv[1:])), lines=True))
    )


def run(overrides: Sequence[str]) -> str:
    """Evaluate an encoder by the overrides, write the JSON file, and return the text to print.

    Raises
    ------
    InputError
        If the encoder, the settings or the data set is invalid, or they do not fit each other.
    """
    source = {key: value for key, _, value in map(_split, overrides) if key in ("run", "encoder")}
    others = [override for override in overrides if _split(override)[0] not in source]
    file = encoder_file(source)
    settings = compose_evaluation(others, run=Path(source["run"]) if "run" in source else None)
    protocol = settings.evaluation.protocol.instantiate()
    torch.set_num_threads(settings.machine.threads)
    encoder = load_encoder(file, build=user_encoder(saved_target(file), others))
    explicit_size = any(_split(override)[0] == "dataset.size" for override in overrides)
    data = match_encoder(encoder, settings.data, explicit_size=explicit_size)
    evaluation_input = _evaluation_input(encoder, data, device=settings.machine.device)
    results = evaluate(protocol, evaluation_input, seed=settings.seed)
    name = data.name.rpartition("/")[2]
    chosen = {"evaluation": "knn", **{key: value for key, _, value in map(_split, others)}}["evaluation"]
    report = file.parent / "evaluation" / f"{chosen.replace('/', '_')}-{name}.json"
    _write(report, _content(file, settings, data, evaluation_input, results))
    return f"{format_table({name: results})}\nwritten to {report}"


def encoder_file(source: Mapping[str, str]) -> Path:
    """Return the encoder file of ``run=DIR`` or ``encoder=FILE``; `InputError` if it does not exist."""
    if len(source) != 1:
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    file = Path(source["run"], "encoder.pt") if "run" in source else Path(source["encoder"])
    if not file.is_file():
        unfinished = "run" in source and Path(source["run"], "config.yaml").is_file()
        advice = (
            f"finish the run with fedssl resume={source['run']}" if unfinished else "give the folder of a finished run"
        )
        several = sorted(file.parent.glob("encoder-*.pt"))
        if several:  # the run has several models
            advice = f"the run has {len(several)} encoders; give one of them: encoder={several[0]}"
        raise InputError(f"{file} does not exist; {advice}")
    return file


def match_encoder(encoder: Any, data: DataSettings, *, explicit_size: bool) -> DataSettings:
    """Set the encoder's statistics, and its image size unless ``explicit_size``, in the settings of a data set.

    Raises
    ------
    InputError
        If the encoder needs another number of channels.
    """
    if data.channels != encoder.channels:
        raise InputError(
            f"the encoder needs images with {encoder.channels} channel(s) but dataset.channels="
            f"{data.channels}; add dataset.channels={encoder.channels} to convert the images"
        )
    if not explicit_size:
        data = data.resized(encoder.size)
    return replace(data, mean=encoder.mean, std=encoder.std)


def _evaluation_input(encoder: Any, data: DataSettings, *, device: str) -> EvaluationInput:
    evaluation_input = make_evaluation_input(encoder, data, device=select_device(device))
    if evaluation_input is None:
        raise InputError(f"{why_not_evaluable(data)}, or choose another data set with dataset=")
    return evaluation_input


def _content(
    file: Path, settings: Settings, data: DataSettings, evaluation_input: EvaluationInput, results: Mapping[str, Score]
) -> dict[str, Any]:
    return {
        "encoder": str(file),
        "evaluation": settings.evaluation.protocol.values,
        "dataset": asdict(data),
        "seed": settings.seed,
        "images": {"train": len(evaluation_input.train.labels), "test": len(evaluation_input.test.labels)},
        "results": to_flat_dict(results),
        "units": units_of(results),
    }


def _split(override: str) -> tuple[str, str, str]:
    return override.partition("=")


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        make_subfolder(file.parent.parent, file.parent.name)
        write_text(file, json.dumps(content, indent=2) + "\n")
    except (OSError, ValueError) as error:  # the data set's name may be an invalid file name
        raise InputError(f"{file} cannot be written ({error}); make its folder writable") from error
