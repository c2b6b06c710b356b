"""Labeled images with their features, checked for what would make a result wrong."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.page_index import PageIndex
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
    groups: np.ndarray  # int64 ``(m,)``; images of a file, or with equal pixels, are in one group

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


def read_labeled(
    embedder: Embedder, images: ImageList, settings: Mapping[str, Any], *, skip_unreadable: bool
) -> LabeledImages:
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
    copies = _copies(embeddings, rows)
    _check_copies(embeddings, rows, labels, classes, copies)
    _warn(embeddings, rows, classes)
    column = None if settings.get("group") else images.values_if_any(GROUP)
    return LabeledImages(embeddings, rows, labels, classes, _groups(embeddings, rows, copies, column))


def _copies(images: Embeddings, rows: np.ndarray) -> list[str]:
    """Return a text for each row, equal for copies. Blank pages, as at the ends of a volume, are no copies."""
    if not any(isinstance(part, PageIndex) for part in images.images.parts):
        return [images.digests[row] for row in rows]
    files = [place.file for place in images.images.places(images.rows)]
    counts = Counter(files)
    return [f"{row}" if images.blank[row] and counts[files[row]] > 1 else images.digests[row] for row in rows]


def _check_copies(
    images: Embeddings, rows: np.ndarray, labels: np.ndarray, classes: Sequence[str], copies: Sequence[str]
) -> None:
    """Raise an `InputError` if an image has two labels, or if all images have the same features."""
    names, first = images.names, dict[str, int]()
    for place, (row, label, copy) in enumerate(zip(rows, labels, copies, strict=True)):
        other = first.setdefault(copy, place)
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
        spellings.setdefault(re.sub(r"^0+(?=\d)", "", name.strip().casefold()), []).append(name)
    for similar in spellings.values():
        if len(similar) > 1:
            listed = ", ".join(map(repr, similar))
            log.warning("%s", sanitize(f"{listed} count as {len(similar)} classes; write them alike if they are one"))


def _groups(images: Embeddings, rows: np.ndarray, copies: Sequence[str], column: Sequence[Any] | None) -> np.ndarray:
    """Return the group of each row: joined by the groups of the list, by a column of it, and as copies.

    An empty value of a group joins nothing.
    """
    values = [copies]
    if (of_list := images.images.groups(images.rows)) is not None:
        values.append([of_list[row] for row in rows])
    if column is not None:
        values.append([column[row] for row in images.rows[rows]])
    joined = [_first_with(each) for each in values]
    edges = np.tile(np.arange(len(rows)), len(joined)), np.concatenate(joined)
    graph = coo_array((np.ones(len(edges[0])), edges), shape=(len(rows), len(rows)))
    return np.asarray(connected_components(graph, directed=False)[1])


def _first_with(values: Sequence[Any]) -> np.ndarray:
    """Return for each value the place of the first that equals it; an empty value equals none."""
    first = dict[str, int]()
    places = [
        place if value in (None, "") else first.setdefault(str(value), place) for place, value in enumerate(values)
    ]
    return np.array(places)
