"""Clusters of points whose groups are known, distances by hand, and numbers that cannot be."""

import numpy as np
import pytest

from fedssl.explore import clusters
from fedssl.explore.clusters import find_clusters, silhouette


def groups(*sizes: int, seed: int = 0) -> np.ndarray:
    """Points near the unit vectors, as many near each as given."""
    centers = np.repeat(np.eye(len(sizes)), sizes, axis=0)
    return (centers + 0.05 * np.random.default_rng(seed).normal(size=centers.shape)).astype(np.float32)


def slow_silhouette(points: np.ndarray, members: np.ndarray) -> float:
    """Compute the mean of (b - a) / max(a, b) (Rousseeuw, 1987)."""
    values = []
    for row, point in enumerate(points.astype(np.float64)):
        distances = np.sqrt(((points - point) ** 2).sum(axis=1))
        own = members == members[row]
        if own.sum() == 1:
            values.append(0.0)
            continue
        a = distances[own].sum() / (own.sum() - 1)
        b = min(distances[members == other].mean() for other in set(members.tolist()) - {members[row]})
        values.append((b - a) / max(a, b))
    return float(np.mean(values))


def test_the_number_of_separate_groups_is_chosen():
    points = groups(10, 40, 20)
    found = find_clusters(points, None)
    # The largest group is the first cluster.
    assert found.members.tolist() == [2] * 10 + [0] * 40 + [1] * 20
    assert "3 clusters, number chosen" in found.how


def test_distances_are_those_from_the_center():
    points = groups(12, 9)
    found = find_clusters(points, 2)
    centers = [points[found.members == of].mean(axis=0) for of in found.members]
    expected = np.linalg.norm(points - centers, axis=1)
    np.testing.assert_allclose(found.distances, expected, rtol=1e-4)


def test_silhouettes_equal_their_definition(monkeypatch: pytest.MonkeyPatch):
    points = groups(10, 15, 12)
    members = np.random.default_rng(1).integers(3, size=37)
    assert silhouette(points, members) == pytest.approx(slow_silhouette(points, members), rel=1e-5)
    monkeypatch.setattr(clusters, "SCORED", 30)
    assert "3 clusters" in find_clusters(points, None).how


def test_equal_images_are_one_cluster():
    same = np.ones((9, 4), np.float32)
    assert find_clusters(same, None).members.tolist() == [0] * 9
    found = find_clusters(same, 3)
    assert found.members.tolist() == [0] * 9
    assert "1 clusters, of 3 asked for, because only 1 features differ" in found.how


def test_one_and_two_images_are_clustered():
    assert find_clusters(groups(1), None).members.tolist() == [0]
    assert find_clusters(groups(1, 1), None).members.tolist() == [0, 0]
