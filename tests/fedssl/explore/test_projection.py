"""Projections: principal components against a singular value decomposition, equal images, few images, repetition."""

import sys
from types import ModuleType

import numpy as np
import pytest

from fedssl.embedding.embeddings import unit_features
from fedssl.errors import InputError
from fedssl.explore import projection
from fedssl.explore.projection import check_method, principal_components, project


def some(n: int = 60, dim: int = 8) -> np.ndarray:
    generator = np.random.default_rng(0)
    centers = 3 * generator.normal(size=(3, dim))
    return (centers[np.arange(n) % 3] + generator.normal(size=(n, dim))).astype(np.float32)


def test_components_are_those_of_the_singular_vectors():
    features = some().astype(np.float64)
    _, _, directions = np.linalg.svd(features - features.mean(axis=0))
    expected = (features - features.mean(axis=0)) @ directions[:3].T
    found = principal_components(features, 3)
    signs = np.sign((expected * found).sum(axis=0))
    np.testing.assert_allclose(found, expected * signs, atol=1e-4)


def test_pca_by_hand():
    # The centered features lie on the line (0.6, 0.8), at -2, 0 and 2; a second direction has nothing.
    features = np.array([[0, 0], [1.2, 1.6], [2.4, 3.2]], np.float32)
    np.testing.assert_allclose(project(features, method="pca").points, [[-1, 0], [0, 0], [1, 0]], atol=1e-6)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_points_repeat_and_fill_the_plane(method: str):
    unit = unit_features(some())
    first, second = (project(unit, method=method) for _ in range(2))
    assert first.points.tobytes() == second.points.tobytes()
    assert first.points.shape == (60, 2)
    assert first.points.dtype == np.float32
    assert np.abs(first.points).max() == 1


def test_equal_images_have_one_point():
    features = some(20)
    features[13] = features[4]
    points = project(unit_features(features), method="tsne").points
    assert points[13].tolist() == points[4].tolist()
    assert len(np.unique(points, axis=0)) == 19


def test_tsne_separates_groups():
    points = project(unit_features(some()), method="tsne").points.astype(np.float64)
    group = np.arange(60) % 3
    distances = np.linalg.norm(points[:, None] - points, axis=2) + np.diag([np.inf] * 60)
    assert (group[distances.argmin(axis=1)] == group).mean() > 0.95


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_few_images_have_finite_points(n: int):
    found = project(unit_features(some(n)), method="tsne")
    assert np.isfinite(found.points).all()
    assert found.how.startswith("PCA" if n < projection.FEWEST else "t-SNE")


def test_many_images_are_projected_by_pca(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "AUTO_TSNE", 50)
    assert project(unit_features(some()), method="auto").how.startswith("PCA")


def test_umap_is_used_once_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    class UMAP:
        def __init__(self, *, n_neighbors: int, init: str, random_state: int, n_jobs: int) -> None:
            assert (n_neighbors, n_jobs) == (15, 1)

        def fit_transform(self, features: np.ndarray) -> np.ndarray:
            return features[:, :2]

    with pytest.raises(InputError, match="projection=umap needs umap-learn; install it"):
        check_method("umap")
    module = ModuleType("umap")
    module.UMAP = UMAP
    monkeypatch.setitem(sys.modules, "umap", module)
    monkeypatch.setattr(projection, "find_spec", lambda name: module)
    check_method("umap")
    assert project(unit_features(some()), method="auto").how.startswith("UMAP")
