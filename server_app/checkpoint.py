"""Checkpoints: the server's state after a round, written whole or not at all."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.errors import InputError
from fedssl.files import numbered_file, numbered_files, remove, write_text, write_whole
from strategies.state import Model, ServerState

log = logging.getLogger("fedssl")

FORMAT = 3  # of the run; 1 had one model and no name for it, 2 had what clients keep in another form


def save_checkpoint(folder: Path, state: ServerState, *, keep: int) -> None:
    """Write the state with its SHA-256 beside it and leave the newest ``keep`` checkpoints in the folder."""
    folder.mkdir(exist_ok=True)
    file = numbered_file(folder, state.round)

    def write(partial: Path) -> None:
        torch.save({"format": FORMAT, **_to_plain(state)}, partial)
        write_text(_sum_file(file), _digest(partial))

    write_whole(file, write)
    for round in numbered_files(folder)[:-keep]:
        old = numbered_file(folder, round)
        remove(old)
        remove(_sum_file(old))


def latest_checkpoint(folder: Path) -> ServerState | None:
    """The newest undamaged checkpoint; None if there is no checkpoint yet.

    A damaged one is named in the log and the one before it is used.

    Raises
    ------
    InputError
        There are checkpoints, all of them damaged, or they are of an earlier version.
    """
    rounds = numbered_files(folder)
    for round in reversed(rounds):
        file = numbered_file(folder, round)
        if _is_whole(file):
            return _load(file)
        log.warning("checkpoint %s is damaged; trying the one before", file)
    if rounds:
        raise InputError(f"all checkpoints in {folder} are damaged ({len(rounds)} found); start a new run")
    return None


def drop_after(folder: Path, round: int) -> None:
    """Remove checkpoints of later rounds: damaged ones, which would count among those that are kept."""
    for later in numbered_files(folder):
        if later > round:
            remove(numbered_file(folder, later))
            remove(_sum_file(numbered_file(folder, later)))


def _sum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _is_whole(file: Path) -> bool:
    """Whether the file is there and has the sum that stands beside it."""
    try:
        return _sum_file(file).read_bytes() == _digest(file).encode()
    except OSError:
        return False


def _load(file: Path) -> ServerState:
    """Read a checkpoint that is whole; raises `InputError` if it holds something else, or is of an earlier version."""
    try:
        saved = torch.load(file, weights_only=True)
        version = saved.pop("format", 1)
        state = _to_state(saved) if version == FORMAT else None
    except Exception as error:  # there is no end to how reading a foreign file can fail
        raise InputError(f"{file} holds something else than a checkpoint; remove it, or start a new run") from error
    if state is None:
        raise InputError(f"{file} is of an earlier version of fedssl; go on with that version, or start anew")
    return state


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_plain(value: Any) -> Any:
    """Values as dictionaries and arrays as tensors, all the way down: what ``weights_only`` can read back."""
    if is_dataclass(value):
        return {one.name: _to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_plain(inner) for key, inner in value.items()}
    # A scalar of NumPy, as arithmetic on an array without dimensions gives it, is such an array again.
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _to_state(saved: dict[str, Any]) -> ServerState:
    """The state that `_to_plain` took apart."""
    plain = _to_arrays(saved)
    return ServerState(**{**plain, "models": {name: Model(**model) for name, model in plain["models"].items()}})


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_arrays(inner) for key, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
