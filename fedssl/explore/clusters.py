"""Clusters of images: k-means on principal components; their number is given, or has the best silhouette."""

from dataclasses import dataclass

import numpy as np

from fedssl.explore.projection import REDUCED, principal_components
from fedssl.seeding import derive_seed, numpy_generator

CANDIDATES = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30)  # numbers that are compared
SCORED = 2000  # images of which silhouettes are computed: the cost grows with their square
MAX_CLUSTERS = 200


@dataclass(frozen=True)
class Clusters:
    """Cluster of each image, the largest cluster first, its distance from the center, and how they were found."""

    members: np.ndarray  # int64, ``(n,)``
    distances: np.ndarray  # float32, ``(n,)``; the smallest is the most typical image of a cluster
    how: str


def find_clusters(unit: np.ndarray, number: int | None) -> Clusters:
    """Cluster features ``(n, dim)`` of `unit_features`; None chooses the number of clusters."""
    reduced = principal_components(unit, REDUCED)
    distinct = len(np.unique(reduced, axis=0))
    if number is not None:
        members, distances = _k_means(reduced, min(number, distinct))
        less = f", of {number} asked for, because only {distinct} features differ" if distinct < number else ""
        return _sorted(members, distances, f"k-means with {min(number, distinct)} clusters{less}")
    scored = np.arange(len(reduced))
    if len(reduced) > SCORED:
        scored = numpy_generator(0, "silhouette").choice(len(reduced), SCORED, replace=False)
    best, found = -np.inf, (np.zeros(len(unit), np.int64), _distances(reduced, reduced.mean(axis=0)))
    for candidate in CANDIDATES:
        if candidate < distinct:
            members, distances = _k_means(reduced, candidate)
            score = silhouette(reduced[scored], members[scored])
            if score > best:
                best, found = score, (members, distances)
    count = len(np.unique(found[0]))
    chosen = f"number chosen by the mean silhouette ({best:.2f})" if np.isfinite(best) else "too few different images"
    return _sorted(*found, f"k-means with {count} cluster{'s'[: count > 1]}, {chosen}")


def silhouette(features: np.ndarray, members: np.ndarray) -> float:
    """Return the mean silhouette (Rousseeuw, 1987), in [-1, 1]; minus infinity if it is not defined."""
    from sklearn.metrics import silhouette_score

    if not 2 <= len(np.unique(members)) < len(members):
        return -np.inf
    return float(silhouette_score(features, members))


def _k_means(features: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):  # sums of several threads depend on their order
        result = KMeans(number, n_init=3, random_state=derive_seed(0, "k-means") % 2**32).fit(features)
    members = result.labels_.astype(np.int64)
    return members, _distances(features, result.cluster_centers_[members])


def _distances(features: np.ndarray, centers: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(features - centers, axis=1)
    return lengths.astype(np.float32)


def _sorted(members: np.ndarray, distances: np.ndarray, how: str) -> Clusters:
    """Assign numbers to the clusters by size, the largest first."""
    _, codes, sizes = np.unique(members, return_inverse=True, return_counts=True)
    ranks = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    return Clusters(ranks[codes].astype(np.int64), distances, how)
