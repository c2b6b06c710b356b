"""Pages of TIFF files that Pillow cannot read or would reduce to 8 bits: color of 16 bits, many channels.

Read by tifffile; some compressions need imagecodecs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import tifffile

from fedssl.datasets.pages import Pages, check_shape
from fedssl.datasets.raster import Raster

_EXPANSION = 2000  # decoded bytes per byte of the file, at most; deflate reaches 1032
_ALPHA = (1, 2)  # kinds of extra samples
_ORIENTATION = 274
_FLIPS = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}  # axes by orientation, after a transposition
_OTHER = (3, 8, 9, 10)  # kinds of color: palette, CIELAB, ICCLAB, ITULAB
_JPEG = (6, 7, 33007, 34892)
# Formats of images, whose own declared size nothing limits.
_REFUSED = tifffile.TIFF.IMAGE_COMPRESSIONS.difference(_JPEG) | {tifffile.COMPRESSION.LERC}


class _TiffPages(Pages):
    def __init__(self, file: tifffile.TiffFile, *, max_pixels: int) -> None:
        self._file, self._max_pixels = file, max_pixels

    @property
    def count(self) -> int:
        return len(self._file.pages)

    def page(self, number: int) -> Raster:
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
        extra = page.extrasamples
        return Raster(
            shape=shape,
            load=lambda: _values(page),
            limits=(0, 2**page.bitspersample - 1) if page.dtype.kind == "u" and page.bitspersample <= 16 else None,
            white_is_zero=page.photometric == tifffile.PHOTOMETRIC.MINISWHITE,
            has_alpha=bool(extra) and int(extra[-1]) in _ALPHA,
        )


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a file; the arguments are those of `fedssl.datasets.pages.open_pages`."""
    stream.seek(0)
    with tifffile.TiffFile(stream, name="image.tif") as file:  # a stream of a descriptor has no name
        yield _TiffPages(file, max_pixels=max_pixels)


def _values(page: Any) -> np.ndarray:
    values: np.ndarray = page.asarray(maxworkers=1)
    if values.ndim == 3 and page.planarconfig == tifffile.PLANARCONFIG.SEPARATE:
        values = values.transpose(1, 2, 0)
    orientation = page.tags.valueof(_ORIENTATION, 1)
    return np.flip(values.swapaxes(0, 1) if orientation > 4 else values, _FLIPS.get(orientation, ()))
