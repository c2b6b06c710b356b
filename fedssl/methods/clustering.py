"""Clusters of equal size on the unit sphere: what Orchestra's clients and its server do with projections.

Equal sizes come from Sinkhorn-Knopp: a soft assignment whose rows sum to 1 and whose columns sum to the same number
each. Every vector then goes to the cluster it belongs to most, and a cluster's centroid is the direction of the mean of
its vectors. Sizes are therefore only nearly equal: vectors that are alike cannot be told apart.

Everything is a function of the vectors alone, in float64: the first centroids are vectors far from each other, so there
are no random numbers, and groups that are well apart are found whatever the order of the vectors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn_assignment(similarity: Tensor, *, sharpness: float = 25.0, iterations: int = 10) -> Tensor:
    """Soft assignment of vectors to clusters of equal size (Sinkhorn-Knopp).

    The matrix nearest to ``exp(sharpness * similarity)`` in relative entropy whose rows sum to 1 and whose columns sum
    to ``n / clusters``, found by normalizing columns and rows in turn. It is computed with logarithms, so no sharpness
    is too large for it.

    Parameters
    ----------
    similarity : Tensor
        Of each vector to each centroid, ``(n, clusters)``.
    sharpness : float
        Positive; the larger, the harder the assignment.
    iterations : int
        Normalizations of columns and rows. The rows are exact, the columns the nearer the more there are.

    Returns
    -------
    Tensor
        ``(n, clusters)``, each number in [0, 1].
    """
    log_share = sharpness * similarity
    for _ in range(iterations):
        log_share = log_share.log_softmax(dim=0).log_softmax(dim=1)
    return log_share.exp()


def farthest_points(points: Tensor, *, count: int) -> Tensor:
    """Vectors that are far from each other: the one least like the mean, then always the one least like those chosen.

    Parameters
    ----------
    points : Tensor
        Unit vectors, ``(n, dim)``, n >= 1.
    count : int
        How many; more than n take all of them, one time more or less.

    Returns
    -------
    Tensor
        ``(count, dim)``.
    """
    chosen = [int((points @ points.mean(dim=0)).argmin())]
    nearest = points @ points[chosen[0]]
    while len(chosen) < min(count, len(points)):
        nearest[chosen[-1]] = torch.inf  # so that even of equal vectors none is taken twice
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, points @ points[chosen[-1]])
    return points[chosen][torch.arange(count) % len(chosen)]


def equal_clusters(points: Tensor, *, clusters: int, iterations: int = 5) -> Tensor:
    """Centroids of clusters of nearly equal size: k-means on the sphere with `sinkhorn_assignment`.

    Parameters
    ----------
    points : Tensor
        ``(n, dim)``, n >= 1; need not be normalized. With fewer than ``clusters`` some centroids are equal.
    clusters : int
        At least 1.
    iterations : int
        Assignments, each followed by new centroids. A cluster that nothing was assigned to keeps its centroid.

    Returns
    -------
    Tensor
        Unit vectors ``(clusters, dim)``, float64.
    """
    points = F.normalize(points.double(), dim=1)
    centroids = farthest_points(points, count=clusters)
    for _ in range(iterations):
        nearest = sinkhorn_assignment(points @ centroids.T).argmax(dim=1)
        sums = F.one_hot(nearest, clusters).double().T @ points
        centroids = torch.where(sums.any(dim=1, keepdim=True), F.normalize(sums, dim=1), centroids)
    return centroids


def global_centroids(local: Tensor, *, old: Tensor) -> Tensor:
    """The federation's centroids: of clusters of nearly equal size of its clients' local centroids.

    Parameters
    ----------
    local : Tensor
        Local centroids of all clients, ``(n, dim)``, on the CPU; rows of zeros are no centroids.
    old : Tensor
        The global centroids that clients had, ``(clusters, dim)``; they give shape and dtype. They stay if ``local``
        has no centroids. With fewer local centroids than clusters some of the new ones are equal.

    Returns
    -------
    Tensor
        Unit vectors, ``(clusters, dim)``.
    """
    points = local[local.any(dim=1)]
    return equal_clusters(points, clusters=len(old)).to(old.dtype) if len(points) else old
