"""What a user's classes keep outside of the layers that are exchanged and saved: attributes, non-persistent buffers.

A process trains many clients with one method. Such state would bring the data of one client into the training of the
next, and results would depend on the engine. Objects of fedssl, torch and their libraries have none that matters.
"""

import copy
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.config.component import Component
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.seeding import python_seed

_LIBRARIES = {"fedssl", "strategies", "torch", "torchvision", "timm"}
# Attributes that belong to the program.
_KNOWN: dict[type, Collection[str]] = {
    nn.Module: {*vars(nn.Module()), "_compiled_call_impl"},
    Encoder: {*vars(Encoder), *Encoder.__annotations__},
    SSLMethod: {*vars(SSLMethod), *SSLMethod.__annotations__},
}
_VALUES = (type(None), int, float, complex, str, bytes, np.generic)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_CONTAINERS = (MutableMapping, list, tuple, set, deque)
_MAX_BYTES = 2**26  # of a tensor or array: larger ones, such as images, stay
Place = tuple[int, str]  # number of a holder of attributes, and name of an attribute


class UnsavedState:
    """First values of the attributes of the user's modules in a network, and of further ``objects`` of the user.

    Values, tensors, arrays, generators of random numbers, objects of the user's packages, and containers of these are
    copied; what two of them share is shared by the copies. Parameters, buffers, modules and all else stay.
    """

    def __init__(self, network: nn.Module, *objects: object) -> None:
        named = [*network.named_modules(), *((type(each).__name__, each) for each in objects)]
        self._holders = [(name, holder) for name, holder in named if _root(holder) not in _LIBRARIES]
        self._roots = {_root(holder) for _, holder in self._holders}
        fixed = (*network.modules(), *network.parameters(), *network.buffers(), *objects)
        self._fixed: dict[int, Any] = {id(each): each for each in fixed}
        self._buffers = {
            (number, key): holder._buffers[key]
            for number, (_, holder) in enumerate(self._holders)
            for key in (holder._non_persistent_buffers_set if isinstance(holder, nn.Module) else ())
        }
        self._scratch = {place: _clone(buffer) for place, buffer in self._buffers.items()}
        self._values = self._copies({(number, key): value for number, _, key, value in self._attributes()})

    def _attributes(self) -> Iterator[tuple[int, dict[str, Any], str, Any]]:
        for number, (_, holder) in enumerate(self._holders):
            known = {name for kind, names in _KNOWN.items() if isinstance(holder, kind) for name in names}
            for key, value in list(vars(holder).items()):
                if key not in known:
                    yield number, vars(holder), key, value

    def reset(self) -> None:
        """Set all to their first values; attributes that did not exist are removed."""
        first = self._copies(self._values)
        for number, attributes, key, value in self._attributes():
            if self._is_state(value):
                del attributes[key]
            else:
                first.pop((number, key), None)  # an object of a library, such as a compiled function
        for (number, key), value in first.items():
            vars(self._holders[number][1])[key] = value
        for (number, key), buffer in self._buffers.items():
            module: Any = self._holders[number][1]
            module._buffers[key] = buffer if buffer is None else buffer.copy_(self._scratch[number, key])

    def _copies(self, values: Mapping[Place, Any]) -> dict[Place, Any]:
        memo = {**self._fixed}
        return {place: self._copy(value, memo) for place, value in values.items()}

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return a copy of a value; parts that are in the ``memo``, by id, are those there."""
        if id(value) in memo:
            return memo[id(value)]
        if isinstance(value, _VALUES) or not self._is_state(value):
            return value
        if isinstance(value, tuple):
            parts = [self._copy(part, memo) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        copied = memo[id(value)] = _clone(value)
        if isinstance(value, MutableMapping):
            for key in value:
                copied[key] = self._copy(value[key], memo)
        elif isinstance(value, list | deque | set):
            parts = [self._copy(part, memo) for part in value]
            copied.clear()
            (copied.update if isinstance(value, set) else copied.extend)(parts)
        elif self._is_own(value):
            vars(copied).update({key: self._copy(part, memo) for key, part in vars(value).items()})
        return copied

    def _is_state(self, value: object) -> bool:
        if id(value) in self._fixed:
            return False
        if isinstance(value, Tensor | np.ndarray):
            return value.nbytes <= _MAX_BYTES
        return isinstance(value, (*_VALUES, *_GENERATORS, *_CONTAINERS)) or self._is_own(value)

    def _is_own(self, value: object) -> bool:
        """Return whether a value is an object of the user's packages, with attributes."""
        return _root(value) in self._roots and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)

    def tensors(self) -> dict[str, Any]:
        """Return tensors and arrays by name, also those in containers."""
        found = {}
        for (number, key), value in (self._values | self._scratch).items():
            name, holder = self._holders[number]
            if isinstance(holder, nn.Module) and {f"{key}_g", f"{key}_orig"} & holder._parameters.keys():
                continue  # computed from parameters, by torch's older weight and spectral normalization
            for index, leaf in enumerate(_leaves(value)):
                found[f"{name}.{key}{f'[{index}]' if index else ''}".lstrip(".")] = leaf
        return found


def _root(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        cloned = value.detach().clone()
        return nn.Parameter(cloned, value.requires_grad) if isinstance(value, nn.Parameter) else cloned
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.deepcopy(value) if isinstance(value, (*_GENERATORS, np.ndarray)) else copy.copy(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, _CONTAINERS):
        for part in value.values() if isinstance(value, MutableMapping) else value:
            yield from _leaves(part)


def _equal(value: Any, other: Any) -> bool:
    first, second = (np.asarray(one.tolist() if isinstance(one, Tensor) else one) for one in (value, other))
    if first.dtype.kind in "fc" and second.dtype.kind in "fc":
        return np.array_equal(first, second, equal_nan=True)
    return bool(first.tolist() == second.tolist())


def check_unsaved(component: Component, encoder: Encoder) -> None:
    """Raise an `InputError` if an encoder has random tensors that are not saved: a loaded one would be another."""
    mine = UnsavedState(encoder).tensors()
    if mine:
        with torch.random.fork_rng(devices=[]), python_seed(None):
            others = UnsavedState(component.make(Encoder)).tensors()
        name = next((name for name in mine if name in others and not _equal(mine[name], others[name])), None)
        if name is not None:
            raise InputError(f"{name} of {component.name} is random and not saved; make it a buffer, persistent=True")
