"""Layers in the records of any Flower app, whatever its model.

A layer is one named array. Running statistics are recognized by the names of torch's ``state_dict``; arrays with other
names, such as the numbers of a list, are weights unless they are listed as ``statistics``.
"""

from collections.abc import Collection, Iterable

import numpy as np
from flwr.app import Array, ArrayRecord

from fedssl.arrays import GlobalLayers, Layers
from fedssl.digests import new_checksum
from fedssl.errors import InputError, shortened
from fedssl.wire.records import record_to_arrays

_STATISTIC = ".@.running_mean"  # after a name, makes it that of a running statistic


def read_layers(record: ArrayRecord, statistics: Collection[str] = ()) -> Layers:
    """Return the arrays of a record by name, read-only. Raise `InputError` for an array without numbers."""
    halves = [name for name, array in record.items() if array.dtype == "bfloat16"]
    try:
        layers = {} if halves else record_to_arrays(record)
    except ValueError as problem:
        raise InputError(f"{problem}; use arrays of integers or floating-point numbers") from problem
    if halves:
        raise InputError(f"array {halves[0]} is bfloat16, which NumPy does not have; convert it, e.g. by .float()")
    return {name + _STATISTIC if in_parts(name, statistics) else name: array for name, array in layers.items()}


def write_layers(layers: Layers) -> ArrayRecord:
    """Return a record of copies, as an app may change them."""
    return ArrayRecord({public_name(name): Array(np.asarray(layer)) for name, layer in layers.items()})


def public_name(name: str) -> str:
    """Return the name of a layer in the app's records."""
    return name.removesuffix(_STATISTIC)


def in_parts(name: str, parts: Iterable[str]) -> bool:
    """Return whether a layer is one of the parts or in one: ``layer1`` has ``layer1.conv.weight``, not ``layer10``."""
    stripped = [part.rstrip("./") for part in parts]
    return any(name == part or name.startswith((f"{part}.", f"{part}/")) for part in stripped)


def as_parts(parts: str | Iterable[str]) -> tuple[str, ...]:
    """Return prefixes, of which one may be given without a list."""
    return (parts,) if isinstance(parts, str) else tuple(parts)


def check_parts(names: Collection[str], **parts: Iterable[str]) -> None:
    """Raise `InputError` if one of the parts matches no name."""
    for argument, prefixes in parts.items():
        for prefix in prefixes:
            if not any(in_parts(name, [prefix]) for name in names):
                raise InputError(
                    f"{argument}={prefix!r} matches none of the {len(names)} arrays of the model "
                    f"({shortened(names, maximum=10)}); give the beginning of their names, up to a dot"
                )


def conform(layers: Layers, reference: GlobalLayers) -> Layers:
    """Return the layers of the reference among ``layers``, in its order, dtypes, and shapes if they have one number.

    Floating-point dtypes are converted to each other, and other ones if no number changes. Raise `InputError` if a
    layer is missing, or has another shape or kind.
    """
    found = {name: _converted(layers[name], array) for name, array in reference.layers.items() if name in layers}
    reference.check(found)
    return found


def _converted(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    if array.size == like.size == 1:
        array = array.reshape(like.shape)  # apps make () of the counter's (1,) and vice versa
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(like.dtype, copy=False)
    is_float = array.dtype.kind == like.dtype.kind == "f"
    return converted if is_float or np.array_equal(converted, array) else array


def digest(layers: Layers) -> str:
    """Return a digest of the bits of layers."""
    checksum = new_checksum()
    for array in layers.values():
        checksum.update(np.ascontiguousarray(array).data)
    return str(checksum.hexdigest())
