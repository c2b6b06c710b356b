"""Checkpoints: the server's state after a round, written atomically and validated when read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

import numpy as np
import torch

from fedssl.arrays import Layers
from fedssl.atomic_files import atomic_write, remove, round_file, saved_rounds
from fedssl.errors import InputError, sanitize
from fedssl.logs import log
from fedssl.runs.manifest import Manifest, Part, digest_of, read_manifest, write_manifest
from fedssl.safe_io import MAX_TENSORS_BYTES, iter_leaves, read_tensors
from server_app.client_models import ClientModels
from server_app.serialization import to_arrays, to_serializable
from strategies.types import GlobalModel, NoState, ServerState

FORMAT = 7  # of the run


@dataclass(frozen=True, kw_only=True)
class StateSchema:
    """Properties of a run's state, to validate checkpoints.

    Attributes
    ----------
    untrained : GlobalModel
        Names, shapes and dtypes of all models.
    clients, phases : int
        Of the run. There is at most one model per client and a global one.
    models_per_client : bool
        As `strategies.base.ServerStrategy.models_per_client`.
    model_state_type, strategy_state_type : type
        Types of the strategy's state of a model, and across models.
    """

    untrained: GlobalModel
    clients: int
    phases: int
    models_per_client: bool = False
    model_state_type: type = NoState
    strategy_state_type: type = NoState

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of a checkpoint. States of strategy and server optimizer are a few more models."""
        arrays = (*self.untrained.layers.values(), *self.untrained.broadcast.values())
        return 2**26 + 16 * (self.clients + 1) * sum(array.nbytes for array in arrays)

    def check(self, state: ServerState) -> None:
        """Raise `ValueError` for a state that no round of the run can produce."""
        for name, model in _require_mapping(state.models).items():
            self.check_model(name, model)
        _check_typed_dict(state.strategy_state, self.strategy_state_type)
        if len(state.models) > self.clients + 1:
            raise ValueError(f"it has {len(state.models)} models")
        for client, participation in _require_mapping(state.last_participation).items():
            is_valid = (
                isinstance(participation, tuple) and len(participation) == 2 and is_count(participation[0], minimum=1)
            )
            if not is_valid or not _is_model_name(participation[1]) or not is_count(client, minimum=0):
                raise ValueError("the last participation of its clients is invalid")
        rounds = (*_require_mapping(state.state_rounds).items(), *_require_mapping(state.evicted).items())
        for client, round in rounds:
            if not is_count(client, minimum=0) or not is_count(round, minimum=1) or round > state.round:
                raise ValueError("the states of its clients are invalid")
        for client, round in _require_mapping(state.dropped).items():
            if not is_count(client, minimum=0) or not is_count(round, minimum=0) or round > state.round:
                raise ValueError("the dropped clients are invalid")
        _check_in_flight(state.in_flight)

    def check_model(self, name: str, model: GlobalModel) -> None:
        """Raise `ValueError` for a model that the run cannot have."""
        valid_phase = is_count(model.phase, minimum=1) and model.phase <= self.phases
        if not _is_model_name(name) or not valid_phase or not is_count(model.num_updates, minimum=0):
            raise ValueError("a model's name, phase or number of updates is invalid")
        _check_layers(model.layers, self.untrained.layers, all_of_them=True)
        _check_layers(model.broadcast, self.untrained.broadcast, all_of_them=True)
        for mod_state in _require_mapping(model.mod_states).values():
            for layers in _require_mapping(mod_state).values():
                _check_layers(layers, self.untrained.layers, same_dtype=False)
        _check_typed_dict(model.strategy_state, self.model_state_type)


def check_strategy_states(state: ServerState, *, model_state_type: type, strategy_state_type: type) -> None:
    """Raise `ValueError` for states of a strategy that are not of the types it declares, or not finite."""
    for model in () if isinstance(state.models, ClientModels) else state.models.values():
        _check_typed_dict(model.strategy_state, model_state_type)
    _check_typed_dict(state.strategy_state, strategy_state_type)


def save_checkpoint(
    folder: Path, state: ServerState, *, keep: int, parts: Sequence[Part] = (), recoveries: Sequence[str] = ()
) -> None:
    """Write the state and its manifest, and delete all but the newest ``keep`` checkpoints.

    ``parts`` are the other files of the run folder without which the run cannot resume from here. Models of clients
    are among them.
    """
    folder.mkdir(exist_ok=True)
    file = round_file(folder, state.round)
    if isinstance(state.models, ClientModels):
        parts = [*parts, *state.models.parts]
        state = replace(state, models={})

    def write(stream: BinaryIO) -> None:
        torch.save({"format": FORMAT, **to_serializable(state)}, stream)
        stream.flush()
        written = Path(stream.name)
        own = Part(f"{folder.name}/{file.name}", written.stat().st_size, digest_of(written))
        write_manifest(manifest_file(file), Manifest((own, *parts), tuple(recoveries)))

    try:
        atomic_write(file, write)
    except BaseException:
        if not file.exists():
            manifest_file(file).unlink(missing_ok=True)
        raise
    for round in saved_rounds(folder)[:-keep]:
        old = round_file(folder, round)
        remove(old)
        remove(manifest_file(old))


def latest_checkpoint(
    folder: Path, schema: StateSchema | None = None, *, recoveries: list[str] | None = None
) -> ServerState | None:
    """Return the state of the newest valid checkpoint; None if there is no checkpoint.

    A checkpoint that is damaged, lacks one of its parts or does not fit ``schema`` is logged and appended to
    ``recoveries``, and the previous one is used.

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
        except Exception as error:  # reading a foreign file can fail in any way
            problem = " ".join(sanitize(error).split())[:200] or type(error).__name__
            log.warning("checkpoint %s cannot be used (%s); trying the previous one", file, problem)
            if recoveries is not None:
                recoveries.append(f"the checkpoint of round {round} could not be used: {problem}")
    if rounds:
        raise InputError(
            f"no checkpoint in {folder} can be used ({len(rounds)} tried; of round {rounds[0]}: {problem}); "
            "restore the file from a copy, or start a new run"
        )
    return None


def delete_checkpoints_after(folder: Path, round: int) -> None:
    """Delete checkpoints of later rounds. They are damaged and would count as the newest ones."""
    for later in saved_rounds(folder):
        if later > round:
            remove(round_file(folder, later))
            remove(manifest_file(round_file(folder, later)))


def manifest_file(file: Path) -> Path:
    """Return the file with the parts of a checkpoint."""
    return file.with_suffix(".json")


def _load(file: Path, *, max_bytes: int) -> ServerState:
    """Read a checkpoint; raises any exception for an invalid file."""
    manifest = read_manifest(manifest_file(file))
    if problems := manifest.problems(file.parent.parent):
        raise ValueError(f"{problems[0]} and {len(problems) - 1} more" if problems[1:] else problems[0])
    saved = read_tensors(file, max_bytes=max_bytes)
    found = saved.pop("format", None)
    if type(found) is int and found != FORMAT:
        raise ValueError("it has the format of another version of fedssl; resume with that version")
    if found != FORMAT or manifest.size(f"{file.parent.name}/{file.name}") == 0:
        raise ValueError("it is not a checkpoint")
    return _to_state(saved)


def _to_state(saved: dict[str, Any]) -> ServerState:
    values = to_arrays(saved)
    return ServerState(**{**values, "models": {name: GlobalModel(**model) for name, model in values["models"].items()}})


def _check_in_flight(saved: Any) -> None:
    """Raise `ValueError` unless messages in flight have the form of those of `VirtualTimeExchange`."""
    if not _require_mapping(saved):
        return
    contents, messages = (_require_mapping(saved.get(key)) for key in ("contents", "messages"))
    valid = isinstance(saved.get("clock"), float) and all(
        isinstance(data, np.ndarray) and data.dtype == np.uint8 for data in contents.values()
    )
    for node, entry in messages.items():
        fields = _require_mapping(entry)
        texts = all(isinstance(fields.get(key), str) for key in ("type", "group", "content"))
        valid &= texts and fields["content"] in contents and fields["group"].isdecimal()
        valid &= isinstance(node, str) and node.isdecimal() and isinstance(fields.get("lost"), str)
        valid &= is_count(fields.get("client"), minimum=0)
        valid &= isinstance(fields.get("due"), float) and isinstance(fields.get("seconds"), float)
    if not valid:
        raise ValueError("its messages in flight are invalid")


def _check_typed_dict(value: Any, kind: type) -> None:
    types = get_type_hints(kind)
    for key, inner in _require_mapping(value).items():
        if key not in types or not _has_type(inner, types[key]):
            raise ValueError(f"the state of the strategy has an invalid {key}")
    for leaf in iter_leaves(value):
        if isinstance(leaf, np.ndarray | float) and not np.isfinite(leaf).all():
            raise ValueError("the state of the strategy is not finite")


def _has_type(value: Any, kind: Any) -> bool:
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return isinstance(value, dict) and all(_has_type(k, key) and _has_type(v, item) for k, v in value.items())
    return type(value) is kind


def _is_model_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+", value) is not None


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
