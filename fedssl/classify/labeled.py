"""Labeled images with their features, checked for what would make a result wrong."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedssl.datasets.holdout import NO_LABEL
from fedssl.digests import checksum
from fedssl.embedding import Embedder, Embeddings, embed_path
from fedssl.errors import InputError, shortened
from fedssl.safe_io import sanitize

GROUP = "group"  # column that is used without a setting
UNLABELED = {"label": None, "folders": "none"}  # settings of images whose labels are not used

log = logging.getLogger("fedssl")


class DigestingEmbedder(Embedder):
    """An embedder that also lists the digest of each image, by which copies are found."""

    def __init__(self, embedder: Embedder) -> None:
        names = ("dimension", "channels", "size", "pixels", "digest", "device")
        super().__init__(**{name: vars(embedder)[name] for name in names})
        self._embedder = embedder
        self.digests: list[str] = []

    def _compute(self, images: np.ndarray) -> np.ndarray:
        self.digests += [checksum(np.ascontiguousarray(image).data.cast("B")) for image in images]
        return self._embedder(images)


@dataclass(frozen=True, eq=False)
class Images:
    """Images with features."""

    embeddings: Embeddings
    digests: np.ndarray  # str, ``(n,)``, equal for equal pixels

    @property
    def features(self) -> np.ndarray:
        """Float32 ``(n, dim)``."""
        return self.embeddings.features

    def others(self, labeled: "LabeledImages | None") -> np.ndarray:
        """Return the rows of the images that are no labeled ones, nor copies of them."""
        known = labeled.digests[labeled.rows] if labeled is not None else []
        return np.flatnonzero(~np.isin(self.digests, known))


@dataclass(frozen=True, eq=False)
class LabeledImages(Images):
    """Images of which some have labels."""

    rows: np.ndarray  # of the images with a label, int64 ``(m,)``
    labels: np.ndarray  # int64 ``(m,)``, numbers of ``classes``
    classes: tuple[str, ...]  # each has an image
    groups: np.ndarray  # int64 ``(m,)``; images with equal pixels are in one group

    @property
    def known(self) -> np.ndarray:
        """Features of the images with a label, float32 ``(m, dim)``."""
        known: np.ndarray = self.features[self.rows]
        return known


def embed(embedder: Embedder, path: Path, settings: Mapping[str, Any], *, skip_unreadable: bool) -> Images:
    """Return the images of a path with features and digests, see `fedssl.embedding.embed_path`."""
    digesting = DigestingEmbedder(embedder)
    embeddings = embed_path(digesting, path, settings=settings, skip_unreadable=skip_unreadable)
    return Images(embeddings, np.array(digesting.digests))


def read_labeled(
    embedder: Embedder, path: Path, settings: Mapping[str, Any], *, skip_unreadable: bool
) -> LabeledImages:
    """Return images with their labels; `InputError` if these are no two classes, or contradict each other."""
    try:
        images = embed(embedder, path, settings, skip_unreadable=skip_unreadable)
    except InputError as error:
        raise InputError(re.sub(r"\bimages(?=[=:]|$)", "labeled", str(error))) from error
    found = images.embeddings.labels
    if found is None:
        raise InputError(
            f"labeled={path} has no labels, or one class only, but a classifier needs two; give a folder with one "
            "subfolder per class, or a CSV file with the columns path and label (another name: dataset.label=NAME)"
        )
    rows = np.flatnonzero(found != NO_LABEL)
    present, labels = np.unique(found[rows], return_inverse=True)
    names = images.embeddings.classes or tuple(map(str, range(present.max() + 1)))
    classes = tuple(names[number] for number in present)
    if len(classes) < 2:
        raise InputError(
            f"labeled={path} has one class only ({sanitize(classes[0])}), but a classifier needs two; add images of "
            "another class, or of anything else as the class other"
        )
    _check_copies(images, rows, labels, classes)
    _warn(images.embeddings, path, rows, classes)
    return LabeledImages(images.embeddings, images.digests, rows, labels, classes, _groups(images, rows))


def _check_copies(images: Images, rows: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """Raise an `InputError` if an image has two labels, or if all images have the same features."""
    names, first = images.embeddings.names, dict[str, int]()
    for place, (row, label) in enumerate(zip(rows, labels, strict=True)):
        other = first.setdefault(images.digests[row], place)
        if labels[other] != label:
            raise InputError(
                sanitize(
                    f"{names[rows[other]]} and {names[row]} are the same image, but labeled {classes[labels[other]]!r} "
                    f"and {classes[label]!r}; remove the wrong one"
                )
            )
    if len(first) > 1 and np.ptp(images.features[rows], axis=0).max() == 0:
        raise InputError("the encoder gives the same features for all labeled images: it has collapsed; train another")


def _warn(embeddings: Embeddings, path: Path, rows: np.ndarray, classes: Sequence[str]) -> None:
    """Log what may be wrong with the labels."""
    missing = len(embeddings.names) - len(rows)
    if missing:
        log.warning("%s", sanitize(f"{missing:,} of {len(embeddings.names):,} images of {path} have no label"))
    unused = [name for name in embeddings.classes if name not in classes]
    if unused:
        log.warning("%s", sanitize(f"classes without images are never predicted: {shortened(unused)}"))
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(name.strip().casefold(), []).append(name)
    for similar in spellings.values():
        if len(similar) > 1:
            listed = ", ".join(map(repr, similar))
            log.warning("%s", sanitize(f"{listed} count as {len(similar)} classes; write them alike if they are one"))


def _groups(images: Images, rows: np.ndarray) -> np.ndarray:
    """Return the group of each row: joined by the column of groups, if there is one, and by equal pixels."""
    _, copies = np.unique(images.digests[rows], return_inverse=True)
    names = images.embeddings.images.groups(images.embeddings.rows)
    values: Sequence[Any] = names or []
    if names is None:
        try:
            values = images.embeddings.values(GROUP)
        except InputError:  # there is no such column
            return np.asarray(copies)
    given = [f"group {values[row]}" if values[row] is not None else f"image {row}" for row in rows]
    _, groups = np.unique(given, return_inverse=True)
    size = max(groups.max(), copies.max()) + 1
    edges = coo_array((np.ones(len(rows)), (groups, size + copies)), shape=(2 * size, 2 * size))
    return np.asarray(connected_components(edges, directed=False)[1][groups])
