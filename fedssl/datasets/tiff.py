"""Pages of TIFF files that Pillow cannot read or would reduce to 8 bits: color of 16 bits, many channels.

Read by tifffile with imagecodecs, without which it would expand damaged data without a limit.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import IO, Any

import imagecodecs  # noqa: F401, see above
import numpy as np
import tifffile

from fedssl.datasets.pages import Pages, check_shape
from fedssl.datasets.pixels import NO_DATA
from fedssl.datasets.raster import Raster, narrowest_dtype
from fedssl.datasets.tiff_chain import image_pages

_EXPANSION = 2000  # decoded bytes per byte of the file, at most; deflate reaches 1032
_ALPHA = (_PREMULTIPLIED := 1, 2)  # kinds of extra samples
_ORIENTATION = 274
_FLIPS = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}  # axes by orientation, after a transposition
_OTHER = (3, 8, 9, 10)  # kinds of color: palette, CIELAB, ICCLAB, ITULAB
_COLOR = (2, 6)  # RGB, YCbCr
_JPEG = (6, 7, 33007, 34892)
# Formats of images, whose own declared size nothing limits.
_REFUSED = tifffile.TIFF.IMAGE_COMPRESSIONS.difference(_JPEG) | {tifffile.COMPRESSION.LERC}


class _TiffPages(Pages):
    def __init__(self, file: tifffile.TiffFile, stream: IO[bytes], *, max_pixels: int) -> None:
        self._file, self._stream, self._max_pixels = file, stream, max_pixels

    @cached_property
    def _numbers(self) -> list[int]:
        return image_pages(self._stream)

    @property
    def count(self) -> int:
        return len(self._numbers)

    @property
    def description(self) -> str:
        return self._file.ome_metadata or ""

    def page(self, number: int) -> Raster:
        return self.raster(self._numbers[number] if number else image_pages(self._stream, limit=1)[0])

    def raster(self, number: int, *, as_rgb: bool = False) -> Raster:
        """Return a page by its number in the file; ``as_rgb`` converts CMYK."""
        page: Any = self._file.pages[number]
        shape = (page.imagelength, page.imagewidth, page.samplesperpixel)
        check_shape(shape, max_pixels=self._max_pixels)
        if page.imagedepth != 1 or page.dtype is None or page.dtype.kind not in "biuf":
            raise ValueError("its values are not those of an image")
        if math.prod(shape) * page.dtype.itemsize > _EXPANSION * self._file.filehandle.size:
            raise ValueError("its pixels are not in the file")
        if page.photometric in _OTHER or page.compression in _REFUSED:
            kind = f"colors {page.photometric.name}" if page.photometric in _OTHER else page.compression.name
            raise ValueError(f"it has {kind}; save it as RGB, with deflate, LZW or zstd")
        extra, no_data = page.extrasamples, _no_data(page)
        has_alpha = bool(extra) and int(extra[-1]) in _ALPHA
        is_color = page.photometric in _COLOR and shape[2] - has_alpha == 3 and page.dtype.kind == "u"
        if as_rgb:
            white = 2**page.bitspersample - 1
            rgb_shape = (*shape[:2], 3)
            return Raster(shape=rgb_shape, load=lambda: _rgb(_values(page), white), limits=(0, white), dtype="uint16")
        return Raster(
            shape=shape,
            load=lambda: _values(page) if no_data is None else _without(_values(page), no_data, is_color=is_color),
            dtype=narrowest_dtype(page.dtype),
            limits=(0, 2**page.bitspersample - 1) if page.dtype.kind == "u" and page.bitspersample <= 16 else None,
            white_is_zero=page.photometric == tifffile.PHOTOMETRIC.MINISWHITE,
            has_alpha=has_alpha,
            is_premultiplied=bool(extra) and int(extra[-1]) == _PREMULTIPLIED,
        )


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a file; the arguments are those of `fedssl.datasets.pages.open_pages`."""
    stream.seek(0)
    with tifffile.TiffFile(stream, name="image.tif") as file:  # a stream of a descriptor has no name
        yield _TiffPages(file, stream, max_pixels=max_pixels)


def _no_data(page: Any) -> float | None:
    """Return the value of pixels without data, in GDAL's tag; None if there is none."""
    try:
        return float(str(page.tags.valueof(NO_DATA, "")).strip("\0 "))
    except ValueError:
        return None


def _without(values: np.ndarray, no_data: float, *, is_color: bool) -> np.ndarray:
    """Replace values without data by NaN; of color, pixels of which every channel has the value."""
    floats = values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32)
    is_missing = values == no_data
    return np.where(is_missing[..., :3].all(axis=2, keepdims=True) if is_color else is_missing, np.nan, floats)


def _rgb(cmyk: np.ndarray, white: int) -> np.ndarray:
    """Convert inks to light, as Pillow does with 8 bits."""
    light = white - cmyk[..., :4].astype(np.float64)
    rgb: np.ndarray = light[..., :3] * light[..., 3:] / white
    return rgb.round().astype(cmyk.dtype)


def _values(page: Any) -> np.ndarray:
    values: np.ndarray = page.asarray(maxworkers=1)
    if values.ndim == 3 and page.planarconfig == tifffile.PLANARCONFIG.SEPARATE:
        values = values.transpose(1, 2, 0)
    orientation = page.tags.valueof(_ORIENTATION, 1)
    return np.flip(values.swapaxes(0, 1) if orientation > 4 else values, _FLIPS.get(orientation, ()))
