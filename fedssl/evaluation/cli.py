"""The command ``fedssl-evaluate``: the encoder of a finished run under an evaluation protocol, on any data set.

    fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes] [dataset=NAME] [key=value ...]
    fedssl-evaluate encoder=FILE dataset=NAME ...

An encoder or a data set of your own is found in the folder of settings that ``--config-dir FOLDER`` names.
Without ``dataset=`` the data set is the run's, and ``dataset.key=value`` changes its settings (``dataset.path=...``).
The pictures are brought to the size the encoder was trained on, unless ``dataset.size=`` says otherwise, and always
standardised as in its training. The result is printed and written to ``evaluation/<protocol>-<dataset>.json`` beside
the encoder.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedssl.config import compose_evaluation
from fedssl.datasets.base import load
from fedssl.errors import InputError
from fedssl.evaluation.features import Features, extract
from fedssl.export import load_encoder, saved_target
from fedssl.files import write_text
from fedssl.machine.devices import pick_device
from fedssl.plugins import from_arguments, own_encoder
from fedssl.report.accuracy_table import format_table
from fedssl.settings import DataSettings

USAGE = (
    "usage: fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes] [dataset=NAME] [dataset.path=PATH] "
    "[key=value ...]\n       fedssl-evaluate encoder=FILE dataset=NAME ...\n"
    "       --config-dir FOLDER: your own settings, where the encoder or the data set is one of yours"
)


def main() -> int:
    """Entry point; returns the exit status, 2 for what the user has to put right."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        return 0 if sys.argv[1:] else 2
    try:
        print(run(from_arguments(sys.argv[1:])))
    except InputError as error:
        print(f"fedssl-evaluate: {error}", file=sys.stderr)
        return 2
    return 0


def run(words: Sequence[str]) -> str:
    """Evaluate as the command-line words say, write the JSON file, and return the text to print.

    Raises
    ------
    InputError
        The encoder, the settings or the data set cannot be used, or do not fit each other.
    """
    own = {key: value for key, _, value in map(_split, words) if key in ("run", "encoder")}
    others = [word for word in words if _split(word)[0] not in own]
    file = encoder_file(own)
    settings = compose_evaluation(others, run=Path(own["run"]) if "run" in own else None)
    evaluation = settings.evaluation.protocol.make()
    torch.set_num_threads(settings.machine.threads)
    encoder: Any = load_encoder(file, build=own_encoder(saved_target(file), others))
    data = settings.data
    if data.channels != encoder.channels:
        raise InputError(
            f"the encoder takes pictures with {encoder.channels} channel(s) but dataset.channels="
            f"{data.channels}; add dataset.channels={encoder.channels} to convert the pictures"
        )
    if not any(_split(word)[0] == "dataset.size" for word in words):
        data = data.resized(encoder.size)
    data = replace(data, mean=encoder.mean, std=encoder.std)
    found = features(encoder, data, device=settings.machine.device)
    results = evaluation(found, seed=settings.seed)
    name = data.name.rpartition("/")[2]
    protocol = {"evaluation": "knn", **{key: value for key, _, value in map(_split, others)}}["evaluation"]
    report = file.parent / "evaluation" / f"{protocol}-{name}.json"
    content = {
        "encoder": str(file),
        "evaluation": settings.evaluation.protocol.values,
        "dataset": asdict(data),
        "seed": settings.seed,
        "pictures": {"train": len(found.train), "test": len(found.test)},
        "results": results,
    }
    _write(report, content)
    return f"{format_table({name: results})}\nwritten to {report}"


def encoder_file(own: Mapping[str, str]) -> Path:
    """The encoder that ``run=DIR`` or ``encoder=FILE`` names; raises `InputError` if there is none."""
    if len(own) != 1:
        raise InputError("give either run=DIR, the folder of a finished run, or encoder=FILE, its encoder.pt")
    file = Path(own["run"], "encoder.pt") if "run" in own else Path(own["encoder"])
    if not file.is_file():
        unfinished = "run" in own and Path(own["run"], "config.yaml").is_file()
        advice = (
            f"finish the run with fedssl resume={own['run']}" if unfinished else "give the folder of a finished run"
        )
        several = sorted(file.parent.glob("encoder-*.pt"))
        if several:  # every client has its own
            advice = f"the run has {len(several)} encoders; give one of them: encoder={several[0]}"
        raise InputError(f"there is no {file}; {advice}")
    return file


def features(encoder: nn.Module, data: DataSettings, *, device: str) -> Features:
    """Features of the labelled pictures of the data set; raises `InputError` if it has none."""
    train, test = load(data, "train"), load(data, "test")
    if train is None or train.labels is None or test is None or test.labels is None:
        missing = "training" if train is None else "test"
        raise InputError(
            f"the data set has no labelled {missing} pictures to evaluate with; choose another with dataset=, or give "
            "dataset=image_folder a folder with one subfolder per class"
        )
    maps = [
        extract(encoder, pictures.images, mean=data.mean, std=data.std, device=pick_device(device))
        for pictures in (train, test)
    ]
    return Features(maps[0], train.labels, maps[1], test.labels, num_classes=int(train.labels.max()) + 1)


def _split(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(exist_ok=True)
        write_text(file, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); make its folder writable") from error
