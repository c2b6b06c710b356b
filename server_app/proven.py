"""Whether a state that a checkpoint holds is one of this run: names, shapes, dtypes, finite values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedssl.arrays import Layers
from fedssl.untrusted import iter_leaves
from strategies.state import GlobalModel, ServerState


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
