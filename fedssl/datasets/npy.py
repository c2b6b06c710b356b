"""Arrays of NumPy: one image, or a stack of images."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, Literal

import numpy as np
from numpy.lib import format as npy
from PIL import Image

from fedssl.config.constraint_table import MAX_CHANNELS
from fedssl.datasets.pages import Pages, check_shape, max_file_bytes
from fedssl.datasets.raster import Raster, percentiles_of


class ArrayPages(Pages):
    """Images of an array in a file; those of a stack are read one at a time."""

    def __init__(self, stream: IO[bytes], *, max_pixels: int, channels: int) -> None:
        self._shape, is_fortran, self._dtype = read_header(stream)
        if self._dtype.hasobject or self._dtype.kind not in "biuf":
            raise ValueError(f"it is an array of {self._dtype}, and numbers are needed")
        self._channel_axis = channel_axis(self._shape, channels)
        images = _as_images(np.broadcast_to(np.zeros((), self._dtype), self._shape), self._channel_axis)
        self._count: int
        self._count, height, width, depth = images.shape
        self._image_shape = height, width, depth
        check_shape(self._image_shape, max_pixels=max_pixels)
        self._stream, self._start, self._max_bytes = stream, stream.tell(), max_file_bytes(max_pixels)
        self._num_bytes = math.prod(self._shape) * self._dtype.itemsize
        if stream.seek(0, io.SEEK_END) - self._start < self._num_bytes:
            raise ValueError("it has been cut")
        self._order: Literal["C", "F"] = "F" if is_fortran else "C"
        self._whole = cache(self._read)
        self._percentiles = cache(lambda percentiles: percentiles_of(self._whole(), percentiles))

    @property
    def count(self) -> int:
        return self._count

    def page(self, number: int) -> Image.Image | Raster:
        height, width, channels = self._image_shape
        if self._dtype == np.uint8 and channels in (1, 3):  # with the pixels of an image file
            values = np.ascontiguousarray(self._image(number))
            return Image.fromarray(values if channels == 3 else values[..., 0])
        return Raster(
            shape=(height, width, channels),
            load=lambda: np.array(self._image(number)),
            file_percentiles=self._percentiles,
        )

    def _image(self, number: int) -> np.ndarray:
        if self._count == 1 or self._order == "F":
            return np.asarray(self._whole()[number])
        if not 0 <= number < self._count:
            raise IndexError(f"it has {self._count} images")
        size = self._num_bytes // self._count
        self._stream.seek(self._start + number * size)
        array = np.frombuffer(self._stream.read(size), self._dtype).reshape(1, *self._shape[1:])
        return np.asarray(_as_images(array, self._channel_axis)[0])

    def _read(self) -> np.ndarray:
        """Return all images, ``(n, height, width, channels)``."""
        if self._num_bytes > self._max_bytes:
            found = f"it has {self._num_bytes:,} bytes but the maximum is {self._max_bytes:,}"
            raise ValueError(f"{found} with these settings; save its images as several files, or as NPZ")
        self._stream.seek(self._start)
        flat = np.frombuffer(self._stream.read(self._num_bytes), self._dtype)
        return _as_images(flat.reshape(self._shape, order=self._order), self._channel_axis)


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a file; pickled objects are refused. The arguments are those of `fedssl.datasets.pages.open_pages`."""
    yield ArrayPages(stream, max_pixels=max_pixels, channels=channels)


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is that of Fortran, and dtype of the array of a file."""
    is_first = npy.read_magic(stream) == (1, 0)
    header: tuple[tuple[int, ...], bool, np.dtype] = (
        npy.read_array_header_1_0(stream) if is_first else npy.read_array_header_2_0(stream)
    )
    return header


def npy_bytes(array: np.ndarray) -> bytes:
    """Return an image ``(height, width)`` or ``(height, width, channels)`` as a file."""
    stream = io.BytesIO()
    npy.write_array(stream, array)
    return stream.getvalue()


def as_images(array: np.ndarray, channels: int) -> np.ndarray:
    """Return an array of one or several images as ``(n, height, width, channels)``, see `channel_axis`."""
    return _as_images(array, channel_axis(array.shape, channels))


def channel_axis(shape: tuple[int, ...], channels: int) -> int | None:
    """Return the axis of the channels of an array, -1 or -3; None without one.

    An array is ``(height, width)``, with an axis of channels at either end, or one of images before all others. The
    axis of channels is the last or else the first of the data set's ``channels``, of 1 or 3, or of up to
    `MAX_CHANNELS`. For gray and color, other arrays of three axes are a stack, such as ``(155, 240, 240)``, unless the
    last has at most `MAX_CHANNELS` and is short, as in ``(240, 320, 4)``: these are bands. Short is at most half of the
    second for gray, and the shortest for color, for which a first axis of at most `MAX_CHANNELS` is a `ValueError`.
    """
    if len(shape) == 2:
        return None
    if len(shape) not in (3, 4) or not math.prod(shape):
        raise ValueError(f"its shape is {shape}, and (height, width) is needed, with or without channels")
    height, width = shape[-2:]
    is_short = width <= MAX_CHANNELS and (2 * width <= height if channels == 1 else width < min(shape[:2]))
    is_stack = channels in (1, 3) and len(shape) == 3 and not is_short
    if is_stack and channels == 3 and shape[0] <= MAX_CHANNELS and not {1, 3} & {shape[0], width}:
        raise ValueError(
            f"its shape is {shape}; for {shape[0]} gray images save array[..., None], for an image of {shape[0]} "
            f"channels set dataset.channels={shape[0]}"
        )
    further = () if is_stack else range(1, MAX_CHANNELS + 1)
    for allowed in ((channels,), (1, 3) if channels in (1, 3) else (), further):
        for axis in (-1, -3):
            if shape[axis] in allowed:
                return axis
    if len(shape) == 4:
        raise ValueError(f"its shape is {shape}, and no axis has at most {MAX_CHANNELS} channels")
    return None


def _as_images(array: np.ndarray, channel_axis: int | None) -> np.ndarray:
    array = array[..., None] if channel_axis is None else np.moveaxis(array, channel_axis, -1)
    return array if array.ndim == 4 else array[None]
