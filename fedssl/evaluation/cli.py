"""The command ``fedssl-evaluate``: the encoder of a finished run under an evaluation protocol, on any data set.

    fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes] [dataset=NAME] [key=value ...]
    fedssl-evaluate encoder=FILE dataset=NAME ...

Without ``dataset=`` the data set is the run's, and ``dataset.key=value`` changes its settings (``dataset.path=...``).
The pictures are brought to the size the encoder was trained on, unless ``dataset.size=`` says otherwise, and always
standardised as in its training. The result is printed and written to ``evaluation/<protocol>-<dataset>.json`` beside
the encoder.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from fedssl.config import compose, make
from fedssl.datasets.base import load
from fedssl.errors import InputError
from fedssl.evaluation.features import Features, extract
from fedssl.export import load_encoder
from fedssl.machine.devices import pick_device
from fedssl.report.accuracy_table import format_table

USAGE = (
    "usage: fedssl-evaluate run=DIR [evaluation=knn|linear|few_labels|probes] [dataset=NAME] [dataset.path=PATH] "
    "[key=value ...]\n       fedssl-evaluate encoder=FILE dataset=NAME ..."
)


def main() -> int:
    """Entry point; returns the exit status, 2 for what the user has to put right."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    try:
        print(run(words))
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
    settings = read_settings(others, run=Path(own["run"]) if "run" in own else None)
    evaluation = make(settings.evaluation)
    torch.set_num_threads(settings.threads)
    encoder: Any = load_encoder(file)
    if not any(_split(word)[0] == "dataset.size" for word in words):
        settings.dataset.size = encoder.size
    if settings.dataset.channels != encoder.channels:
        raise InputError(
            f"the encoder takes pictures with {encoder.channels} channel(s) but dataset.channels="
            f"{settings.dataset.channels}; add dataset.channels={encoder.channels} to convert the pictures"
        )
    settings.dataset.mean, settings.dataset.std = list(encoder.mean), list(encoder.std)
    data = features(encoder, settings)
    results = evaluation(data, seed=settings.seed)
    name = _name(settings.dataset)
    protocol = {"evaluation": "knn", **{key: value for key, _, value in map(_split, others)}}["evaluation"]
    report = file.parent / "evaluation" / f"{protocol}-{name}.json"
    content = {
        "encoder": str(file),
        "evaluation": OmegaConf.to_container(settings.evaluation),
        "dataset": OmegaConf.to_container(settings.dataset),
        "seed": settings.seed,
        "pictures": {"train": len(data.train), "test": len(data.test)},
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


def read_settings(words: Sequence[str], *, run: Path | None) -> DictConfig:
    """The settings of the command line, with the data set and seed of ``run`` where the command line has none.

    Raises
    ------
    InputError
        A word is not valid, or nothing says which data set.
    """
    keys = [_split(word)[0] for word in words]
    if run is None:
        if "dataset" not in keys:
            raise InputError("encoder=FILE does not say which data set; add dataset=NAME, e.g. dataset=cifar10")
        return compose(words)
    saved = load_settings(run)
    changes = [] if "dataset" in keys else [word for word in words if word.startswith("dataset.")]
    settings = compose([word for word in words if word not in changes])
    if "dataset" not in keys:
        try:
            settings.dataset = OmegaConf.merge(saved, OmegaConf.from_dotlist(changes)).dataset
        except OmegaConfBaseException as error:
            raise InputError(
                f"{' '.join(changes)} does not fit the data set of {run}, which has the settings "
                f"{', '.join(map(str, saved.dataset))}; add dataset=NAME for another data set"
            ) from error
    if "seed" not in keys:
        settings.seed = saved.seed
    return settings


def load_settings(run: Path) -> DictConfig:
    """The settings that a run saved; unknown keys cannot be merged into them."""
    try:
        saved = OmegaConf.load(run / "config.yaml")
    except OSError as error:
        raise InputError(
            f"{run / 'config.yaml'} cannot be read; give the folder of a run, or encoder=FILE dataset=NAME"
        ) from error
    assert isinstance(saved, DictConfig)
    OmegaConf.set_struct(saved, True)
    return saved


def features(encoder: nn.Module, settings: DictConfig) -> Features:
    """Features of the labelled pictures of the data set; raises `InputError` if it has none."""
    train, test = load(settings.dataset, "train"), load(settings.dataset, "test")
    if train is None or train.labels is None or test is None or test.labels is None:
        missing = "training" if train is None else "test"
        raise InputError(
            f"the data set has no labelled {missing} pictures to evaluate with; choose another with dataset=, or give "
            "dataset=image_folder a folder with one subfolder per class"
        )
    maps = [
        extract(
            encoder,
            pictures.images,
            mean=settings.dataset.mean,
            std=settings.dataset.std,
            device=pick_device(settings.device),
        )
        for pictures in (train, test)
    ]
    return Features(maps[0], train.labels, maps[1], test.labels, num_classes=int(train.labels.max()) + 1)


def _split(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _name(dataset: DictConfig) -> str:
    """What the data set is called: the last part of its name on the Hub, or the module that reads it."""
    return str(dataset.hub if "hub" in dataset else dataset["_target_"].split(".")[-2]).rpartition("/")[2]


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); make its folder writable") from error
