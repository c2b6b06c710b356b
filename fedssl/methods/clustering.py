"""Clusters of equal size on the unit sphere, for projections on Orchestra's clients and on its server.

Equal sizes come from Sinkhorn-Knopp: a soft assignment whose rows sum to 1 and whose columns have equal sums. Each
vector is then assigned to its most likely cluster, and the centroid is the normalized mean of the cluster's vectors.
Sizes are therefore only approximately equal: identical vectors cannot be separated.

Results depend on the vectors alone, in float64. The initial centroids are vectors far from each other, so the algorithm
needs no random numbers and finds well-separated groups in any order of the vectors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn_assignment(similarity: Tensor, *, sharpness: float = 25.0, iterations: int = 10) -> Tensor:
    """Assign vectors softly to clusters of equal size (Sinkhorn-Knopp).

    The result is the matrix closest to ``exp(sharpness * similarity)`` in relative entropy whose rows sum to 1 and
    whose columns sum to ``n / clusters``. Columns and rows are normalized in turn, in log space, so that any sharpness
    is numerically stable.

    Parameters
    ----------
    similarity : Tensor
        Similarity of each vector to each centroid, ``(n, clusters)``.
    sharpness : float
        Positive; larger values give a harder assignment.
    iterations : int
        Number of normalizations of columns and rows. Row sums are exact; column sums become more accurate with each
        iteration.

    Returns
    -------
    Tensor
        ``(n, clusters)``, values in [0, 1].
    """
    log_share = sharpness * similarity
    for _ in range(iterations):
        log_share = log_share.log_softmax(dim=0).log_softmax(dim=1)
    return log_share.exp()


def farthest_points(points: Tensor, *, count: int) -> Tensor:
    """Select vectors that are far from each other, starting with the one least similar to the mean.

    Each further vector is the one least similar to all selected ones.

    Parameters
    ----------
    points : Tensor
        Unit vectors, ``(n, dim)``, n >= 1.
    count : int
        Number of vectors to select; with more than n the selection repeats.

    Returns
    -------
    Tensor
        ``(count, dim)``.
    """
    chosen = [int((points @ points.mean(dim=0)).argmin())]
    nearest = points @ points[chosen[0]]
    while len(chosen) < min(count, len(points)):
        nearest[chosen[-1]] = torch.inf  # selects no vector twice, even among equal ones
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, points @ points[chosen[-1]])
    return points[chosen][torch.arange(count) % len(chosen)]


def equal_clusters(points: Tensor, *, clusters: int, iterations: int = 5) -> Tensor:
    """Compute centroids of clusters of nearly equal size by spherical k-means with `sinkhorn_assignment`.

    Parameters
    ----------
    points : Tensor
        ``(n, dim)``, n >= 1; normalized here. With fewer than ``clusters`` vectors some centroids are equal.
    clusters : int
        At least 1.
    iterations : int
        Number of assignments, each followed by new centroids. An empty cluster keeps its centroid.

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
    """Cluster the clients' local centroids into global ones of nearly equal size.

    Parameters
    ----------
    local : Tensor
        Local centroids of all clients, ``(n, dim)``, on the CPU; rows of zeros are ignored.
    old : Tensor
        Current global centroids ``(clusters, dim)``, which define shape and dtype. They are returned unchanged if
        ``local`` has no centroids. With fewer local centroids than clusters some of the new ones are equal.

    Returns
    -------
    Tensor
        Unit vectors, ``(clusters, dim)``.
    """
    points = local[local.any(dim=1)]
    return equal_clusters(points, clusters=len(old)).to(old.dtype) if len(points) else old
