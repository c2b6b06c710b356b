"""Slices of NIfTI volumes, with or without gzip: the images along the third axis, of each volume in order.

As many volumes as ``dataset.channels``, if these are several, are the channels of each slice; so are colors. Slices are
upright as those of DICOM: rows go to posterior or inferior, columns to the left or to posterior. Values are those after
slope and intercept. Their window is ``cal_min`` to ``cal_max`` if the file has it; there is no other known range.
"""

import gzip
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import IO, Any

import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.orientations import io_orientation
from PIL import Image

from fedssl.datasets.formats import GZIP
from fedssl.datasets.pages import Pages, check_count, check_shape
from fedssl.datasets.raster import PERCENTILE_VALUES, Raster, percentiles_of

_EXPANSION = 1032  # bytes per byte of deflate, at most
_MAX_EXPANDED = 2**34  # bytes
_IN_MEMORY = 2**26  # bytes; larger files are decompressed into a temporary file
_PART = 2**20  # bytes
_MAX_HEADER = 540  # bytes, of NIfTI-2
_PLACES = 3  # axes of space

logging.getLogger("nibabel").setLevel(logging.CRITICAL)  # it reports each deviation from the standard


class _Slices(Pages):
    def __init__(self, header: Any, stream: IO[bytes], *, max_pixels: int, channels: int) -> None:
        shape = tuple(map(int, header.get_data_shape()))
        self._plane, self._depth = shape[:2], math.prod(shape[2:_PLACES])
        volumes = math.prod(shape[_PLACES:])
        self._combined = volumes if volumes == channels else 1  # volumes that are one image
        self._count = self._depth * volumes // self._combined
        dtype = header.get_data_dtype()
        self._colors = len(dtype.names or ())
        self._stored = np.dtype(np.uint8) if self._colors else dtype
        if self._stored.kind not in "iuf" or self._stored.itemsize > 8:
            raise ValueError(f"its values are {dtype}, and real numbers are needed")
        slope, self._intercept = header.get_slope_inter()
        self._slope = 1.0 if slope is None or self._colors else slope  # None for 0 and NaN
        self._intercept = self._intercept or 0.0
        self._is_plain = (self._slope, self._intercept) == (1, 0)
        window = float(header["cal_min"]), float(header["cal_max"])
        self._window = window if -np.inf < window[0] < window[1] < np.inf else None
        self._of_volume = cache(self._percentiles)
        self._turn = _orientation(header)
        self._stream, self._start = stream, _start(header)
        check_count(self._count)
        check_shape((self._plane[0], self._plane[1], self._channels), max_pixels=max_pixels)

    @property
    def count(self) -> int:
        return self._count

    @property
    def _channels(self) -> int:
        return self._combined * max(self._colors, 1)

    @property
    def _slice_bytes(self) -> int:
        return math.prod(self._plane) * max(self._colors, 1) * self._stored.itemsize

    def page(self, number: int) -> Image.Image | Raster:
        if not 0 <= number < self._count:
            raise IndexError(f"it has {self._count} slices, and none with number {number}")
        if self._stored == np.uint8 and self._is_plain and self._channels in (1, 3):  # with the pixels of an image file
            return Image.fromarray(np.ascontiguousarray(self._values(number)))
        height, width = self._upright(np.empty(self._plane, np.bool_)).shape
        is_short = self._stored.kind in "iu" and self._stored.itemsize <= 2
        return Raster(
            shape=(height, width, self._channels),
            load=lambda: self._values(number),
            limits=self._window,
            is_window=self._window is not None,
            is_wide=True,
            has_alpha=self._colors == 4,
            dtype="uint16" if is_short and not self._is_plain else None,
            file_percentiles=self._of_volume,
        )

    def _values(self, number: int) -> np.ndarray:
        """Return a slice, ``(height, width)`` or ``(height, width, channels)``."""
        slices = [self._read(number + volume * self._depth) for volume in range(self._combined)]
        values = self._upright(slices[0] if len(slices) == 1 else np.stack(slices, axis=-1))
        if self._is_plain:
            return values
        scaled: np.ndarray = values * np.float64(self._slope) + self._intercept
        return scaled

    def _read(self, place: int) -> np.ndarray:
        """Return stored values, the first axis in the file first."""
        self._stream.seek(self._start + place * self._slice_bytes)
        flat = np.frombuffer(self._stream.read(self._slice_bytes), self._stored)
        if self._colors:
            return flat.reshape(self._colors, *self._plane, order="F").transpose(1, 2, 0)
        return flat.reshape(self._plane, order="F")

    def _upright(self, values: np.ndarray) -> np.ndarray:
        (first, sign), (second, other_sign) = self._turn
        values = values[:: -int(sign), :: -int(other_sign)]
        return values.swapaxes(0, 1) if first < second else values

    def _percentiles(self, percentiles: tuple[float, float]) -> tuple[float, float]:
        """Return two percentiles of all slices, of which some values at equal distances are used."""
        step = -(-self._count * math.prod(self._plane) * self._channels // PERCENTILE_VALUES)
        parts = [self._values(number).reshape(-1)[number % step :: step] for number in range(self._count)]
        return percentiles_of(np.concatenate(parts), percentiles)


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a file; the arguments are those of `fedssl.datasets.pages.open_pages`."""
    is_packed = stream.read(len(GZIP)) == GZIP
    size = stream.seek(0, 2)
    stream.seek(0)
    with (
        gzip.GzipFile(fileobj=stream) if is_packed else nullcontext(stream) as source,
        tempfile.SpooledTemporaryFile(_IN_MEMORY) as copy,
    ):
        head = source.read(_MAX_HEADER)
        header = _header(head)
        end = _start(header) + math.prod(header.get_data_shape()) * header.get_data_dtype().itemsize
        if isinstance(source, gzip.GzipFile):
            if end > min(_EXPANSION * size, _MAX_EXPANDED):
                raise ValueError(f"it has {size:,} bytes, and its header declares {end:,}")
            copy.write(head)
            with suppress(EOFError):  # it has been cut, see below
                while (missing := end - copy.tell()) > 0 and (part := source.read(min(missing, _PART))):
                    copy.write(part)
        content = copy if is_packed else stream
        if content.seek(0, 2) < end:
            raise ValueError("it has been cut")
        yield _Slices(header, content, max_pixels=max_pixels, channels=channels)


def _header(head: bytes) -> Any:
    """Return the header, without its extensions; `ValueError` if the values are in another file."""
    kind: Any = Nifti2Header if head[4:7] == Nifti2Header.single_magic else Nifti1Header
    place = 4 if kind is Nifti2Header else 344
    if not head.startswith(kind.single_magic, place):
        raise ValueError("it is no NIfTI file that holds its values; convert .hdr and .img to .nii")
    header = kind(head[: kind.template_dtype.itemsize])
    shape = header.get_data_shape()
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(f"its shape is {shape}")
    return header


def _start(header: Any) -> int:
    return int(header.get_data_offset()) or int(header.single_vox_offset)


def _orientation(header: Any) -> np.ndarray:
    """Return for each of the first two axes the place in right, anterior, superior, and 1 if it goes there, else -1."""
    affine = header.get_best_affine()
    turn = io_orientation(affine) if np.isfinite(affine).all() else np.full((_PLACES, 2), np.nan)
    return turn[:2] if np.isfinite(turn).all() else np.array([[0, 1], [1, 1]])
