"""Checkpoints: the server's state after a round, written whole or not at all."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fedssl.atomic_files import atomic_write, remove, round_file, saved_rounds, write_text
from fedssl.errors import InputError
from fedssl.untrusted import MAX_TENSORS_BYTES, open_regular_file, read_tensors, sanitize
from server_app.proven import StateSchema
from strategies.state import GlobalModel, ServerState

log = logging.getLogger("fedssl")

FORMAT = 4  # of the run; 1 had one model and no name for it, 2 had what clients keep in another form, 3 had other names


def save_checkpoint(folder: Path, state: ServerState, *, keep: int) -> None:
    """Write the state with its SHA-256 beside it and leave the newest ``keep`` checkpoints in the folder."""
    folder.mkdir(exist_ok=True)
    file = round_file(folder, state.round)

    def write(stream: BinaryIO) -> None:
        torch.save({"format": FORMAT, **_to_serializable(state)}, stream)
        stream.flush()
        write_text(_checksum_file(file), _digest(Path(stream.name)))

    try:
        atomic_write(file, write)
    except BaseException:
        if not file.exists():
            _checksum_file(file).unlink(missing_ok=True)
        raise
    for round in saved_rounds(folder)[:-keep]:
        old = round_file(folder, round)
        remove(old)
        remove(_checksum_file(old))


def latest_checkpoint(folder: Path, schema: StateSchema | None = None) -> ServerState | None:
    """The newest undamaged checkpoint; None if there is no checkpoint yet.

    A damaged one is named in the log and the one before it is used.

    Parameters
    ----------
    folder : Path
    schema : StateSchema or None
        What must hold of the state; None: this is not looked at.

    Raises
    ------
    InputError
        There are checkpoints, all of them damaged or of another model, or they are of an earlier version.
    """
    rounds = saved_rounds(folder)
    problem = ""
    for round in reversed(rounds):
        file = round_file(folder, round)
        try:
            state = _load(file, max_bytes=MAX_TENSORS_BYTES if schema is None else schema.max_bytes)
            if state.round != round:
                raise ValueError(f"it is of round {state.round}")
            if schema is not None:
                schema.check(state)
            return state
        except InputError:
            raise
        except Exception as error:  # there is no end to how reading a foreign file can fail
            problem = " ".join(sanitize(error).split())[:200] or type(error).__name__
            log.warning("checkpoint %s is damaged (%s); trying the one before", file, problem)
    if rounds:
        raise InputError(
            f"all checkpoints in {folder} are damaged ({len(rounds)} found; the first {problem}); start a new run"
        )
    return None


def delete_checkpoints_after(folder: Path, round: int) -> None:
    """Remove checkpoints of later rounds: damaged ones, which would count among those that are kept."""
    for later in saved_rounds(folder):
        if later > round:
            remove(round_file(folder, later))
            remove(_checksum_file(round_file(folder, later)))


def _checksum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _load(file: Path, *, max_bytes: int) -> ServerState:
    """Read a checkpoint; raises `InputError` if it is of an earlier version, and anything if it is something else."""
    with open_regular_file(_checksum_file(file), max_bytes=64) as stream:
        if stream.read() != _digest(file, max_bytes=max_bytes).encode():
            raise ValueError("its sum is another one")
    saved = read_tensors(file, max_bytes=max_bytes)
    version = saved.pop("format", 1)
    if version in range(1, FORMAT):
        raise InputError(f"{file} is of an earlier version of fedssl; go on with that version, or start anew")
    if version != FORMAT:
        raise ValueError("it holds something else")
    return _to_state(saved)


def _digest(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> str:
    with open_regular_file(file, max_bytes=max_bytes) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_serializable(value: Any) -> Any:
    """Values as dictionaries and arrays as tensors, all the way down: what ``weights_only`` can read back."""
    if is_dataclass(value):
        return {one.name: _to_serializable(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_serializable(inner) for key, inner in value.items()}
    # A scalar of NumPy, as arithmetic on an array without dimensions gives it, is such an array again.
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _to_state(saved: dict[str, Any]) -> ServerState:
    """The state that `_to_plain` took apart."""
    iter_leaves = _to_arrays(saved)
    return ServerState(
        **{**iter_leaves, "models": {name: GlobalModel(**model) for name, model in iter_leaves["models"].items()}}
    )


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_arrays(inner) for key, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
