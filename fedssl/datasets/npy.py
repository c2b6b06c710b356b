"""Arrays of NumPy: one image, or a stack of images."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import IO

import numpy as np
from numpy.lib import format as npy
from PIL import Image

from fedssl.config.constraint_table import MAX_CHANNELS
from fedssl.datasets.pages import Pages, check_shape, max_file_bytes
from fedssl.datasets.raster import Raster, percentiles_of


class ArrayPages(Pages):
    """Images of an array ``(n, height, width, channels)``, which may be mapped from a file."""

    def __init__(self, array: np.ndarray, *, max_pixels: int) -> None:
        _, height, width, channels = array.shape
        check_shape((height, width, channels), max_pixels=max_pixels)
        self._array = array
        self._percentiles = cache(partial(percentiles_of, array))

    @property
    def count(self) -> int:
        return len(self._array)

    def page(self, number: int) -> Image.Image | Raster:
        _, height, width, channels = self._array.shape
        if self._array.dtype == np.uint8 and channels in (1, 3):  # with the pixels of an image file
            values = np.ascontiguousarray(self._array[number])
            return Image.fromarray(values if channels == 3 else values[..., 0])
        return Raster(
            shape=(height, width, channels),
            load=lambda: np.array(self._array[number]),
            file_percentiles=self._percentiles,
        )


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a file; pickled objects are refused. The arguments are those of `fedssl.datasets.pages.open_pages`."""
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject or dtype.kind not in "biuf":
        raise ValueError(f"it is an array of {dtype}, and numbers are needed")
    _, height, width, depth = as_images(np.broadcast_to(np.zeros((), dtype), shape), channels).shape
    check_shape((height, width, depth), max_pixels=max_pixels)
    if (needed := math.prod(shape) * dtype.itemsize) > max_file_bytes(max_pixels):  # it is read as a whole
        found = f"it has {needed:,} bytes but the maximum is {max_file_bytes(max_pixels):,}"
        raise ValueError(f"{found}; save its images as several files, or as NPZ")
    content = stream.read()
    if len(content) < math.prod(shape) * dtype.itemsize:
        raise ValueError("it has been cut")
    flat = np.frombuffer(content, dtype, count=math.prod(shape))
    array = flat.reshape(shape, order="F" if is_fortran else "C")
    yield ArrayPages(as_images(array, channels), max_pixels=max_pixels)


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
    """Return an array of one or several images as ``(n, height, width, channels)``.

    It is ``(height, width)``, with an axis of channels at either end, or one of images before all others. The axis of
    channels is the last or else the first of the data set's ``channels``, of 1 or 3, or of up to `MAX_CHANNELS`. For
    gray and color, more than `MAX_CHANNELS` small squares, such as ``(60000, 28, 28)``, are a stack.
    """
    if array.ndim == 2:
        return array[None, :, :, None]
    if array.ndim not in (3, 4) or not array.size:
        raise ValueError(f"its shape is {array.shape}, and (height, width) is needed, with or without channels")
    count, height, width = array.shape[-3:]
    is_stack = channels in (1, 3) and array.ndim == 3 and count > MAX_CHANNELS and count != height == width
    further = () if is_stack else range(1, MAX_CHANNELS + 1)
    for allowed in ((channels,), (1, 3) if channels in (1, 3) else (), further):
        for axis in (-1, -3):
            if array.shape[axis] in allowed:
                images = np.moveaxis(array, axis, -1)
                return images if array.ndim == 4 else images[None]
    if array.ndim == 3:
        return array[..., None]
    raise ValueError(f"its shape is {array.shape}, and no axis has at most {MAX_CHANNELS} channels")
