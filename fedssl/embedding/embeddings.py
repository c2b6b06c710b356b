"""Features of all images of a path, in memory, and centered features, whose inner products are cosines.

They are centered because representations behind a ReLU all have high cosines.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from fedssl.embedding.embedder import Embedder
from fedssl.embedding.image_list import Block, ImageList, list_images
from fedssl.errors import InputError, sanitize
from fedssl.logs import log

_MAX_NAMED = 5  # unreadable images in a message

_ROUNDING = 1e-5  # of a centered feature compared with its length before


@dataclass(frozen=True)
class Embeddings:
    """Features of the readable images of a path, and access to the images."""

    names: list[str]  # paths below that of the images, with the page, row or key in brackets
    features: np.ndarray  # float32, ``(n, dimension)``
    labels: np.ndarray | None  # int64, ``(n,)``, -1 if unknown; None if no image has one
    classes: tuple[str, ...]  # ``classes[label]``; empty if unknown
    images: ImageList  # of all images
    rows: np.ndarray  # those of ``images`` that are readable, int64 ``(n,)``, ascending
    digests: np.ndarray  # str, ``(n,)``, equal for equal pixels
    blank: np.ndarray  # bool, ``(n,)``, whether all pixels of a channel are equal

    def decode(self, numbers: np.ndarray, *, size: int | None = None) -> np.ndarray:
        """Return the images with these ascending numbers, ``(k, channels, size, size)``, in another size if given."""
        return self.images.decode(self.rows[numbers], size=size)

    def values(self, name: str) -> list[Any]:
        """Return a further column of the source, such as one of a CSV file; `InputError` if it has none."""
        values = self.images.values(name)
        return [values[row] for row in self.rows]


def list_for(
    embedder: Embedder, path: str | Path, settings: Mapping[str, Any], *, setting: str = "images"
) -> ImageList:
    """List the images of a path, which is named by ``setting``, with the pixels of an encoder, and log warnings."""
    images = list_images(
        path,
        channels=embedder.channels,
        size=embedder.size,
        pixels=embedder.pixels,
        settings=settings,
        setting=setting,
    )
    for warning in images.warnings:
        log.warning("%s", sanitize(warning))
    return images


def embed_path(
    embedder: Embedder,
    path: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    skip_unreadable: bool = False,
) -> Embeddings:
    """Compute the features of all images of a path; `InputError` if there are none.

    Parameters
    ----------
    embedder : Embedder
        See `fedssl.embedding.load_embedder`.
    path : str or Path
        A file, a folder or a pattern, as of ``dataset=folder``.
    settings : mapping, optional
        Settings of ``dataset=folder``, see `fedssl.embedding.image_list.SETTINGS`.
    skip_unreadable : bool
        Whether images that cannot be read are left out; otherwise they are an error.
    """
    return embed_list(embedder, list_for(embedder, path, settings or {}), skip_unreadable=skip_unreadable)


def embed_list(embedder: Embedder, images: ImageList, *, skip_unreadable: bool) -> Embeddings:
    """Compute the features of all images of a list, as `embed_path`."""
    features, rows, blank = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    digests, unreadable = list[str](), dict[int, str]()
    for block, of_block in embedded_blocks(embedder, images):
        features.append(of_block)
        rows.append(block.rows)
        digests += block.digests()
        blank.append((block.images == block.images[..., :1, :1]).all(axis=(1, 2, 3)))
        unreadable |= block.unreadable
    check_readable(images, unreadable, skip=skip_unreadable)
    readable = np.concatenate(rows)
    return Embeddings(
        names=[place.name for place in images.places(readable)],
        features=np.concatenate(features),
        labels=None if images.labels is None else images.labels[readable],
        classes=images.classes,
        images=images,
        rows=readable,
        digests=np.array(digests),
        blank=np.concatenate(blank),
    )


def embedded_blocks(embedder: Embedder, images: ImageList, *, start: int = 0) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield the images from row ``start`` on in blocks, with their features; a terminal shows the progress."""
    with progress_bar(len(images), done=start) as show:
        for block in images.blocks(embedder.batch_size, start=start):
            yield block, embedder(block.images)
            show(block.end)


def check_readable(images: ImageList, unreadable: Mapping[int, str], *, skip: bool) -> None:
    """Raise an `InputError` for images that cannot be read, or log them if they are to be skipped."""
    if not unreadable:
        return
    first = sorted(unreadable)[:_MAX_NAMED]
    names = images.names(np.array(first))
    listed = [f"{name} ({_of_encoder(unreadable[row])})" for name, row in zip(names, first, strict=True)]
    more = f" and {len(unreadable) - len(first):,} more" if len(unreadable) > len(first) else ""
    line = f"{len(unreadable):,} of {len(images):,} images cannot be read: {', '.join(listed)}{more}"
    if len(unreadable) == len(images):
        raise InputError(f"{line}; check the path")
    if not skip:
        raise InputError(f"{line}; repair or remove them, or leave them out with skip_unreadable=true")
    log.warning("%s", sanitize(f"{line}; they are left out"))


def _of_encoder(reason: str) -> str:
    """Return a reason without the advice to change the number of channels, which is that of the encoder."""
    return re.sub(r"; set dataset\.channels=.*", "", reason).replace("dataset.channels=", "the encoder's channels=")


@contextmanager
def progress_bar(total: int, *, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of images that are done; it shows nothing outside of a terminal."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=total, completed=done)
        yield lambda number: bar.update(task, completed=number)


def unit_features(features: np.ndarray, *, center: np.ndarray | None = None) -> np.ndarray:
    """Center features ``(n, dim)``, by default with their mean, and scale them to length 1, float32 ``(n, dim + 1)``.

    A feature equal to the center has no direction; it becomes the last unit vector. Features of a collapsed encoder, or
    of equal images, therefore have the cosine 1.
    """
    exact = features.astype(np.float64)
    centered = exact - (exact.mean(axis=0) if center is None else center)
    lengths = np.linalg.norm(centered, axis=1)
    is_mean = lengths <= _ROUNDING * np.linalg.norm(exact, axis=1)
    centered[is_mean], lengths[is_mean] = 0, 1
    return np.column_stack([centered / lengths[:, None], is_mean]).astype(np.float32)
