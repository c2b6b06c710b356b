"""The images of a page with their features: those of a path, or without a path those of a run's clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedssl.embedding.embedder import Embedder
from fedssl.embedding.embeddings import check_readable
from fedssl.embedding.image_list import Block, ImageList
from fedssl.embedding.progress import progress_bar
from fedssl.explore.columns import Column, coded, column_of
from fedssl.explore.thumbnails import Sheets, thumbnail_size
from fedssl.seeding import numpy_generator

if TYPE_CHECKING:  # it imports torch
    from fedssl.explore.run_images import RunImages

_THUMBNAILS = 256  # decoded at once


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
            found.append(column_of("group", groups))
        for name in further:
            values = self.images.values(name)
            found.append(column_of(name, [values[row] for row in rows]))
        return found

    def check(self, unreadable: dict[int, str]) -> str:
        check_readable(self.images, unreadable, skip=True)
        if not unreadable:
            return ""
        named = ", ".join(self.names(np.array(sorted(unreadable)[:5])))
        return f"{len(unreadable):,} of {len(self):,} images cannot be read and are left out, such as {named}."

    def sampled(self, limit: int) -> "PathImages":
        return replace(self, images=self.images.at(sample(len(self), limit)))


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
        names=names,
        features=np.concatenate(features) if known is None else np.stack([known[name] for name in names]),
        columns=images.columns(readable, further),
        sheets=sheets,
        digests=digests,
        warning=warning,
    )
