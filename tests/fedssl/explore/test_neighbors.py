"""Neighbors, near-duplicates and outliers against slow float64 transcriptions, and cases by hand."""

import numpy as np
import pytest

from fedssl.embedding.embeddings import unit_features
from fedssl.explore import page
from fedssl.explore.page import close_pairs, nearest_neighbors, outlier_scores


def some(n: int = 40, dim: int = 5, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def slow_cosines(features: np.ndarray) -> np.ndarray:
    """Compute the cosines of centered features, one by one."""
    exact = features.astype(np.float64)
    mean = sum(exact) / len(exact)
    result = np.empty((len(exact), len(exact)))
    for i, a in enumerate(exact - mean):
        for j, b in enumerate(exact - mean):
            result[i, j] = sum(a * b) / (sum(a * a) ** 0.5 * sum(b * b) ** 0.5)
    return result


@pytest.fixture(params=[1, 97, 2**22])
def block_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(page, "BLOCK_VALUES", request.param)
    return request.param


def test_neighbors_equal_a_slow_search(block_values: int):
    features = some()
    expected = slow_cosines(features)
    rows, cosines = nearest_neighbors(unit_features(features), 7)
    for row in range(len(features)):
        others = [other for other in range(len(features)) if other != row]
        nearest = sorted(others, key=lambda other: -expected[row, other])[:7]
        assert rows[row].tolist() == nearest
        np.testing.assert_allclose(cosines[row], expected[row, nearest], atol=1e-6)


def test_pairs_equal_a_slow_search(block_values: int):
    features = some()
    expected = slow_cosines(features)
    slow = [(i, j) for i in range(40) for j in range(i + 1, 40) if expected[i, j] >= 0.5]
    slow.sort(key=lambda pair: -expected[pair])
    found = close_pairs(unit_features(features), 0.5, most=10**6)
    assert found.rows.tolist() == [[*pair] for pair in slow]
    assert found.total == len(slow) > 20
    np.testing.assert_allclose(found.cosines, [expected[pair] for pair in slow], atol=1e-6)
    few = close_pairs(unit_features(features), 0.5, most=3)
    assert few.rows.tolist() == found.rows[:3].tolist()
    assert few.total == found.total


def test_cosines_by_hand():
    # The mean is (1, 1): the centered features (1, 0), (-1, 0), (0, 1), (0, -1).
    features = np.array([[2, 1], [0, 1], [1, 2], [1, 0]], np.float32)
    rows, cosines = nearest_neighbors(unit_features(features), 3)
    assert rows[0].tolist() == [2, 3, 1]
    np.testing.assert_allclose(cosines[0], [0, 0, -1], atol=1e-7)
    # (1 - 0 + 1 - 0 + 1 + 1) / 3 = 4 / 3
    np.testing.assert_allclose(outlier_scores(cosines), [4 / 3] * 4, rtol=1e-6)


def test_length_of_features_has_no_effect():
    centered = some() - some().mean(axis=0)
    longer = np.concatenate([centered, -centered]) * np.repeat([1, 1000], 40)[:, None]
    rows, _ = nearest_neighbors(unit_features(np.concatenate([centered, -centered])), 5)
    assert nearest_neighbors(unit_features(longer - longer.mean(axis=0)), 5)[0].shape == rows.shape
    np.testing.assert_allclose(np.linalg.norm(unit_features(longer), axis=1), 1, rtol=1e-6)


def test_collapsed_features_are_pairs_without_outliers(block_values: int):
    unit = unit_features(np.full((20, 7), 0.1, np.float32))
    pairs = close_pairs(unit, 1.0, most=5)
    assert (pairs.total, len(pairs.rows)) == (190, 5)  # 20 * 19 / 2
    rows, cosines = nearest_neighbors(unit, 10)
    assert (rows != np.arange(20)[:, None]).all()
    assert outlier_scores(cosines).tolist() == [0.0] * 20


def test_a_far_feature_has_the_largest_score():
    features = np.ones((30, 4), np.float32) + 0.01 * some(30, 4)
    features[17] = [-5, 1, 1, 1]
    _, cosines = nearest_neighbors(unit_features(features), 10)
    assert outlier_scores(cosines).argmax() == 17


@pytest.mark.parametrize(("n", "pairs"), [(1, 0), (2, 1)])
def test_one_image_and_two_equal_images(n: int, pairs: int):
    unit = unit_features(np.tile(some(1), (n, 1)))
    rows, cosines = nearest_neighbors(unit, 10)
    assert rows.shape == cosines.shape == (n, n - 1)
    assert close_pairs(unit, 0.99, most=10).total == pairs
    assert outlier_scores(cosines).tolist() == [0.0] * n
