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
from strategies.interfaces import GlobalModel, ServerState

log = logging.getLogger("fedssl")

FORMAT = 4  # of the run; 1 had one model and no name for it, 2 had what clients keep in another form, 3 had other names


@dataclass(frozen=True, kw_only=True)
class StateSchema:
    """Properties of a run's state, to validate checkpoints.

    Attributes
    ----------
    untrained : GlobalModel
        Names, shapes and dtypes of all models.
    clients, phases : int
        Of the run. There is at most one model per client and a global one.
    is_valid_model_state, is_valid_strategy_state : callable
        Validate the strategy's state of a model, and of the run.
    """

    untrained: GlobalModel
    clients: int
    phases: int
    is_valid_model_state: Callable[[Mapping[str, Any]], bool]
    is_valid_strategy_state: Callable[[Mapping[str, Any]], bool]

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of a checkpoint. States of strategy and server optimizer are a few more models."""
        arrays = (*self.untrained.layers.values(), *self.untrained.broadcast.values())
        return 2**26 + 16 * (self.clients + 1) * sum(array.nbytes for array in arrays)

    def check(self, state: ServerState) -> None:
        """Raise `ValueError` for a state that no round of the run can produce."""
        for name, model in _require_mapping(state.models).items():
            valid_phase = is_count(model.phase, minimum=1) and model.phase <= self.phases
            if not isinstance(name, str) or not valid_phase or not is_count(model.num_updates, minimum=0):
                raise ValueError("a model's name, phase or number of updates is invalid")
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
                raise ValueError("the last participation of its clients is invalid")


def save_checkpoint(folder: Path, state: ServerState, *, keep: int) -> None:
    """Write the state and its SHA-256 checksum, and delete all but the newest ``keep`` checkpoints."""
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
    """Return the state of the newest valid checkpoint; None if there is no checkpoint.

    A checkpoint that is damaged or does not fit ``schema`` is logged, and the previous one is used.

    Raises
    ------
    InputError
        All checkpoints are damaged or of another model, or they have an earlier format.
    """
    rounds = saved_rounds(folder)
    problem = ""
    for round in reversed(rounds):
        file = round_file(folder, round)
        try:
            state = _load(file, max_bytes=MAX_TENSORS_BYTES if schema is None else schema.max_bytes)
            if state.round != round:
                raise ValueError(f"it contains round {state.round}")
            if schema is not None:
                schema.check(state)
            return state
        except InputError:
            raise
        except Exception as error:  # reading a foreign file can fail in any way
            problem = " ".join(sanitize(error).split())[:200] or type(error).__name__
            log.warning("checkpoint %s is damaged (%s); trying the previous one", file, problem)
    if rounds:
        raise InputError(
            f"all checkpoints in {folder} are damaged ({len(rounds)} found; the first {problem}); start a new run"
        )
    return None


def delete_checkpoints_after(folder: Path, round: int) -> None:
    """Delete checkpoints of later rounds. They are damaged and would count as the newest ones."""
    for later in saved_rounds(folder):
        if later > round:
            remove(round_file(folder, later))
            remove(_checksum_file(round_file(folder, later)))


def _checksum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _load(file: Path, *, max_bytes: int) -> ServerState:
    """Read a checkpoint; raises `InputError` for an earlier format, and any exception for an invalid file."""
    with open_regular_file(_checksum_file(file), max_bytes=64) as stream:
        if stream.read() != _digest(file, max_bytes=max_bytes).encode():
            raise ValueError("its checksum is wrong")
    saved = read_tensors(file, max_bytes=max_bytes)
    version = saved.pop("format", 1)
    if version in range(1, FORMAT):
        raise InputError(
            f"{file} has the format of an earlier version of fedssl; resume with that version, or start a new run"
        )
    if version != FORMAT:
        raise ValueError("it is not a checkpoint")
    return _to_state(saved)


def _digest(file: Path, *, max_bytes: int = MAX_TENSORS_BYTES) -> str:
    with open_regular_file(file, max_bytes=max_bytes) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_serializable(value: Any) -> Any:
    """Convert dataclasses to dictionaries and arrays to tensors, which ``weights_only`` can load."""
    if is_dataclass(value):
        return {one.name: _to_serializable(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_serializable(inner) for key, inner in value.items()}
    # A NumPy scalar, the result of arithmetic on an array without dimensions, becomes such an array again.
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _to_state(saved: dict[str, Any]) -> ServerState:
    values = _to_arrays(saved)
    return ServerState(**{**values, "models": {name: GlobalModel(**model) for name, model in values["models"].items()}})


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_arrays(inner) for key, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _check_memory(memory: Any, is_valid: Callable[[Mapping[str, Any]], bool]) -> None:
    for value in iter_leaves(_require_mapping(memory)):
        if isinstance(value, np.ndarray | float) and not np.isfinite(value).all():
            raise ValueError("the state of the strategy is not finite")
    if not is_valid(memory):
        raise ValueError("the state of the strategy is invalid")


def is_count(value: Any, *, minimum: int) -> bool:
    """Return whether the value is an integer from ``minimum`` to 2^31."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**31


def _check_layers(layers: Any, like: Layers, *, all_of_them: bool = False, same_dtype: bool = True) -> None:
    names = _require_mapping(layers).keys()
    if (all_of_them and names != like.keys()) or not names <= like.keys():
        raise ValueError("its layers have other names than those of the model")
    for name, array in layers.items():
        wanted = like[name]
        if not isinstance(array, np.ndarray) or array.shape != wanted.shape:
            raise ValueError(f"{name} has another shape than in the model")
        if array.dtype != wanted.dtype if same_dtype else array.dtype.kind not in "fiu":
            raise ValueError(f"{name} has another dtype than in the model")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has values that are not finite")


def _require_mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"it contains a {type(value).__name__} instead of a mapping")
    return value
