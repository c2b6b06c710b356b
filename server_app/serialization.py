"""Conversion of a server's state to what `torch.save` can write without pickled code, and back.

Dataclasses become dictionaries, and arrays tensors. A mapping of clients to plain values becomes one tensor with JSON:
the list of values that `torch.save` pickles has a maximum length (`fedssl.safe_io.read_tensors`), and a federation
may have millions of clients.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

_BY_CLIENT = "by client"  # only key of the dictionary with such a tensor


def to_serializable(value: Any) -> Any:
    """Return the value with nothing but dictionaries, tensors and plain values."""
    if is_dataclass(value):
        return {field.name: to_serializable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) and _is_plain(inner) for key, inner in value.items()):
            text = json.dumps(list(value.items())).encode()
            return {_BY_CLIENT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        return {key: to_serializable(inner) for key, inner in value.items()}
    # A NumPy scalar, the result of arithmetic on an array without dimensions, becomes such an array again.
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def to_arrays(value: Any) -> Any:
    """Return a result of `to_serializable` with arrays instead of tensors. Dataclasses stay dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_BY_CLIENT}:
        items = json.loads(value[_BY_CLIENT].numpy().tobytes())
        return {key: tuple(inner) if isinstance(inner, list) else inner for key, inner in items}
    return {key: to_arrays(inner) for key, inner in value.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(inner, int | str) for inner in value)
    return isinstance(value, int | str)
