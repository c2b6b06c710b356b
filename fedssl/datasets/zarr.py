"""Arrays of Zarr, versions 2 and 3, also in shards, and OME-Zarr: their planes are images.

Read without its library, which loads codecs by their names in the file and expands chunks without a limit. Here codecs
are those of `_CODECS`, and the chunks of an image may need no more memory than an image file. Of the resolutions of
OME-Zarr the lowest with twice the requested size is read.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np

from fedssl.datasets.pages import Pages, check_count, check_shape, max_file_bytes
from fedssl.datasets.raster import Raster, percentiles_of
from fedssl.safe_io import open_regular_file, read_bytes

_MAX_METADATA = 2**22  # bytes
_MAX_CHUNKS = 2**16  # of an image, and of a shard
_MISSING = 2**64 - 1  # place of a chunk that a shard lacks
_SAMPLE = 16  # images of which percentiles are computed
_PATH = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # of a resolution
# Return at most the given number of bytes, or raise an exception.
_CODECS: Mapping[str, Callable[[bytes, int], bytes | bytearray]] = {
    "gzip": lambda content, size: zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(content, size + 1),
    "zlib": lambda content, size: zlib.decompressobj().decompress(content, size + 1),
    "zstd": lambda content, size: imagecodecs.zstd_decode(content, out=size),
    "blosc": lambda content, size: imagecodecs.blosc_decode(content, out=size),
    "lz4": lambda content, size: imagecodecs.lz4_decode(content, header=True, out=size),
    "crc32c": lambda content, _: content[:-4],
}


class _Array(Pages):
    """Images of an array by its axes of height, width and, possibly, channels."""

    axes: Sequence[int] = ()

    def __init__(self, folder: Path, *, max_pixels: int) -> None:
        about = metadata(folder)
        self._folder, self._max_pixels = folder, max_pixels
        self._shard: tuple[int, ...] | None = None
        self.shape, self._order = _sizes(about["shape"]), about.get("order", "C")
        if about["zarr_format"] == 2:
            kind, self._chunks = about["dtype"], _sizes(about["chunks"])
            codecs = [*(about.get("filters") or ()), *([about["compressor"]] if about["compressor"] else ())]
            self._codecs = [codec["id"] for codec in codecs]
            self._key = ("", about.get("dimension_separator", "."))
        else:
            codecs, keys = about["codecs"], about["chunk_key_encoding"]
            self._chunks = _sizes(about["chunk_grid"]["configuration"]["chunk_shape"])
            if codecs[0]["name"] == "sharding_indexed":
                inner, outer = codecs[0]["configuration"], self._chunks
                self._chunks, codecs = _sizes(inner["chunk_shape"]), inner["codecs"]
                self._shard = tuple(a // b for a, b in zip(outer, self._chunks, strict=True))
                self._at_end = inner.get("index_location", "end") == "end"
            is_big = codecs[0].get("configuration", {}).get("endian") == "big"
            kind = np.dtype(about["data_type"]).newbyteorder(">" if is_big else "<").str
            self._codecs = [codec["name"] for codec in codecs[codecs[0]["name"] == "bytes" :]]
            is_plain = keys["name"] == "v2"
            separator = keys.get("configuration", {}).get("separator", "." if is_plain else "/")
            self._key = ("" if is_plain else f"c{separator}", separator)
        if unknown := [name for name in self._codecs if name not in _CODECS]:
            raise ValueError(f"it has the codec {unknown[0]!s:.40}; save it with one of {', '.join(_CODECS)}")
        self._dtype = np.dtype(str(kind))
        if self._dtype.kind not in "biuf" or len(self._chunks) != len(self.shape) or self._key[1] not in ("/", "."):
            raise ValueError(f"its values are {kind!s:.40} in chunks {self._chunks} of {self.shape}")
        self._bytes = math.prod(self._chunks) * self._dtype.itemsize
        self._fill = np.array(float(about.get("fill_value") or 0)).astype(self._dtype)
        self._percentiles = cache(self._compute_percentiles)

    def with_axes(self, axes: Sequence[int]) -> "_Array":
        """Set the axes of the images; `ValueError` if one would need too much memory."""
        self.axes, self._outer = axes, [axis for axis in range(len(self.shape)) if axis not in axes]
        height, width, depth = (*(self.shape[axis] for axis in axes), 1)[:3]
        self._image = height, width, depth
        check_count(self.count)
        check_shape(self._image, max_pixels=self._max_pixels)
        number = math.prod(-(-self.shape[axis] // self._chunks[axis]) for axis in axes)
        shards = math.prod(self._shard or ())
        if max(number, shards) > _MAX_CHUNKS or number * self._bytes > max_file_bytes(self._max_pixels):
            raise ValueError(f"an image has {number:,} chunks with {self._bytes:,} bytes each, or a shard {shards:,}")
        self._chunk = lru_cache(number)(self._read)  # successive images are often in the same chunks
        return self

    @property
    def count(self) -> int:
        return math.prod(self.shape[axis] for axis in self._outer)

    def page(self, number: int) -> Raster:
        if not 0 <= number < self.count:
            raise IndexError(f"it has {self.count} images, and none with number {number}")
        return Raster(shape=self._image, load=lambda: self._values(number), file_percentiles=self._percentiles)

    def _values(self, number: int) -> np.ndarray:
        first, last = [0] * len(self.shape), list(self.shape)
        for axis in reversed(self._outer):
            number, first[axis] = divmod(number, self.shape[axis])
            last[axis] = first[axis] + 1
        values = np.empty(np.subtract(last, first), self._dtype.newbyteorder("="))
        wanted = list(zip(first, last, self._chunks, strict=True))
        for place in product(*(range(start // size, -(-end // size)) for start, end, size in wanted)):
            cuts = [
                (cell * size, max(cell * size, start), min(cell * size + size, end))
                for cell, (start, end, size) in zip(place, wanted, strict=True)
            ]
            part = self._chunk(place)[tuple(slice(low - start, high - start) for start, low, high in cuts)]
            values[tuple(slice(low - a, high - a) for a, (_, low, high) in zip(first, cuts, strict=True))] = part
        return values.transpose([*self._outer, *self.axes]).reshape(self._image)

    def _compute_percentiles(self, percentiles: tuple[float, float]) -> tuple[float, float]:
        numbers = np.linspace(0, self.count - 1, min(_SAMPLE, self.count)).astype(int).tolist()
        return percentiles_of(np.concatenate([self._values(number) for number in numbers]), percentiles)

    def _read(self, place: tuple[int, ...]) -> np.ndarray:
        """Return a chunk by its place in the grid."""
        try:
            content = self._encoded(place)
        except FileNotFoundError:
            content = None
        if content is None:
            return np.broadcast_to(self._fill, self._chunks)
        for name in reversed(self._codecs):
            content = bytes(_CODECS[name](content, self._bytes))
        if len(content) != self._bytes:
            raise ValueError(f"a chunk has {len(content):,} bytes in place of {self._bytes:,}")
        return np.frombuffer(content, self._dtype).reshape(self._chunks, order="F" if self._order == "F" else "C")

    def _encoded(self, place: tuple[int, ...]) -> bytes | None:
        """Return the bytes of a chunk; None if its shard lacks it."""
        shard, limit = self._shard, 2 * self._bytes + 2**16
        outer = place if shard is None else (a // b for a, b in zip(place, shard, strict=True))
        file = self._folder / (self._key[0] + self._key[1].join(map(str, outer)))
        if shard is None:
            return read_bytes(file, max_bytes=limit)
        index = 16 * math.prod(shard) + 4  # with a checksum
        with open_regular_file(file) as stream:
            stream.seek(max(stream.seek(0, 2) - index, 0) if self._at_end else 0)
            places = np.frombuffer(stream.read(index - 4), "<u8").reshape(*shard, 2)
            start, size = places[tuple(a % b for a, b in zip(place, shard, strict=True))].tolist()
            stream.seek(0 if start == _MISSING else start)
            return None if start == _MISSING else stream.read(min(size, limit))


@contextmanager
def opened(folder: Path, *, max_pixels: int, channels: int, size: int) -> Iterator[Pages]:
    """Open an array or an image of OME-Zarr, for images of this size; see `fedssl.datasets.pages.open_pages`."""
    about = metadata(folder)
    attributes = about.get("attributes", about)
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales and "shape" not in about:
        raise ValueError("it is a group without an image of OME-Zarr; set dataset.path to an array in it")
    paths = [level["path"] for level in scales[0]["datasets"]] if scales else ["."]
    if scales and not (paths and all(_PATH.fullmatch(path) for path in paths)):
        raise ValueError("its resolutions are not folders in it")
    first, *others = (_Array(folder / path, max_pixels=max_pixels) for path in paths)
    if not scales:
        yield first.with_axes(_axes(first.shape, channels))
        return
    names = [axis["name"] if isinstance(axis, dict) else axis for axis in scales[0].get("axes", "tczyx")]
    axes = [names.index(name) for name in "yxc" if name in names]
    for array in others:  # from higher to lower resolutions, of which some also reduce other axes
        is_alike = all(
            a == b or axis in axes[:2] for axis, (a, b) in enumerate(zip(array.shape, first.shape, strict=True))
        )
        if is_alike and min(array.shape[axis] for axis in axes[:2]) >= 2 * size:
            first = array
    yield first.with_axes(axes)


def _axes(shape: Sequence[int], channels: int) -> list[int]:
    """Return the axes of height, width and channels: the last or another of the data set's number, or colors last."""
    rank = len(shape)
    if rank > 2 and shape[-1] in (channels, 3 if channels == 1 else channels):
        return [rank - 3, rank - 2, rank - 1]
    fitting = [axis for axis in range(rank - 2) if shape[axis] == channels and (rank > 3 or channels > 1)]
    return [rank - 2, rank - 1, *fitting[-1:]]


def metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of an array or a group."""
    found: dict[str, Any] = {}
    for name in (".zgroup", ".zattrs", ".zarray", "zarr.json"):
        if (folder / name).is_file():
            found |= json.loads(read_bytes(folder / name, max_bytes=_MAX_METADATA))
    if found.get("zarr_format") not in (2, 3):
        raise ValueError("it has no metadata of Zarr")
    return found


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if not 2 <= len(values) <= 6 or not all(type(value) is int and 0 < value < 2**40 for value in values):
        raise ValueError(f"its sizes are {values!s:.100}, and two to six positive integers are needed")
    return tuple(values)
