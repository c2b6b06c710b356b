"""Checkpoints of the server: the global layers after a round, written whole or not at all."""

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedssl.errors import InputError
from fedssl.layers import Layers

log = logging.getLogger("fedssl")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``round``: the global layers, and what the strategy keeps between rounds."""

    round: int
    layers: Layers
    strategy: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint with its SHA-256 beside it and leave the newest ``keep`` in the folder."""
    folder.mkdir(exist_ok=True)
    file = _file(folder, checkpoint.round)
    partial = folder / "partial"
    torch.save(
        {
            "round": checkpoint.round,
            "layers": {name: torch.from_numpy(array) for name, array in checkpoint.layers.items()},
            "strategy": checkpoint.strategy,
        },
        partial,
    )
    _sum_file(file).write_text(_digest(partial))
    os.replace(partial, file)
    for round in saved_rounds(folder)[:-keep]:
        old = _file(folder, round)
        old.unlink()
        _sum_file(old).unlink(missing_ok=True)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint; None if there is no checkpoint yet.

    A damaged one is named in the log and the one before it is used.

    Raises
    ------
    InputError
        There are checkpoints, all of them damaged.
    """
    rounds = saved_rounds(folder)
    for round in reversed(rounds):
        file = _file(folder, round)
        if _sum_file(file).is_file() and _sum_file(file).read_text() == _digest(file):
            saved = torch.load(file, weights_only=True)
            layers = {name: value.numpy() for name, value in saved["layers"].items()}
            return Checkpoint(saved["round"], layers, saved["strategy"])
        log.warning("checkpoint %s is damaged; trying the one before", file)
    if rounds:
        raise InputError(f"all checkpoints in {folder} are damaged ({len(rounds)} found); start a new run")
    return None


def drop_after(folder: Path, round: int) -> None:
    """Remove checkpoints of later rounds: damaged ones, which would count among those that are kept."""
    for later in saved_rounds(folder):
        if later > round:
            _file(folder, later).unlink()
            _sum_file(_file(folder, later)).unlink(missing_ok=True)


def saved_rounds(folder: Path) -> list[int]:
    """Rounds of which there is a checkpoint, ascending."""
    return sorted(int(file.stem.removeprefix("round-")) for file in folder.glob("round-*.pt"))


def _file(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.pt"


def _sum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
