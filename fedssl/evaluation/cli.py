"""The command ``fedssl-evaluate``: the encoder of a finished run under an evaluation protocol, on any data set.

    fedssl-evaluate run=DIR [evaluation=NAME] [dataset=NAME] [key=value ...]
    fedssl-evaluate encoder=FILE dataset=NAME ...

An encoder or a data set of your own is found in the folder of settings that ``--config-dir FOLDER`` names.
Without ``dataset=`` the data set is the run's, and ``dataset.key=value`` changes its settings (``dataset.path=...``).
The images are brought to the size the encoder was trained on, unless ``dataset.size=`` says otherwise, and always
standardised as in its training. The result is printed and written to ``evaluation/<protocol>-<dataset>.json`` beside
the encoder; a protocol such as ``fedu/linear`` is called ``fedu_linear`` there.
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
from fedssl.evaluation.evaluation_input import EvaluationInput, make_evaluation_input, why_not_evaluable
from fedssl.evaluation.protocol import evaluate
from fedssl.evaluation.scores import Score, to_flat_dict, units_of
from fedssl.export import load_encoder, saved_target
from fedssl.machine.devices import select_device
from fedssl.report.accuracy_table import format_table
from fedssl.untrusted import sanitize

USAGE = (
    "usage: fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes|semi_supervised|fine_tune|transfer|\n"
    "       PAPER/linear|PAPER/fine_tune] [dataset=NAME] [dataset.path=PATH] [key=value ...]\n"
    "       fedssl-evaluate encoder=FILE dataset=NAME ...\n"
    "       --config-dir FOLDER: your own settings, where the encoder or the data set is one of yours"
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
    """Evaluate as the command-line words say, write the JSON file, and return the text to print.

    Raises
    ------
    InputError
        The encoder, the settings or the data set cannot be used, or do not fit each other.
    """
    own = {key: value for key, _, value in map(_split, overrides) if key in ("run", "encoder")}
    others = [word for word in overrides if _split(word)[0] not in own]
    file = encoder_file(own)
    settings = compose_evaluation(others, run=Path(own["run"]) if "run" in own else None)
    protocol = settings.evaluation.protocol.instantiate()
    torch.set_num_threads(settings.machine.threads)
    encoder = load_encoder(file, build=user_encoder(saved_target(file), others))
    own_size = any(_split(word)[0] == "dataset.size" for word in overrides)
    data = as_in_training(encoder, settings.data, own_size=own_size)
    subject = subject_of(encoder, data, device=settings.machine.device)
    results = evaluate(protocol, subject, seed=settings.seed)
    name = data.name.rpartition("/")[2]
    chosen = {"evaluation": "knn", **{key: value for key, _, value in map(_split, others)}}["evaluation"]
    report = file.parent / "evaluation" / f"{chosen.replace('/', '_')}-{name}.json"
    _write(report, _content(file, settings, data, subject, results))
    return f"{format_table({name: results})}\nwritten to {report}"


def encoder_file(own: Mapping[str, str]) -> Path:
    """Find the encoder that ``run=DIR`` or ``encoder=FILE`` names; raises `InputError` if there is none."""
    if len(own) != 1:
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    file = Path(own["run"], "encoder.pt") if "run" in own else Path(own["encoder"])
    if not file.is_file():
        unfinished = "run" in own and Path(own["run"], "config.yaml").is_file()
        advice = (
            f"finish the run with fedssl resume={own['run']}" if unfinished else "give the folder of a finished run"
        )
        several = sorted(file.parent.glob("encoder-*.pt"))
        if several:  # the run has several models
            advice = f"the run has {len(several)} encoders; give one of them: encoder={several[0]}"
        raise InputError(f"there is no {file}; {advice}")
    return file


def as_in_training(encoder: Any, data: DataSettings, *, own_size: bool) -> DataSettings:
    """Bring the images into the form that the encoder was trained on, the size only if they have no ``own_size``.

    Raises
    ------
    InputError
        The encoder takes another number of channels.
    """
    if data.channels != encoder.channels:
        raise InputError(
            f"the encoder takes images with {encoder.channels} channel(s) but dataset.channels="
            f"{data.channels}; add dataset.channels={encoder.channels} to convert the images"
        )
    if not own_size:
        data = data.resized(encoder.size)
    return replace(data, mean=encoder.mean, std=encoder.std)


def subject_of(encoder: Any, data: DataSettings, *, device: str) -> EvaluationInput:
    """Join the encoder and the labelled images of the data set; raises `InputError` if it has none."""
    subject = make_evaluation_input(encoder, data, device=select_device(device))
    if subject is None:
        raise InputError(f"{why_not_evaluable(data)}, or choose another data set with dataset=")
    return subject


def _content(
    file: Path, settings: Settings, data: DataSettings, subject: EvaluationInput, results: Mapping[str, Score]
) -> dict[str, Any]:
    """Collect what the JSON file says."""
    return {
        "encoder": str(file),
        "evaluation": settings.evaluation.protocol.values,
        "dataset": asdict(data),
        "seed": settings.seed,
        "images": {"train": len(subject.train.labels), "test": len(subject.test.labels)},
        "results": to_flat_dict(results),
        "units": units_of(results),
    }


def _split(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        make_subfolder(file.parent.parent, file.parent.name)
        write_text(file, json.dumps(content, indent=2) + "\n")
    except (OSError, ValueError) as error:  # the data set's name may be none of a file
        raise InputError(f"{file} cannot be written ({error}); make its folder writable") from error
