"""Snapshots: models of single rounds, which a run saves if it is asked to (``snapshot_every``), for plots of them.

``models/round-000010/`` has what the server held after round 10, ``model-<name>.pt``, and what every client sent that
was used, ``client-<number>.pt``. Models of the server come last: without them the round was not finished.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import atomic_write, make_subfolder, remove
from fedssl.errors import InputError
from fedssl.untrusted import check_tensors_like, corrupt_file_error, read_tensors

FOLDER = "models"

_ROUND = re.compile(r"round-(\d{6,})")
_MODEL = re.compile(r"(model|client)-(.+)\.pt")


def round_folder(folder: Path, round: int) -> Path:
    """Where the models of a round are, or would be."""
    return folder / FOLDER / f"round-{round:06d}"


def save_layers(folder: Path, round: int, name: str, layers: Layers) -> None:
    """Write layers to ``models/round-<round>/<name>.pt`` of a run folder."""
    place = make_subfolder(make_subfolder(folder, FOLDER), round_folder(folder, round).name)
    tensors = {layer: torch.from_numpy(np.asarray(array)) for layer, array in layers.items()}
    atomic_write(place / f"{name}.pt", lambda stream: torch.save(tensors, stream))


def forget_after(folder: Path, round: int) -> None:
    """Remove the models of later rounds, which a resumed run does again."""
    for number, place in _places(folder):
        if number > round:
            for file in place.iterdir():
                remove(file)
            place.rmdir()


@dataclass(frozen=True)
class KeptRound:
    """Where the models of one round are.

    Attributes
    ----------
    round : int
    models : mapping of str to Path
        Of the server after the round, by name.
    clients : mapping of int to Path
        As they were sent in the round.
    """

    round: int
    models: Mapping[str, Path]
    clients: Mapping[int, Path]


def kept_rounds(folder: Path) -> list[KeptRound]:
    """The finished rounds whose models a run folder keeps, ascending.

    Raises
    ------
    InputError
        It keeps none.
    """
    found = sorted((_kept(number, place) for number, place in _places(folder)), key=lambda one: one.round)
    found = [one for one in found if one.models]
    if not found:
        raise InputError(
            f"{folder} keeps no models of its rounds, which this figure looks into; run it again with snapshot_every=1 "
            "(or every how many rounds they are to be kept)"
        )
    return found


def read_layers(file: Path, like: Mapping[str, torch.Tensor]) -> Layers:
    """Read what `save_layers` wrote.

    Parameters
    ----------
    file : Path
    like : mapping of str to Tensor
        The layers that a model may have: names, shapes and dtypes must be theirs.

    Raises
    ------
    InputError
        The file is damaged, or of another model.
    """
    try:
        found = read_tensors(file, max_bytes=2 * sum(tensor.nbytes for tensor in like.values()) + 2**24)
    except Exception as error:  # there is no end to how reading a foreign file can fail
        raise corrupt_file_error(file, "it does not hold layers") from error
    if not isinstance(found, dict) or not found.keys() <= like.keys():
        raise corrupt_file_error(file, "it does not hold layers of this run's model")
    try:
        check_tensors_like(found, like)
    except ValueError as error:
        raise corrupt_file_error(file, "it does not hold layers of this run's model") from error
    return {name: tensor.numpy() for name, tensor in found.items()}


def _places(folder: Path) -> list[tuple[int, Path]]:
    """The rounds of which there are models, and where."""
    places = [(match, place) for place in (folder / FOLDER).glob("*") if (match := _ROUND.fullmatch(place.name))]
    for _, place in places:
        if not place.is_dir():
            raise InputError(f"{place} has the place of the models of a round, but is no folder; remove it")
    return [(int(match[1]), place) for match, place in places]


def _kept(round: int, place: Path) -> KeptRound:
    found: dict[str, dict[str, Path]] = {"model": {}, "client": {}}
    for file in place.iterdir():
        if match := _MODEL.fullmatch(file.name):
            found[match[1]][match[2]] = file
    clients = {int(name): file for name, file in found["client"].items() if name.isdecimal()}
    models = dict(sorted(found["model"].items(), key=lambda pair: (len(pair[0]), pair[0])))
    return KeptRound(round, models, dict(sorted(clients.items())))


class SnapshotWriter:
    """Writes models of one round after the other into a run folder.

    Parameters
    ----------
    folder : Path
        The run folder.
    round : int
    """

    def __init__(self, folder: Path, round: int) -> None:
        self._folder, self._round = folder, round

    def observe(self, client: int, layers: Layers) -> None:
        """Keep what a client sent."""
        save_layers(self._folder, self._round, f"client-{client}", layers)

    def finish(self, models: Mapping[str, Layers], *, used: Collection[int]) -> None:
        """Keep the server's models after the round; ``used`` are the clients whose updates went into them."""
        names = {f"client-{client}.pt" for client in used}
        for file in round_folder(self._folder, self._round).glob("client-*.pt"):
            if file.name not in names:  # of an attempt that failed
                remove(file)
        for name, layers in models.items():
            save_layers(self._folder, self._round, f"model-{name}", layers)
