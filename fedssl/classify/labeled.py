"""Labeled images with their features, checked for what would make a result wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedssl.datasets.holdout import NO_LABEL
from fedssl.embedding import Embedder, Embeddings
from fedssl.embedding.embeddings import embed_list, list_for
from fedssl.embedding.image_list import ImageList
from fedssl.errors import InputError, sanitize, shortened
from fedssl.logs import log

GROUP = "group"  # column that is used without a setting
UNLABELED = {"label": None, "folders": "none"}  # settings of images whose labels are not used
_SEVERAL = "fedssl-evaluate predicts numbers with evaluation=regression, and several labels with evaluation=multi_label"


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """Images of which some have labels."""

    embeddings: Embeddings
    rows: np.ndarray  # of the images with a label, int64 ``(m,)``
    labels: np.ndarray  # int64 ``(m,)``, numbers of ``classes``
    classes: tuple[str, ...]  # each has an image
    groups: np.ndarray  # int64 ``(m,)``; images with equal pixels are in one group

    @property
    def known(self) -> np.ndarray:
        """Features of the images with a label, float32 ``(m, dim)``."""
        known: np.ndarray = self.embeddings.features[self.rows]
        return known


def without_labels(images: Embeddings, labeled: LabeledImages | None) -> np.ndarray:
    """Return the rows of the images that are no labeled ones, nor copies of them."""
    known = labeled.embeddings.digests[labeled.rows] if labeled is not None else []
    return np.flatnonzero(~np.isin(images.digests, known))


def list_labeled(embedder: Embedder, path: Path, settings: Mapping[str, Any]) -> ImageList:
    """List images with their labels; `InputError` if these are not of two classes."""
    column = settings.get("label", "label")
    if column is None:
        raise InputError(
            f"dataset.label=null, but labeled={path} needs a class for each image; remove it, or name the column of "
            "the classes with dataset.label=NAME"
        )
    try:
        images = list_for(embedder, path, settings, setting="labeled")
    except InputError as error:
        advice = re.search(r"[,;]?( or)?( give| set)? dataset\.label=null.*", str(error))  # which is no use here
        if advice is None:
            raise
        raise InputError(f"{str(error)[: advice.start()]}; {_SEVERAL}") from error
    if images.labels is None:
        values = images.values_if_any(column)
        raise InputError(
            f"labeled={path} has a column {column} without a value; write the classes of the images into it"
            if values is not None and not any(str(value or "").strip() for value in values)
            else f"labeled={path} has no labels, or one class only, but a classifier needs two; give a folder with one "
            "subfolder per class, or a CSV file with the columns path and label (another name: dataset.label=NAME)"
        )
    present = np.unique(images.labels[images.labels != NO_LABEL])
    if len(present) < 2:
        name = images.classes[present[0]] if images.classes else str(present[0])
        raise InputError(
            f"labeled={path} has one class only ({name}), but a classifier needs two; add images of another "
            "class, or of anything else as the class other"
        )
    return images


def read_labeled(embedder: Embedder, images: ImageList, *, skip_unreadable: bool) -> LabeledImages:
    """Return images with features and labels; `InputError` if these contradict each other."""
    embeddings = embed_list(embedder, images, skip_unreadable=skip_unreadable)
    found = images.labels
    assert found is not None  # `list_labeled`
    found = found[embeddings.rows]
    rows = np.flatnonzero(found != NO_LABEL)
    present, labels = np.unique(found[rows], return_inverse=True)
    names = images.classes or tuple(map(str, range(present.max(initial=-1) + 1)))
    classes = tuple(names[number] for number in present)
    if len(classes) < 2:
        raise InputError("the readable images of labeled= have one class only; repair, or add, images of another")
    _check_copies(embeddings, rows, labels, classes)
    _warn(embeddings, rows, classes)
    return LabeledImages(embeddings, rows, labels, classes, _groups(embeddings, rows))


def _check_copies(images: Embeddings, rows: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """Raise an `InputError` if an image has two labels, or if all images have the same features."""
    names, first = images.names, dict[str, int]()
    for place, (row, label) in enumerate(zip(rows, labels, strict=True)):
        other = first.setdefault(images.digests[row], place)
        if labels[other] != label:
            raise InputError(
                f"{names[rows[other]]} and {names[row]} are the same image, but labeled {classes[labels[other]]!r} "
                f"and {classes[label]!r}; remove the wrong one"
            )
    if len(first) > 1 and np.ptp(images.features[rows], axis=0).max() == 0:
        raise InputError("the encoder gives the same features for all labeled images: it has collapsed; train another")


def _warn(embeddings: Embeddings, rows: np.ndarray, classes: Sequence[str]) -> None:
    """Log what may be wrong with the labels."""
    missing = len(embeddings.names) - len(rows)
    if missing:
        log.warning("%s", sanitize(f"{missing:,} of {len(embeddings.names):,} images of labeled= have no label"))
    unused = [name for name in embeddings.classes if name not in classes]
    if unused:
        log.warning("%s", sanitize(f"classes without images are never predicted: {shortened(unused)}"))
    joined = [name for name in classes if "|" in name]
    if joined:
        log.warning("%s", sanitize(f"each of {shortened(joined)} counts as one class; {_SEVERAL}"))
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(name.strip().casefold(), []).append(name)
    for similar in spellings.values():
        if len(similar) > 1:
            listed = ", ".join(map(repr, similar))
            log.warning("%s", sanitize(f"{listed} count as {len(similar)} classes; write them alike if they are one"))


def _groups(images: Embeddings, rows: np.ndarray) -> np.ndarray:
    """Return the group of each row: joined by the column of groups, if there is one, and by equal pixels."""
    _, copies = np.unique(images.digests[rows], return_inverse=True)
    values: Sequence[Any] | None = images.images.groups(images.rows)
    if values is None:
        of_all = images.images.values_if_any(GROUP)
        if of_all is None:
            return np.asarray(copies)
        values = [of_all[row] for row in images.rows]
    given = [f"group {values[row]}" if values[row] is not None else f"image {row}" for row in rows]
    _, groups = np.unique(given, return_inverse=True)
    size = max(groups.max(), copies.max()) + 1
    edges = coo_array((np.ones(len(rows)), (groups, size + copies)), shape=(2 * size, 2 * size))
    return np.asarray(connected_components(edges, directed=False)[1][groups])
