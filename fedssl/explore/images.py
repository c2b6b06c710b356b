"""The images of a page with features and thumbnails: those of a path, or without a path those of a run's clients.

Thumbnails are on sheets: WebP images with many of them each, in base64.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from PIL import Image

from fedssl.datasets.raster import convert
from fedssl.embedding.embedder import Embedder
from fedssl.embedding.embeddings import check_readable, progress_bar
from fedssl.embedding.image_list import Block, ImageList
from fedssl.explore.columns import Column, coded, column_of
from fedssl.pages import base64_of
from fedssl.seeding import numpy_generator

if TYPE_CHECKING:  # it imports torch
    from fedssl.explore.run_images import RunImages

_THUMBNAILS = 256  # decoded at once
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


def sample(count: int, limit: int) -> np.ndarray:
    """Draw ``min(count, limit)`` ascending numbers below ``count``, always the same."""
    return np.sort(numpy_generator(0, "explore").permutation(count)[:limit])


@dataclass(frozen=True)
class PathImages:
    """Images of a path, decoded when they are used. Rows are their ascending numbers."""

    name: str
    images: ImageList

    def __len__(self) -> int:
        return len(self.images)

    def blocks(self, size: int) -> Iterator[Block]:
        return self.images.blocks(size)

    def decode(self, rows: np.ndarray, *, size: int) -> np.ndarray:
        return self.images.decode(rows, size=size)

    def names(self, rows: np.ndarray) -> list[str]:
        return self.images.names(rows)

    def columns(self, rows: np.ndarray, further: Sequence[str]) -> list[Column]:
        found = []
        if self.images.labels is not None:
            found.append(coded("label", self.images.labels[rows], self.images.classes))
        groups = self.images.groups(rows)
        if groups is not None:
            found.append(column_of("group", without_folders(groups)))
        for name in further:
            values = self.images.values(name)
            found.append(column_of(name, [values[row] for row in rows]))
        return found

    def check(self, unreadable: dict[int, str]) -> str:
        check_readable(self.images, unreadable, skip=True)
        if not unreadable:
            return ""
        named = ", ".join(without_folders(self.names(np.array(sorted(unreadable)[:5]))))
        return f"{len(unreadable):,} of {len(self):,} images cannot be read and are left out, such as {named}."

    def sampled(self, limit: int) -> "PathImages":
        return replace(self, images=self.images.at(sample(len(self), limit)))


def without_folders(names: Sequence[str]) -> list[str]:
    """Return absolute paths below the folder that they share: a page that is shared has no path of this machine."""
    absolute = [str(PurePath(name).parent) for name in names if name.startswith("/")]
    shared = PurePath(os.path.commonpath(absolute)) if absolute else PurePath()
    return [PurePath(name).relative_to(shared).as_posix() if name.startswith("/") else name for name in names]


Images: TypeAlias = "PathImages | RunImages"


@dataclass(frozen=True)
class Collected:
    """The readable images of a page."""

    names: list[str]
    features: np.ndarray  # float32, ``(n, dimension)``
    columns: list[Column]
    sheets: Sheets
    digests: list[str]  # equal for images with equal pixels in the encoder's size
    warning: str


def collect(
    images: Images,
    embedder: Embedder,
    *,
    known: dict[str, np.ndarray] | None,
    bands: Sequence[int],
    further: Sequence[str],
) -> Collected:
    """Compute features and thumbnails of images in blocks; a terminal shows the progress.

    Parameters
    ----------
    images, embedder
        See `PathImages`, `fedssl.explore.run_images.RunImages` and `fedssl.embedding.Embedder`.
    known : dict or None
        Features by the names of the images, which are then not computed.
    bands, further
        Channels of the thumbnails, and further columns of the source.
    """
    size = thumbnail_size(len(images))
    sheets = Sheets(len(images), size, bands)
    is_enough = embedder.size >= size  # decoded images give their thumbnails
    features, rows, digests, unreadable = list[np.ndarray](), list[np.ndarray](), list[str](), dict[int, str]()
    with progress_bar(len(images)) as show:
        for block in images.blocks(embedder.batch_size):
            if known is None:
                features.append(embedder(block.images))
            digests += block.digests()
            if is_enough:
                sheets.add(block.images)
            rows.append(block.rows)
            unreadable |= block.unreadable
            show(block.end)
        warning = images.check(unreadable)
        readable = np.concatenate(rows)
        for start in () if is_enough else range(0, len(readable), _THUMBNAILS):
            sheets.add(images.decode(readable[start : start + _THUMBNAILS], size=size))
            show(int(readable[start]))
    sheets.finish()
    names = images.names(readable)
    return Collected(
        names=without_folders(names),
        features=np.concatenate(features) if known is None else np.stack([known[name] for name in names]),
        columns=images.columns(readable, further),
        sheets=sheets,
        digests=digests,
        warning=warning,
    )
