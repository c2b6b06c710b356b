"""Whether a state that a checkpoint holds is one of this run: names, shapes, dtypes, finite values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedssl.layers import Layers
from fedssl.untrusted import plain
from strategies.state import Model, ServerState


def check_state(state: ServerState, untrained: Model, *, models: int) -> None:
    """Refuse a state that no round of the run can have led to.

    Parameters
    ----------
    state : ServerState
        Read from a file, of which nothing is known.
    untrained : Model
        What all models are like.
    models : int
        Most models that there are.

    Raises
    ------
    ValueError
        With what is wrong.
    """
    if not _whole(state.round, least=1) or not isinstance(state.models, Mapping) or len(state.models) > models:
        raise ValueError("its round or its models are not those of a run")
    for name, model in state.models.items():
        if not isinstance(name, str) or not _whole(model.phase, least=1) or not _whole(model.updates, least=0):
            raise ValueError("a model's name, phase or updates are not those of a run")
        _check_layers(model.layers, untrained.layers, all_of_them=True)
        _check_layers(model.shared, untrained.shared, all_of_them=True)
        for moments in _mapping(model.moments).values():
            _check_layers(moments, untrained.layers, same_dtype=False)
        for value in plain(_mapping(model.memory)):
            if isinstance(value, np.ndarray | float) and not np.isfinite(value).all():
                raise ValueError("what the algorithm remembers is not finite")
    for client, place in _mapping(state.took_part).items():
        fits = isinstance(place, tuple) and len(place) == 2 and _whole(place[0], least=1) and isinstance(place[1], str)
        if not fits or not _whole(client, least=0):
            raise ValueError("the rounds of its clients are not those of a run")


def _check_layers(layers: Any, like: Layers, *, all_of_them: bool = False, same_dtype: bool = True) -> None:
    names = _mapping(layers).keys()
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


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"it holds a {type(value).__name__} in the place of several values")
    return value


def _whole(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
