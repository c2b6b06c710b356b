"""State of a user's classes outside of the layers that are exchanged and saved: attributes, non-persistent buffers.

A process trains many clients with one method. Such state would bring the data of one client into the training of the
next, and results would depend on the engine. The classes of fedssl and of torch are not searched.
"""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
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
_KNOWN: dict[type, set[str]] = {
    nn.Module: {*vars(nn.Module()), "_compiled_call_impl"},
    Encoder: {*vars(Encoder), *Encoder.__annotations__},
    SSLMethod: {*vars(SSLMethod), *SSLMethod.__annotations__},
    torch.optim.Optimizer: {"state", "param_groups"},  # which `LocalTrainer` and CUDA graphs reset
}
_VALUES = (type(None), int, float, complex, str, bytes, tuple, np.generic)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_CONTAINERS = (dict, list, set, deque)
_MAX_BYTES = 2**26  # of a tensor or array: larger ones, such as images, stay


class UnsavedState:
    """First values of the attributes of the user's modules in a network, and of further ``objects`` of the user.

    The contents of tensors, arrays, generators of random numbers, containers, unregistered modules and objects of the
    user's packages are restored in place. Parameters and saved buffers, and objects of libraries, stay.
    """

    def __init__(self, network: nn.Module, *objects: object) -> None:
        named: list[tuple[str, object]] = [*network.named_modules()]
        for each in objects:
            parts = each.modules() if isinstance(each, nn.Module) else [each]
            named += [(type(part).__name__, part) for part in parts]
        self._holders = [(name, holder) for name, holder in named if _root(holder) not in _LIBRARIES]
        self._roots = {_root(holder) for _, holder in self._holders}
        saved = network.state_dict(keep_vars=True).values()
        fixed = (*network.modules(), *network.parameters(), *saved, *objects)
        self._fixed = {id(each): each for each in fixed}
        self._memory = {_memory(each) for each in (*network.parameters(), *saved)}
        self._contents: dict[int, tuple[Any, Any]] = {}  # objects and what they contain, by id
        self._attributes = [{key: vars(holder)[key] for key in _own_keys(holder)} for _, holder in self._holders]
        self._members: list[list[tuple[Any, Any]]] = [
            [(members, dict(members)) for members in (holder._buffers, holder._modules)]
            for _, holder in self._holders
            if isinstance(holder, nn.Module)
        ]
        for attributes in self._attributes:
            for value in attributes.values():
                self._add(value)
        for members in self._members:
            for value in members[0][1].values():
                self._add(value)

    def _add(self, value: Any) -> None:
        """Store the contents of a value, and of all that it contains."""
        if id(value) in self._fixed or id(value) in self._contents:
            return
        parts: Any = ()
        if isinstance(value, Tensor | np.ndarray):
            is_dense = not isinstance(value, Tensor) or (value.layout == torch.strided and not self._is_layer(value))
            if is_dense and not isinstance(value, np.memmap) and value.nbytes <= _MAX_BYTES:
                self._contents[id(value)] = value, value.detach().clone() if isinstance(value, Tensor) else value.copy()
        elif isinstance(value, _GENERATORS):
            self._contents[id(value)] = value, _state_of(value)
        elif isinstance(value, _CONTAINERS):
            self._contents[id(value)] = value, list(value.items() if isinstance(value, dict) else value)
            parts = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            parts = value
        elif isinstance(value, nn.Module):
            parts = (*value.parameters(), *value.buffers())
        elif self._is_own(value):
            self._contents[id(value)] = value, dict(vars(value))
            parts = vars(value).values()
        for part in parts:
            self._add(part)

    def _is_layer(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of a layer."""
        return _memory(tensor) in self._memory

    def reset(self) -> None:
        """Restore the first values; attributes and buffers that did not exist are removed."""
        for (_, holder), first in zip(self._holders, self._attributes, strict=True):
            for key in _own_keys(holder):
                if self._is_state(vars(holder)[key]):
                    del vars(holder)[key]
            # An object of a library that has replaced a value stays, such as a compiled function.
            vars(holder).update({key: value for key, value in first.items() if key not in vars(holder)})
        for members in self._members:
            for now, before in members:
                now.clear()
                now.update(before)
        for value, content in self._contents.values():
            with suppress(RuntimeError, ValueError):  # what cannot be written in place has not changed in place
                _restore(value, content)

    def _is_state(self, value: object) -> bool:
        return isinstance(value, (*_VALUES, *_GENERATORS, *_CONTAINERS, Tensor, np.ndarray)) or self._is_own(value)

    def _is_own(self, value: object) -> bool:
        """Return whether a value is an object of the user's packages, with attributes."""
        return _root(value) in self._roots and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)

    def tensors(self) -> dict[str, Any]:
        """Return tensors and arrays of attributes and non-persistent buffers by name, also those in containers."""
        found = {}
        for (name, holder), attributes in zip(self._holders, self._attributes, strict=True):
            module = holder if isinstance(holder, nn.Module) else nn.Module()
            buffers = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
            for key, value in {**attributes, **buffers}.items():
                if {f"{key}_g", f"{key}_orig"} & module._parameters.keys():
                    continue  # computed from parameters, by torch's older weight and spectral normalization
                for number, leaf in enumerate(_leaves(value)):
                    if id(leaf) not in self._fixed:
                        found[f"{name}.{key}{f'[{number}]' if leaf is not value else ''}".lstrip(".")] = leaf
        return found


def _root(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_keys(holder: object) -> list[str]:
    known = {name for kind, names in _KNOWN.items() if isinstance(holder, kind) for name in names}
    return [key for key in vars(holder) if key not in known]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


@torch.no_grad()
def _restore(value: Any, content: Any) -> None:
    """Let an object contain what it contained."""
    setter = getattr(value, "set_state", None)
    if isinstance(value, Tensor):
        value.detach().copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, _GENERATORS) and setter is not None:
        setter(content)
    elif isinstance(value, _CONTAINERS):
        value.clear()
        if isinstance(value, dict):
            for key, part in content:
                value[key] = part
        else:
            (value.update if isinstance(value, set) else value.extend)(content)
    else:
        vars(value).clear()
        vars(value).update(content)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, (*_CONTAINERS, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
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
