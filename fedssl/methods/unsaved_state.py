"""What a user's modules keep outside of the layers that are exchanged and saved: attributes, non-persistent buffers.

A process trains many clients with one method. Such state would bring the data of one client into the training of the
next, and results would depend on the engine. Modules of fedssl, torch and their libraries have none that matters.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.config.component import Component
from fedssl.encoders.base import Encoder
from fedssl.errors import InputError
from fedssl.seeding import python_seed

_LIBRARIES = ("fedssl", "torch", "torchvision", "timm")
_OF_TORCH = frozenset(vars(nn.Module()))
_SEQUENCES, _MAPPINGS = (list, tuple, deque, set), (dict, OrderedDict, defaultdict)


class UnsavedState:
    """First values of numbers, tensors, arrays, and containers of these in the attributes of a network's modules.

    ``known`` is a class whose own attributes belong to the program, beside those of `Encoder`.
    """

    def __init__(self, network: nn.Module, *, known: type = Encoder) -> None:
        self._known = (Encoder, known)
        self._modules = [
            (name, module)
            for name, module in network.named_modules()
            if type(module).__module__.partition(".")[0] not in _LIBRARIES
        ]
        self._registered = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
        self._buffers = {
            (name, key): (module, module._buffers[key], _copy(module._buffers[key]))
            for name, module in self._modules
            for key in module._non_persistent_buffers_set
        }
        self._values = {(name, key): _copy(value) for name, module, key, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        for name, module in self._modules:
            for key, value in list(vars(module).items()):
                is_own = key not in _OF_TORCH and not any(hasattr(kind, key) for kind in self._known)
                if is_own and self._is_state(value):
                    yield name, module, key, value

    def _is_state(self, value: Any) -> bool:
        if type(value) in _MAPPINGS:
            return all(map(self._is_state, value.values()))
        if type(value) in _SEQUENCES:
            return all(map(self._is_state, value))
        return value is None or (
            isinstance(value, int | float | Tensor | np.ndarray) and id(value) not in self._registered
        )

    def reset(self) -> None:
        """Set all to their first values; attributes that did not exist are removed."""
        for name, module, key, _ in self._attributes():
            if (name, key) in self._values:
                vars(module)[key] = _copy(self._values[name, key])
            else:
                del vars(module)[key]
        for (_, key), (module, buffer, first) in self._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.copy_(first)

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensors())

    def difference(self, other: "UnsavedState") -> str | None:
        """Return the name of the first tensor that another network of the same class has with other values."""
        mine, others = self._tensors(), other._tensors()
        return next((name for name in mine.keys() & others.keys() if not _equal(mine[name], others[name])), None)

    def _tensors(self) -> dict[str, Any]:
        found = self._values | {place: first for place, (_, _, first) in self._buffers.items()}
        return {f"{name}.{key}".lstrip("."): value for (name, key), value in found.items() if _is_array(value)}


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _equal(value: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(value.tolist()), np.asarray(other.tolist()), equal_nan=True)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copy(inner)) for key, inner in value.items())
        return copied
    if isinstance(value, deque):
        return deque(map(_copy, value), value.maxlen)
    return type(value)(map(_copy, value)) if type(value) in _SEQUENCES else value


class Buffers:
    """The saved buffers of a network, which are the same tensors after a ``with`` block."""

    def __init__(self, network: nn.Module) -> None:
        self._places = [
            (module._buffers, key, tensor)
            for module in network.modules()
            for key, tensor in module._buffers.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        ]

    def keep(self) -> None:
        """Copy those that were assigned anew, as by ``self.center = center``, into the tensors that are exchanged."""
        for buffers, key, tensor in self._places:
            if (new := buffers[key]) is not tensor:
                buffers[key] = tensor
                if new is None or new.shape != tensor.shape:
                    found = "None" if new is None else f"one of shape {tuple(new.shape)}"
                    raise InputError(f"the buffer {key} of shape {tuple(tensor.shape)} became {found}; keep its shape")
                with torch.no_grad():
                    tensor.copy_(new)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.keep()


def check_unsaved(component: Component, encoder: Encoder) -> None:
    """Raise an `InputError` if an encoder has random tensors that are not saved: a loaded one would be another."""
    unsaved = UnsavedState(encoder)
    if unsaved.has_tensors:
        with torch.random.fork_rng(devices=[]), python_seed(None):
            name = unsaved.difference(UnsavedState(component.make(Encoder)))
        if name is not None:
            raise InputError(f"{name} of {component.name} is random and not saved; make it a buffer, persistent=True")
