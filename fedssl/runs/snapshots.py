"""Snapshots: models of single rounds, which a run saves with ``snapshot_every``, for plots.

``models/round-000010/`` has the server's models after round 10, ``model-<name>.pt``, and the updates that were used,
``client-<number>.pt``. The server's models are written last: without them the round was not finished.
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
from fedssl.safe_io import check_tensors_like, corrupt_file_error, read_tensors

FOLDER = "models"

_ROUND = re.compile(r"round-(\d{6,})")
_MODEL = re.compile(r"(model|client)-(.+)\.pt")


def round_folder(folder: Path, round: int) -> Path:
    """Return the folder of the models of a round."""
    return folder / FOLDER / f"round-{round:06d}"


def save_layers(folder: Path, round: int, name: str, layers: Layers) -> None:
    """Write layers to ``models/round-<round>/<name>.pt`` of a run folder."""
    path = make_subfolder(make_subfolder(folder, FOLDER), round_folder(folder, round).name)
    tensors = {layer: torch.from_numpy(np.asarray(array)) for layer, array in layers.items()}
    atomic_write(path / f"{name}.pt", lambda stream: torch.save(tensors, stream))


def remove_later_snapshots(folder: Path, round: int) -> None:
    """Remove the models of later rounds, which a resumed run repeats."""
    for number, path in _round_folders(folder):
        if number > round:
            for file in path.iterdir():
                remove(file)
            path.rmdir()


@dataclass(frozen=True)
class SnapshotRound:
    """Files of the server's models after a round, by name, and of the clients' updates in it."""

    round: int
    models: Mapping[str, Path]
    clients: Mapping[int, Path]


def snapshot_rounds(folder: Path) -> list[SnapshotRound]:
    """Return the finished rounds with snapshots, ascending; raise an `InputError` if there are none."""
    rounds = [_snapshot_round(number, path) for number, path in sorted(_round_folders(folder))]
    finished = [snapshot for snapshot in rounds if snapshot.models]
    if not finished:
        raise InputError(
            f"{folder} has no snapshots of models, which this figure needs; run it again with snapshot_every=N (rounds)"
        )
    return finished


def read_snapshot_layers(file: Path, like: Mapping[str, torch.Tensor]) -> Layers:
    """Read a file of `save_layers` of a model with layers ``like``; a damaged or foreign file is an `InputError`."""
    try:
        tensors = read_tensors(file, max_bytes=2 * sum(tensor.nbytes for tensor in like.values()) + 2**24)
    except Exception as error:  # reading a foreign file can raise any exception
        raise corrupt_file_error(file, "it does not contain layers") from error
    try:
        if not isinstance(tensors, dict) or not tensors.keys() <= like.keys():
            raise ValueError("other names")
        check_tensors_like(tensors, like)
    except ValueError as error:
        raise corrupt_file_error(file, "it does not contain layers of this run's model") from error
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _round_folders(folder: Path) -> list[tuple[int, Path]]:
    matches = [(match, path) for path in (folder / FOLDER).glob("*") if (match := _ROUND.fullmatch(path.name))]
    for _, path in matches:
        if not path.is_dir():
            raise InputError(f"{path} must be a folder of models; remove the file")
    return [(int(match[1]), path) for match, path in matches]


def _snapshot_round(round: int, path: Path) -> SnapshotRound:
    files: dict[str, dict[str, Path]] = {"model": {}, "client": {}}
    for file in path.iterdir():
        if match := _MODEL.fullmatch(file.name):
            files[match[1]][match[2]] = file
    clients = {int(name): file for name, file in files["client"].items() if name.isdecimal()}
    models = dict(sorted(files["model"].items(), key=lambda pair: (len(pair[0]), pair[0])))
    return SnapshotRound(round, models, dict(sorted(clients.items())))


def finish_round(folder: Path, round: int, models: Mapping[str, Layers], *, used: Collection[int]) -> None:
    """Save the server's models after a round; remove updates of other clients than ``used``."""
    names = {f"client-{client}.pt" for client in used}
    for file in round_folder(folder, round).glob("client-*.pt"):
        if file.name not in names:  # of a failed attempt
            remove(file)
    for name, layers in models.items():
        save_layers(folder, round, f"model-{name}", layers)
