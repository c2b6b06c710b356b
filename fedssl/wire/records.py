"""Layers in Flower's records: without a copy within a process, serialized for a network, and their size in bytes.

An `Array` is a view of a NumPy array, and a `LazyArrayRecord` a record of these. Within a process they are passed
without a copy. Ray pickles them out-of-band through shared memory. A network deployment serializes a record as the few
flat arrays of `fedssl.wire.wire_format`, in the ``.npy`` format of Flower. Wire dtypes other than ``fp32`` change
numbers, so all engines then exchange the flat arrays.

Arrays from a network are read without a copy from ``.npy`` bytes whose header matches their length.
"""

import functools
import io
import json
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict

from fedssl.arrays import Layers
from fedssl.config.constraint_table import LOSSLESS, WIRE_DTYPES
from fedssl.errors import InputError
from fedssl.wire.wire_format import TABLE, TensorSpec, flat_layout, pack, table_text, unpack

CHUNK_BYTES = 5 * 2**20  # size of the chunks of an array in Flower
ENVELOPE_BYTES = 160  # size of the metadata of a message in Flower

_name = functools.cache(str)  # name of a dtype; NumPy computes it at every call


class Array(FlowerArray):
    """A Flower ``Array`` over a NumPy array, without a copy.

    The name must be that of Flower's class, because Flower serializes the class name and looks it up when receiving.
    """

    def __init__(self, array: np.ndarray) -> None:
        # Flower's constructor would serialize immediately.
        self.__dict__.update(dtype=_name(array.dtype), shape=array.shape, stype="numpy.ndarray", _array=array)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a field in Flower's class, a lazy property here
        array = self.numpy()
        file = io.BytesIO()
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        body = array.T if header["fortran_order"] else np.ascontiguousarray(array)
        return b"".join((file.getvalue(), body.data))

    def numpy(self) -> np.ndarray:
        """Return the array; read-only if it is in shared memory."""
        array: np.ndarray = self.__dict__["_array"]
        return array

    def __reduce__(self) -> tuple[type["Array"], tuple[np.ndarray]]:
        # Protocol 5 takes the memory of a contiguous array out of band.
        return Array, (self.numpy(),)


class LazyArrayRecord(ArrayRecord):
    """Record of layers, which become flat arrays with equal bits when Flower serializes them."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        for name, array in layers.items():
            super().__setitem__(name, Array(array))

    @property
    def children(self) -> dict[str, object]:  # type: ignore[override]  # what Flower calls an InflatableObject
        return self._packed.children  # type: ignore[return-value]  # as above

    def deflate(self) -> bytes:
        return self._packed.deflate()

    @functools.cached_property
    def _packed(self) -> ArrayRecord:
        return arrays_to_record(pack(record_to_arrays(self), LOSSLESS))

    def __setitem__(self, key: str, value: FlowerArray) -> None:
        self.__dict__.pop("_packed", None)
        super().__setitem__(key, value)


def arrays_to_record(layers: Layers) -> ArrayRecord:
    """Return a Flower record that shares the memory of the arrays."""
    record = ArrayRecord()
    for name, array in layers.items():
        record[name] = Array(array)
    return record


def record_to_arrays(record: ArrayRecord) -> Layers:
    """Return the arrays of a Flower record, which share its memory. Arrays from a network are read-only."""
    return {
        name: array.numpy() if type(array) is Array else read_array(array.data, name=name)
        for name, array in record.items()
    }


@dataclass(frozen=True)
class Codec:
    """Codec of the layers that clients and server exchange; raises `InputError` for an unknown dtype."""

    wire_dtype: str = LOSSLESS

    def __post_init__(self) -> None:
        if self.wire_dtype not in WIRE_DTYPES:
            raise InputError(f"wire_dtype={self.wire_dtype} is not valid; choose one of {', '.join(WIRE_DTYPES)}")

    def encode(self, layers: Layers, *, start: Layers | None = None) -> ArrayRecord:
        """Encode layers as a record. ``start`` as in `fedssl.wire.wire_format.pack`."""
        if self.wire_dtype == LOSSLESS:
            return LazyArrayRecord(layers)
        return arrays_to_record(pack(layers, self.wire_dtype, start=start))

    def decode(self, record: ArrayRecord, *, start: Layers | None = None) -> Layers:
        """Decode the layers of a record. ``start`` as in `fedssl.wire.wire_format.unpack`.

        Raise a ValueError if it has neither the form of `encode` nor, with ``fp32``, one array per layer as Flower's
        mods produce.
        """
        arrays = record_to_arrays(record)
        is_plain = self.wire_dtype == LOSSLESS and TABLE not in arrays
        return arrays if is_plain else unpack(arrays, self.wire_dtype, start=start)

    def describe(self) -> str:
        if self.wire_dtype == LOSSLESS:
            return f"{self.wire_dtype}, exactly"
        return f"{self.wire_dtype}: kernels and matrices, uploaded as differences to the download; all others exactly"


EXACT = Codec()  # of layers that never lose bits


def restored_content(content: RecordDict) -> RecordDict:
    """Return a content that was serialized within a process, with the records of `Codec.encode` and their sizes."""
    records = {name: record_to_arrays(record) for name, record in content.array_records.items()}
    lossless = {name: LazyArrayRecord(arrays) for name, arrays in records.items() if TABLE not in arrays}
    return RecordDict({**content, **lossless})


def read_array(data: bytes, *, name: str) -> np.ndarray:
    """Read a numeric array from ``.npy`` bytes without a copy; `ValueError` if they do not match their header."""
    file = io.BytesIO(data)
    try:
        read_header = _HEADERS[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read_header(file)
    except Exception as error:  # NumPy also raises errors of Python's tokenizer
        raise ValueError(f"array {name} is not in NumPy's format") from error
    if dtype.kind not in "fiub" or not all(0 <= length < 2**40 for length in shape):  # of an empty array as well
        raise ValueError(f"array {name} has {dtype} of shape {shape} instead of numbers")
    size, declared = len(data) - file.tell(), math.prod(shape) * dtype.itemsize
    if size != declared:
        raise ValueError(f"array {name} has {size} bytes, but {declared} by its shape {shape}")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def content_bytes(content: RecordDict) -> int:
    """Return the size of a message with this content on Flower's wire, without serializing arrays.

    Flower sends each object as its type, the ids of its parts, and a body. Arrays are split into chunks of
    `CHUNK_BYTES`.
    """
    total = ENVELOPE_BYTES + _reference_bytes(content, "RecordDict")
    total += sum(len(record.deflate()) for record in content.metric_records.values())
    total += sum(len(record.deflate()) for record in content.config_records.values())
    return total + layer_bytes(content)


def layer_bytes(content: RecordDict) -> int:
    """Return the size of the layers in a content on Flower's wire."""
    return sum(record_bytes(record) for record in content.array_records.values())


def record_bytes(record: ArrayRecord) -> int:
    """Return the size of a record with its arrays on Flower's wire."""
    if type(record) is LazyArrayRecord and record:
        return _lazy_record_bytes(tuple((name, array.dtype, array.shape) for name, array in record.items()))
    parts = sum(_array_bytes(array.dtype, array.shape, _npy_bytes(array)) for array in record.values())
    return _reference_bytes(record, "ArrayRecord") + parts


@functools.lru_cache(maxsize=256)
def _lazy_record_bytes(rows: tuple[tuple[str, str, tuple[int, ...]], ...]) -> int:
    """Return the size of a `LazyArrayRecord` of these layers after packing; equal in every round."""
    specs = [TensorSpec(*row) for row in rows]
    flats = {**flat_layout(specs, LOSSLESS), TABLE: (np.dtype(np.uint8), len(table_text(specs, LOSSLESS)))}
    parts = sum(
        _array_bytes(str(dtype), (length,), _header_bytes(dtype, (length,)) + length * dtype.itemsize)
        for dtype, length in flats.values()
    )
    return _reference_bytes(flats, "ArrayRecord") + parts


def _npy_bytes(array: FlowerArray) -> int:
    if type(array) is not Array:
        return len(array.data)
    values = array.numpy()
    return _header_bytes(values.dtype, values.shape) + values.nbytes


def _array_bytes(dtype: str, shape: tuple[int, ...], data: int) -> int:
    chunks = [min(CHUNK_BYTES, data - start) for start in range(0, data, CHUNK_BYTES)]
    body = {"dtype": dtype, "shape": shape, "stype": "numpy.ndarray", "arraychunk_ids": list(range(len(chunks)))}
    size = sum(_object_bytes("ArrayChunk", chunk, parts=0) for chunk in chunks)
    return size + _object_bytes("Array", len(json.dumps(body)), parts=len(chunks))


def _reference_bytes(parts: Collection[str], kind: str) -> int:
    """Return the size of an object that contains only names and ids of its parts."""
    return _object_bytes(kind, len(json.dumps(dict.fromkeys(parts, "0" * 64))), parts=len(parts))


def _object_bytes(kind: str, body: int, *, parts: int) -> int:
    return len(f"{kind} {body}") + 2 + max(65 * parts - 1, 0) + body


@functools.lru_cache(maxsize=1024)
def _header_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    file = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()
