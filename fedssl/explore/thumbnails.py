"""Thumbnails on sheets of a page: WebP images with many thumbnails each, in base64."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from fedssl.datasets.raster import convert
from fedssl.pages import base64_of

SIZES = (96, 80, 64, 48, 32, 16)  # heights and widths; multiples of WebP's blocks, so that neighbors do not mix
MAX_PIXELS = 24_000_000  # of all thumbnails of a page: about 4 MB for photos and at most 30 MB
SHEET = 2048  # maximum height and width of a sheet, which a phone can decode
_QUALITY = 75


def thumbnail_size(count: int) -> int:
    """Return the height and width of ``count`` thumbnails, with `MAX_PIXELS` for all; at least 16."""
    return next((size for size in SIZES if count * size**2 <= MAX_PIXELS), SIZES[-1])


@dataclass
class Sheets:
    """Sheets that are filled image by image and encoded when they are full."""

    count: int  # of all thumbnails
    size: int
    bands: Sequence[int]
    encoded: list[str] = field(default_factory=list)  # in base64
    _open: list[np.ndarray] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Number of thumbnails in a row of a sheet."""
        return min(SHEET // self.size, max(self.count, 1))

    @property
    def per_sheet(self) -> int:
        return self.columns * (SHEET // self.size)

    def add(self, images: np.ndarray) -> None:
        """Add images ``(n, channels, height, width)`` of a dtype of `fedssl.datasets.raster.MAXIMA`."""
        for image in images:
            levels = convert(image[list(self.bands)], "uint8").transpose(1, 2, 0)
            shown = Image.fromarray(np.ascontiguousarray(levels if len(self.bands) == 3 else levels[..., 0]))
            if shown.size != (self.size, self.size):
                enlarged = self.size > shown.width  # pixels of small images stay visible
                shown = shown.resize(
                    (self.size, self.size), Image.Resampling.NEAREST if enlarged else Image.Resampling.BILINEAR
                )
            self._open.append(np.asarray(shown.convert("RGB")))
            if len(self._open) == self.per_sheet:
                self._encode()

    def finish(self) -> None:
        """Encode the last sheet."""
        if self._open:
            self._encode()

    def _encode(self) -> None:
        rows = -(-len(self._open) // self.columns)
        sheet = np.zeros((rows * self.columns, self.size, self.size, 3), np.uint8)
        sheet[: len(self._open)] = self._open
        grid = sheet.reshape(rows, self.columns, self.size, self.size, 3).swapaxes(1, 2)
        picture = Image.fromarray(grid.reshape(rows * self.size, -1, 3))
        self.encoded.append(base64_of(lambda stream: picture.save(stream, "webp", quality=_QUALITY, method=4)))
        self._open.clear()
