"""The page: what is computed from features, its text, and the values for its script; its markup is a template.

Nearest neighbors, near-duplicates and outliers are those by the cosine of centered features.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedssl.embedding.embeddings import unit_features
from fedssl.explore.clusters import Clusters, find_clusters
from fedssl.explore.columns import Column, coded, encode
from fedssl.explore.images import Collected
from fedssl.explore.projection import project
from fedssl.pages import render

NEIGHBORS = 10
MAX_PAIRS = 1000  # near-duplicates on the page
MAX_EQUAL = 200  # groups of equal images on the page
_SHARES = (0.01, 0.05, 0.2)  # of the most unusual images
_VIEWS = {
    "all": "All images",
    "clusters": "Clusters",
    "duplicates": "Near-duplicates",
    "outliers": "Outliers",
    "selection": "Selection",
}
BLOCK_VALUES = 2**22  # cosines in memory
_ROUNDING = 1e-5  # of cosines


@dataclass(frozen=True)
class Pairs:
    """Pairs of images whose cosine is at least a threshold, the most similar first."""

    rows: np.ndarray  # int64, ``(m, 2)``, ascending in each pair
    cosines: np.ndarray  # float32, ``(m,)``
    total: int  # number of pairs, of which these are the first


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Contents of a page."""

    source: str  # name of the images' folder or file
    encoder: str  # name of the run
    images: Collected
    size: int  # height and width of the images that the encoder reads
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


def make_page(gallery: Gallery, *, projection: str, clusters: int | None, threshold: float) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    gallery
        The images.
    projection
        One of `fedssl.explore.projection.METHODS`.
    clusters
        Number of clusters; None chooses it.
    threshold
        Cosine from which on two images are near-duplicates, in [-1, 1].
    """
    images = gallery.images
    unit = unit_features(images.features)
    rows, cosines = nearest_neighbors(unit, NEIGHBORS)
    unusual = outlier_scores(cosines)
    found = find_clusters(unit, clusters)
    plane = project(unit, method=projection)
    equal = equal_images(images.digests)
    # Every pair of a group of equal images is near, too: only one image of a group is compared.
    first = np.setdiff1d(np.arange(len(unit)), [row for group in equal for row in group[1:]])
    near = close_pairs(unit[first], threshold, most=MAX_PAIRS)
    columns = [*images.columns, *_computed_columns(found, unusual)]
    data = {
        "names": images.names,
        "columns": [column.for_script() for column in columns],
        "points": encode(plane.points),
        "neighbors": encode(rows.astype(np.uint32)),
        "cosines": encode(cosines),
        "unusual": encode(unusual),
        "distances": encode(found.distances),
        "groups": equal[:MAX_EQUAL],
        "pairs": [
            [*pair, cosine] for pair, cosine in zip(first[near.rows].tolist(), near.cosines.tolist(), strict=True)
        ],
        "atlas": {
            "size": images.sheets.size,
            "columns": images.sheets.columns,
            "per_sheet": images.sheets.per_sheet,
            "sheets": images.sheets.encoded,
        },
        "captions": captions(found, near, equal, threshold=threshold, size=gallery.size, count=cosines.shape[1]),
    }
    count = len(images.names)
    return render(
        "explore/explore.html.j2",
        data=data,
        source=gallery.source,
        summary=f"{count:,} image{'s'[: count > 1]}, by the features of {gallery.encoder}",
        warnings=gallery.warnings,
        views=_VIEWS,
        notes=[
            f"Map: {plane.how}.",
            "Cosines, clusters and distances are those of the features minus their mean.",
            *gallery.notes,
        ],
    )


def equal_images(digests: Sequence[str]) -> list[list[int]]:
    """Return the rows of images with equal digests, for each digest of several; the largest groups first."""
    rows = defaultdict[str, list[int]](list)
    for row, digest in enumerate(digests):
        rows[digest].append(row)
    return sorted((group for group in rows.values() if len(group) > 1), key=lambda group: -len(group))


def captions(
    clusters: Clusters, near: Pairs, equal: Sequence[Sequence[int]], *, threshold: float, size: int, count: int
) -> dict[str, str]:
    """Return a sentence for every list of the page."""
    listed = f", of which the {len(near.rows):,} nearest are listed" if near.total > len(near.rows) else ""
    more = f", of which the {MAX_EQUAL} largest are listed" if len(equal) > MAX_EQUAL else ""
    return {
        "all": "In the order of their names.",
        "clusters": f"{clusters.how}. The most typical images are nearest to the center of their cluster.",
        "duplicates": (
            f"Groups of images with equal pixels at {size} x {size}: {len(equal):,}{more}. Further pairs with a cosine "
            f"of at least {threshold:g}: {near.total:,}{listed}."
        ),
        "outliers": f"Sorted by the mean cosine distance to the {count} nearest neighbors, the most unusual first.",
        "selection": "In the order of your selection.",
    }


def _computed_columns(clusters: Clusters, unusual: np.ndarray) -> list[Column]:
    """Return the columns of clusters and of the ranks of outliers."""
    numbers = [str(number + 1) for number in range(int(clusters.members.max()) + 1)]
    ranks = np.argsort(np.argsort(-unusual, kind="stable"), kind="stable") / len(unusual)
    names = [f"most unusual {share:.0%}" for share in _SHARES] + ["others"]
    return [
        coded("cluster", clusters.members, numbers),
        coded("outlier", np.searchsorted(_SHARES, ranks, side="right"), names),
    ]


def nearest_neighbors(unit: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, int64, and the cosines, float32, of the nearest other features, ``(n, min(count, n - 1))``.

    The nearest is the first. Equal ones are in the order of their rows.
    """
    n = len(unit)
    count = min(count, n - 1)
    rows, cosines = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
    for start, block in _blocks(unit) if count else ():
        own = np.arange(len(block))
        block[own, start + own] = -np.inf
        found = np.argpartition(block, n - count, axis=1)[:, n - count :]
        values = np.take_along_axis(block, found, axis=1)
        order = np.lexsort((found, -values), axis=1)
        part = slice(start, start + len(block))
        rows[part] = np.take_along_axis(found, order, axis=1)
        cosines[part] = np.take_along_axis(values, order, axis=1)
    return rows, cosines


def close_pairs(unit: np.ndarray, threshold: float, *, most: int) -> Pairs:
    """Return the ``most`` similar pairs with a cosine of at least ``threshold``, in [-1, 1], and count all."""
    total = 0
    rows, cosines = np.empty((0, 2), np.int64), np.empty(0, np.float32)
    for start, block in _blocks(unit):
        first, second = np.nonzero(block >= threshold - _ROUNDING)
        is_pair = first + start < second
        first, second = first[is_pair], second[is_pair]
        total += len(first)
        rows = np.concatenate([rows, np.column_stack([first + start, second])])
        cosines = np.concatenate([cosines, block[first, second]])
        kept = np.lexsort((rows[:, 1], rows[:, 0], -cosines))[:most]
        rows, cosines = rows[kept], cosines[kept]
    return Pairs(rows, cosines, total)


def outlier_scores(cosines: np.ndarray) -> np.ndarray:
    """Return the mean cosine distance, in [0, 2], to the nearest neighbors, ``(n,)``; 0 for an image without any."""
    if not cosines.shape[1]:
        return np.zeros(len(cosines), np.float32)
    scores: np.ndarray = 1 - cosines.mean(axis=1)
    return scores


def _blocks(unit: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of a block and its cosines with all features, ``(block, n)``."""
    size = max(1, BLOCK_VALUES // len(unit))
    for start in range(0, len(unit), size):
        yield start, np.clip(unit[start : start + size] @ unit.T, -1, 1)
