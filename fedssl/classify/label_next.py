"""Choice of the images to label next: typical ones for few labels, uncertain ones for more.

Hacohen et al. (2202.02794) show that typical images are better for few labels, and uncertain ones for many. They leave
the number open; ``FEW`` is that of encoders of the digits. With weak encoders of CIFAR-10 neither was reliably
better than random images, see ``benchmarks/README.md``.

``typical`` is their TypiClust: features of length 1 are clustered by k-means into as many clusters as there are labeled
images and images to choose, at most 500. The largest clusters with the fewest labeled images come first; each gives its
most typical image, of which the mean distance to its 20 nearest neighbors in the cluster is the smallest.

``uncertain`` are the images with the smallest margins between the two highest probabilities, ten times as many as
wanted, of which those nearest to the centers of clusters are chosen (Zhdanov, 1901.05954): the most uncertain images
alone are often alike.
"""

from collections.abc import Iterator
from itertools import chain, zip_longest

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.neighbors import NearestNeighbors

from fedssl.seeding import derive_seed, numpy_generator

FEW = 10  # labels per class from which uncertain images are chosen
MAX_POOL = 20_000  # images that are considered
DUPLICATE = 0.99  # cosine of centered features from which images are near duplicates
_MAX_CLUSTERS = 500
_SMALLEST = 5  # images of a cluster
_NEIGHBORS = 20
_EXACT_CLUSTERS = 50  # up to which k-means uses all images in every step, as in the authors' code
_FACTOR = 10  # uncertain images per image to choose
_BLOCK = 2**24  # cosines computed at a time


def next_to_label(
    pool: np.ndarray, labeled: np.ndarray, *, count: int, margins: np.ndarray | None, seed: int
) -> list[int]:
    """Return up to ``count`` rows of the pool to label next, the most useful first.

    Near duplicates of labeled images, and of images before them, are left out. ``pool`` and ``labeled`` are
    `fedssl.embedding.embeddings.unit_features` ``(n, dim)``. ``margins`` ``(n,)`` are the differences of the two
    highest probabilities; None for typical images.
    """
    new = np.flatnonzero(largest_cosines(pool, labeled) < DUPLICATE)
    if len(new) > MAX_POOL:
        new = np.sort(numpy_generator(seed, "pool").choice(new, MAX_POOL, replace=False))
    if not len(new):
        return []
    x = pool[new]
    ranked = (
        typical(x, labeled, count=count, seed=seed)
        if margins is None
        else uncertain(x, margins[new], count=count, seed=seed)
    )
    chosen: list[int] = []
    for row in ranked:
        if largest_cosines(x[[row]], x[chosen])[0] < DUPLICATE:
            chosen.append(row)
        if len(chosen) == count:
            break
    return [int(row) for row in new[chosen]]


def typical(x: np.ndarray, labeled: np.ndarray, *, count: int, seed: int) -> Iterator[int]:
    """Yield all rows of ``x`` in the order of TypiClust; the clusters are for ``count`` of them."""
    together = np.concatenate([x, labeled])
    clusters = _clusters(together, min(len(labeled) + count, _MAX_CLUSTERS), seed=seed)
    number = clusters.max() + 1
    known = np.bincount(clusters[len(x) :], minlength=number)
    sizes = np.bincount(clusters, minlength=number)
    order = np.lexsort((-sizes, known, sizes < _SMALLEST))  # small clusters last, which the authors leave out
    ranked = (_by_typicality(x, np.flatnonzero(clusters[: len(x)] == cluster)) for cluster in order)
    return (row for rows in zip_longest(*ranked) for row in rows if row is not None)


def uncertain(x: np.ndarray, margins: np.ndarray, *, count: int, seed: int) -> Iterator[int]:
    """Yield rows of ``x``: uncertain ones of different clusters first, then the others by their margins."""
    order = np.argsort(margins, kind="stable")
    candidates = order[: _FACTOR * count]
    clusters = _clusters(x[candidates], count, seed=seed)
    centers = np.stack([x[candidates[clusters == cluster]].mean(axis=0) for cluster in clusters])
    distances = np.linalg.norm(x[candidates] - centers, axis=1)
    nearest = [candidates[np.where(clusters == cluster, distances, np.inf).argmin()] for cluster in np.unique(clusters)]
    first = sorted(nearest, key=lambda row: float(margins[row]))
    return chain(first, order[~np.isin(order, first)])


def _clusters(x: np.ndarray, number: int, *, seed: int) -> np.ndarray:
    """Return the clusters of k-means ``(n,)``."""
    kind = KMeans if number <= _EXACT_CLUSTERS else MiniBatchKMeans
    number = min(number, len(np.unique(x, axis=0)))
    clusters: np.ndarray = kind(number, n_init=1, random_state=derive_seed(seed, "clusters") % 2**32).fit_predict(x)
    return clusters


def _by_typicality(x: np.ndarray, rows: np.ndarray) -> list[int]:
    """Return the rows of a cluster, the most typical first."""
    neighbors = min(_NEIGHBORS, len(rows) - 1)
    if neighbors < 1:
        return [int(row) for row in rows]
    distances, _ = NearestNeighbors(n_neighbors=neighbors, algorithm="brute").fit(x[rows]).kneighbors()
    return [int(row) for row in rows[np.argsort(distances.mean(axis=1), kind="stable")]]


def largest_cosines(x: np.ndarray, others: np.ndarray, *, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the largest cosine of each of the `unit_features` ``x`` with those of ``others``; -1 without others.

    With ``groups`` ``(n,)``, both are the same images, which are compared with those of other groups.
    """
    largest, block = np.full(len(x), -1.0), max(_BLOCK // max(len(others), 1), 1)
    for start in range(0, len(x), block):
        cosines = x[start : start + block] @ others.T
        if groups is not None:
            cosines[groups[start : start + block, None] == groups] = -1
        largest[start : start + block] = cosines.max(axis=1, initial=-1)
    return largest
