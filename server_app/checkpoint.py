"""Checkpoints: the server's state after a round, written atomically and validated when read."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import atomic_write, remove, round_file, saved_rounds, write_text
from fedssl.errors import InputError
from fedssl.untrusted import MAX_TENSORS_BYTES, iter_leaves, open_regular_file, read_tensors, sanitize
from strategies.state import GlobalModel, ServerState

log = logging.getLogger("fedssl")

FORMAT = 4  # of the run; 1 had one model and no name for it, 2 had what clients keep in another form, 3 had other names


@dataclass(frozen=True, kw_only=True)
class StateSchema:
    """What is known of a run's state before it is read.

    Attributes
    ----------
    untrained : GlobalModel
        What all models are like in names, shapes and dtypes.
    clients, phases : int
        Of the run: there is at most a model for each client, and one for all.
    is_valid_model_state, is_valid_strategy_state : callable
        Whether what an algorithm remembers of a model, and of the whole, is what it can have.
    """

    untrained: GlobalModel
    clients: int
    phases: int
    is_valid_model_state: Callable[[Mapping[str, Any]], bool]
    is_valid_strategy_state: Callable[[Mapping[str, Any]], bool]

    @property
    def max_bytes(self) -> int:
        """Bytes that a checkpoint may have: what algorithm and server optimiser remember is a few more models."""
        arrays = (*self.untrained.layers.values(), *self.untrained.broadcast.values())
        return 2**26 + 16 * (self.clients + 1) * sum(array.nbytes for array in arrays)

    def check(self, state: ServerState) -> None:
        """Refuse, by a `ValueError`, a state that no round of the run can have led to."""
        for name, model in _require_mapping(state.models).items():
            numbers = (
                is_count(model.phase, minimum=1)
                and model.phase <= self.phases
                and is_count(model.num_updates, minimum=0)
            )
            if not isinstance(name, str) or not numbers:
                raise ValueError("a model's name, phase or updates are not those of a run")
            _check_layers(model.layers, self.untrained.layers, all_of_them=True)
            _check_layers(model.broadcast, self.untrained.broadcast, all_of_them=True)
            for moments in _require_mapping(model.server_optimizer_state).values():
                _check_layers(moments, self.untrained.layers, same_dtype=False)
            _check_memory(model.strategy_state, self.is_valid_model_state)
        _check_memory(state.strategy_state, self.is_valid_strategy_state)
        if len(state.models) > self.clients + 1:
            raise ValueError(f"it has {len(state.models)} models")
        for client, place in _require_mapping(state.last_participation).items():
            fits = isinstance(place, tuple) and len(place) == 2 and is_count(place[0], minimum=1)
            if not fits or not isinstance(place[1], str) or not is_count(client, minimum=0):
                raise ValueError("the rounds of its clients are not those of a run")


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


def _check_memory(memory: Any, is_valid: Callable[[Mapping[str, Any]], bool]) -> None:
    for value in iter_leaves(_require_mapping(memory)):
        if isinstance(value, np.ndarray | float) and not np.isfinite(value).all():
            raise ValueError("what the algorithm remembers is not finite")
    if not is_valid(memory):
        raise ValueError("what the algorithm remembers is none of its own")


def is_count(value: Any, *, minimum: int) -> bool:
    """Whether it is a whole number of rounds, clients or the like."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**31


def _check_layers(layers: Any, like: Layers, *, all_of_them: bool = False, same_dtype: bool = True) -> None:
    names = _require_mapping(layers).keys()
    if (all_of_them and names != like.keys()) or not names <= like.keys():
        raise ValueError("its layers have other names than the model's")
    for name, array in layers.items():
        wanted = like[name]
        if not isinstance(array, np.ndarray) or array.shape != wanted.shape:
            raise ValueError(f"{name} is of another shape than the model's")
        if array.dtype != wanted.dtype if same_dtype else array.dtype.kind not in "fiu":
            raise ValueError(f"{name} is of another dtype than the model's")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has values that are not finite")


def _require_mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"it holds a {type(value).__name__} in the place of several values")
    return value
