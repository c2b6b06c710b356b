"""Linear CKA: by hand, against the formula in features, and what it does not see."""

import numpy as np
import pytest

from fedssl.plots.cka import between_clients, centered_gram, cka_matrix, linear_cka


def cka_of_features(x: np.ndarray, y: np.ndarray) -> float:
    """Kornblith et al., section 3: ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F) of centred columns."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def cka(x: np.ndarray, y: np.ndarray) -> float:
    return linear_cka(centered_gram(x), centered_gram(y))


def test_by_hand():
    # Centred: x = (-1, 0, 1), y = (-1, 2, -1)/3 * ... y = (0, 1, 0) has the mean 1/3: (-1/3, 2/3, -1/3). x'y = 0.
    x, y = np.array([[0.0], [1], [2]]), np.array([[0.0], [1], [0]])
    assert cka(x, y) == pytest.approx(0, abs=1e-15)
    # z = (0, 0, 1) is (-1/3, -1/3, 2/3): x'z = 1/3 + 2/3 = 1, x'x = 2, z'z = 6/9: 1 / (2 * 6/9) = 0.75.
    assert cka(x, np.array([[0.0], [0], [1]])) == pytest.approx(0.75)


def test_is_the_formula_in_features():
    draw = np.random.default_rng(1).normal
    x, y = draw(size=(20, 5)), draw(size=(20, 30))
    assert cka(x, y) == pytest.approx(cka_of_features(x, y))
    assert 0 < cka(x, y) < 1


def test_a_constant_representation_has_nothing_in_common():
    x = np.random.default_rng(3).normal(size=(10, 4))
    assert cka(x, np.full((10, 2), 0.25)) == 0


def test_matrix_and_pairs_of_clients():
    draw = np.random.default_rng(4).normal
    one, two, three = ([centered_gram(draw(size=(12, 3))) for _ in range(2)] for _ in range(3))
    found = cka_matrix(one, two)
    assert found.shape == (2, 2)
    assert found[0, 1] == linear_cka(one[0], two[1])
    pairs = between_clients([one, two, three])
    expected = [
        [linear_cka(a[layer], b[layer]) for layer in (0, 1)] for a, b in ((one, two), (one, three), (two, three))
    ]
    np.testing.assert_array_equal(pairs, expected)
