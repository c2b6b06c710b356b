"""Wire format of layers: a table of names, dtypes and shapes, and one flat array per dtype.

A model of a hundred arrays becomes about four. ``wire_dtype`` selects the format of kernels and matrices, i.e. of
float32 weights with two or more dimensions, which are nearly all bytes:

- ``fp32``: unchanged, bit for bit;
- ``fp16``, ``bf16``: rounded to the nearest value (relative error at most 2^-11, below 6e-5 an absolute one of
  2^-25; 2^-8). Larger values become the largest finite number, never infinite; NaN and infinities stay;
- ``int8``: q = round(x / s) with a float32 scale s = max |x| / 127 per output channel (the first axis), so that the
  error is at most s / 2. Channels with s below 1e-38 become zero; non-finite values are rejected.

Biases, normalization, running statistics, counters and all other layers stay unchanged. They are less than 1% of the
bytes, and a variance must not round to zero.

A layer may be sent as the *difference* to the receiver's layer (``start``). The differences of one round are far
smaller than the weights, and so are their rounding errors. Both ends must have the same ``start``.

Received bytes are untrusted: table and arrays must match exactly, and decoding allocates only the decoded layers, i.e.
at most four bytes per received byte.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedssl.arrays import STATISTICS, Layers
from fedssl.config.constraint_table import LOSSLESS

# Arrays from a network are read-only, and only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

TABLE, WEIGHTS, SCALES = "table", "weights", "scales"  # names of flat arrays; the others have the name of their dtype

MAX_TABLE_BYTES = 1 << 20  # about 15,000 layers
MAX_DIMENSIONS = 16

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for kind in ("float16 float32 float64", "int8 int16 int32 int64", "uint8 uint16 uint32 uint64", "bool")
    for name in kind.split()
}
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# NumPy has no bfloat16; its bits are sent as integers.
_WIRE: dict[str, np.dtype] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(np.int16), "int8": np.dtype(np.int8)}
_LEVELS = 127
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST_SCALE = float(np.nextafter(np.finfo(np.float32).max / np.float32(_LEVELS), np.float32(0)))

Layout = dict[str, tuple[np.dtype, int]]  # dtype and length of every flat array


@dataclass(frozen=True)
class TensorSpec:
    """Row of the table: name, dtype and shape of a layer."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_compressed(self) -> bool:
        kernel = len(self.shape) > 1 and 0 not in self.shape
        return kernel and self.dtype == "float32" and self.name.rpartition(".")[2] not in STATISTICS


def tensor_specs(layers: Layers) -> list[TensorSpec]:
    """Return the table of the layers."""
    return [TensorSpec(name, array.dtype.name, array.shape) for name, array in layers.items()]


def flat_layout(specs: Sequence[TensorSpec], wire_dtype: str) -> Layout:
    """Return the layout of the flat arrays, in the order of their first use."""
    layout: Layout = {}

    def add(key: str, dtype: np.dtype, length: int) -> None:
        layout[key] = dtype, layout.get(key, (dtype, 0))[1] + length

    for spec in specs:
        if wire_dtype == LOSSLESS or not spec.is_compressed:
            add(spec.dtype, _DTYPES[spec.dtype], spec.size)
            continue
        add(WEIGHTS, _WIRE[wire_dtype], spec.size)
        if wire_dtype == "int8":
            add(SCALES, np.dtype(np.float32), spec.shape[0])
    return layout


def table_text(specs: Sequence[TensorSpec], wire_dtype: str) -> bytes:
    """Return the table as JSON."""
    lines = [[spec.name, spec.dtype, spec.shape] for spec in specs]
    return json.dumps([wire_dtype, lines], separators=(",", ":")).encode()


def pack(layers: Layers, wire_dtype: str, *, start: Layers | None = None) -> dict[str, np.ndarray]:
    """Encode layers as the table and flat arrays by name; an empty mapping for no layers.

    Compressed layers that ``start``, the layers of the receiver, contains are sent as differences. Raise a ValueError
    if a layer has non-finite values, which ``int8`` cannot represent.
    """
    specs = tensor_specs(layers)
    if not specs:
        return {}
    flats = {key: np.empty(length, dtype) for key, (dtype, length) in flat_layout(specs, wire_dtype).items()}
    cursor = _FlatCursor(flats)
    for spec, array in zip(specs, layers.values(), strict=True):
        if wire_dtype == LOSSLESS or not spec.is_compressed:
            cursor.next(spec.dtype, spec.size)[:] = array.reshape(-1)
            continue
        x = torch.from_numpy(np.ascontiguousarray(array))
        if start is not None and spec.name in start:
            x = x - torch.from_numpy(start[spec.name])
        numbers = torch.from_numpy(cursor.next(WEIGHTS, spec.size)).view(x.shape)
        if wire_dtype == "int8":
            torch.from_numpy(cursor.next(SCALES, len(x)))[:] = encode_int8(x, out=numbers, name=spec.name)
        else:
            encode_half(x, out=numbers.view(_HALVES[wire_dtype]))
    return {TABLE: np.frombuffer(table_text(specs, wire_dtype), np.uint8), **flats}


def unpack(arrays: Mapping[str, np.ndarray], wire_dtype: str, *, start: Layers | None = None) -> Layers:
    """Decode the result of `pack`, which is untrusted; raise a ValueError if it is invalid or does not match ``start``.

    Uncompressed layers share the memory of the received arrays.
    """
    if not arrays:
        return {}
    specs = parse_table(arrays.get(TABLE), wire_dtype)
    expected = flat_layout(specs, wire_dtype)
    unmatched = (arrays.keys() - {TABLE}) ^ expected.keys()
    if unmatched:
        name = min(unmatched)
        raise ValueError(f"array {name} is {'not in the table of layers' if name in arrays else 'missing'}")
    for key, (dtype, length) in expected.items():
        array = arrays[key]
        if array.dtype != dtype or array.shape != (length,):
            raise ValueError(f"array {key} has {array.dtype} of shape {array.shape} instead of {length} {dtype}")
    if SCALES in expected and not ((arrays[SCALES] >= 0) & (arrays[SCALES] <= _LARGEST_SCALE)).all():
        raise ValueError(f"array {SCALES} has values that are negative, not finite or far too large")
    cursor = _FlatCursor(arrays)
    return {spec.name: _unpacked(spec, cursor, wire_dtype, start or {}) for spec in specs}


def _unpacked(spec: TensorSpec, cursor: "_FlatCursor", wire_dtype: str, start: Layers) -> np.ndarray:
    if wire_dtype == LOSSLESS or not spec.is_compressed:
        return cursor.next(spec.dtype, spec.size).reshape(spec.shape)
    numbers = torch.from_numpy(cursor.next(WEIGHTS, spec.size)).view(spec.shape)
    if wire_dtype == "int8":
        x = decode_int8(numbers, torch.from_numpy(cursor.next(SCALES, spec.shape[0])))
    else:
        x = numbers.view(_HALVES[wire_dtype]).to(torch.float32)
    if spec.name in start:
        base = start[spec.name]
        if base.shape != spec.shape:
            raise ValueError(f"layer {spec.name} has shape {spec.shape} instead of {base.shape}")
        x += torch.from_numpy(base)
    array: np.ndarray = x.numpy()
    return array


def parse_table(table: np.ndarray | None, wire_dtype: str) -> list[TensorSpec]:
    """Parse a received table; `ValueError` if it is missing or invalid."""
    if table is None or table.dtype != np.uint8 or table.ndim != 1:
        raise ValueError("the table of layers is missing")
    if len(table) > MAX_TABLE_BYTES:
        raise ValueError(f"the table of layers has {len(table)} bytes, more than {MAX_TABLE_BYTES}")
    try:
        announced, rows = json.loads(table.tobytes())
        specs = [_parse_row(*row) for row in rows]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("the table of layers is damaged") from error
    if announced != wire_dtype:
        raise ValueError(f"layers have wire_dtype={str(announced)[:20]} instead of {wire_dtype}")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("the table of layers names a layer twice")
    return specs


def _parse_row(name: object, dtype: object, shape: object) -> TensorSpec:
    if not (isinstance(name, str) and name.isprintable() and isinstance(dtype, str) and dtype in _DTYPES):
        raise ValueError("a layer has no name, or no dtype of numbers")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a layer has no shape")
    if not all(type(length) is int and 0 <= length < 2**31 for length in shape):
        raise ValueError("a layer has a shape with non-integers")
    return TensorSpec(name, dtype, tuple(shape))


def encode_half(x: Tensor, *, out: Tensor) -> None:
    """Round to the dtype of ``out``. Finite numbers stay finite; NaN and infinities are preserved."""
    out.copy_(x)
    low, high = torch.aminmax(out)
    if not (low.isfinite() and high.isfinite()):
        largest = torch.finfo(out.dtype).max
        out.copy_(torch.where(x.isfinite(), x.clamp(-largest, largest), x))


def encode_int8(x: Tensor, *, out: Tensor, name: str) -> Tensor:
    """Write q into ``out`` and return the scale of each index of the first axis, so that q * scale approximates x."""
    rows = x.reshape(len(x), -1)
    scales = torch.maximum(-rows.amin(dim=1), rows.amax(dim=1)) / _LEVELS  # aminmax takes twice as long
    if not scales.isfinite().all():
        raise ValueError(f"layer {name} has non-finite values, which wire_dtype=int8 cannot represent")
    scales[scales < _TINY] = 0  # a subnormal divisor has too few digits
    scales.clamp_(max=_LARGEST_SCALE)  # of which 127 are still finite
    divisors = scales.masked_fill(scales == 0, 1 / _TINY)
    out.view(rows.shape).copy_((rows / divisors[:, None]).round_())
    return scales


def decode_int8(q: Tensor, scales: Tensor) -> Tensor:
    """Decode the result of `encode_int8`."""
    x = q.to(torch.float32)
    x.view(len(q), -1).mul_(scales[:, None])
    return x


class _FlatCursor:
    """Cursor over flat arrays: `next` returns a slice of ``length`` elements."""

    def __init__(self, flats: Mapping[str, np.ndarray]) -> None:
        self._flats, self._offset = flats, dict.fromkeys(flats, 0)

    def next(self, key: str, length: int) -> np.ndarray:
        start = self._offset[key]
        self._offset[key] = start + length
        return self._flats[key][start : start + length]
