"""The shortest vector in a convex hull: by hand, by its optimality conditions, and against other solvers."""

import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from fedssl.errors import InputError
from strategies.gram_matrix import min_norm_weights


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([[3.0, 4.0]], [1]),
        # Orthogonal: p_1 * 1 = p_2 * 4 makes the products g_k d equal.
        ([[1, 0], [0, 2]], [0.8, 0.2]),
        # (2, 0) lies beyond (1, 0): moving from (1, 0) towards it only makes d longer.
        ([[1, 0], [2, 0]], [1, 0]),
        # d = (p_1 - p_2, p_2) and g_1 d = g_2 d, i.e. p_1 - p_2 = -p_1 + 2 p_2: p = (3, 2) / 5, d = (0.2, 0.4).
        ([[1, 0], [-1, 1]], [0.6, 0.4]),
        # Opposite, of unlike lengths: 1 * p_1 = 3 * p_2 gives d = 0.
        ([[1, 0], [-3, 0]], [0.75, 0.25]),
        # Orthogonal again: p_k in proportion to 1 / ||g_k||^2 = 1, 1/4, 1/9, i.e. (36, 9, 4) / 49.
        ([[1, 0, 0], [0, 2, 0], [0, 0, 3]], [36 / 49, 9 / 49, 4 / 49]),
        # d = (1, 0) lies halfway between the first two; the third has g_3 d = 2 > 1 = d d, so it counts nothing.
        ([[1, 1], [1, -1], [2, 0.5]], [0.5, 0.5, 0]),
        # Zero is inside the triangle: (1, 0) + (-1, 1) + (0, -1) = 0.
        ([[1, 0], [-1, 1], [0, -1]], [1 / 3, 1 / 3, 1 / 3]),
        # A vector of zeros is the shortest there is; two of them share.
        ([[0, 0], [1, 1]], [1, 0]),
        ([[0, 0], [1, 1], [0, 0]], [0.5, 0, 0.5]),
        # Equal vectors share what one of them alone has: 0.8 and 0.2 as above.
        ([[1, 0], [0, 2], [1, 0]], [0.4, 0.2, 0.4]),
        ([[1, 2]] * 5, [0.2] * 5),
    ],
)
@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_weights_by_hand(vectors, expected, scale):
    vectors = scale * np.array(vectors, float)
    np.testing.assert_allclose(min_norm_weights(vectors @ vectors.T), expected, rtol=1e-12, atol=1e-14)


def vectors_of(kind, number, random):
    """Vectors that make different kinds of Gram matrices."""
    vectors = random.standard_normal((number, {"flat": 2, "low rank": max(1, number // 3)}.get(kind, 4 * number)))
    if kind == "conflict":
        vectors[:, 0] += 1
    if kind == "scaled":
        vectors *= 10 ** random.uniform(-3, 3, (number, 1))
    if kind == "alike":
        vectors = 1e-3 * vectors + random.standard_normal(vectors.shape[1])
    if kind == "twice":
        vectors[number // 2 :] = vectors[: number - number // 2]
    if kind == "cancel":
        vectors[number // 2 :] = -vectors[: number - number // 2]
    return vectors


KINDS = ("any", "conflict", "scaled", "alike", "twice", "cancel", "flat", "low rank")


def by_nnls(gram):
    """Non-negative least squares: for x = s p, p on the simplex, min over s of s^2 f + (s - 1)^2 is f / (1 + f)."""
    lengths = np.sqrt(np.diag(gram))
    b = lengths.min() / lengths
    values, directions = np.linalg.eigh(gram / np.outer(lengths, lengths))
    root = np.sqrt(values.clip(0))[:, None] * directions.T
    x, _ = nnls(np.vstack([root, b]), np.append(np.zeros(len(gram)), 1.0), maxiter=100 * len(gram))
    return x * b / (x @ b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 2, 3, 10, 31, 100])
def test_weights_are_optimal(kind, number):
    random = np.random.default_rng(number)
    for _ in range(3):
        vectors = vectors_of(kind, number, random)
        gram = vectors @ vectors.T
        p = min_norm_weights(gram)
        assert p.shape == (number,)
        assert p.min() >= 0
        assert p.sum() == pytest.approx(1, abs=1e-14)
        lengths = np.sqrt(np.diag(gram))
        # Where vectors cancel the objective is rounding, which is measured against their lengths.
        scale = max(p @ gram @ p, 1e-6 * (p @ lengths) ** 2)
        # Karush-Kuhn-Tucker: no vector has a smaller product with d than d itself.
        d = p @ vectors
        assert np.all((vectors @ d - d @ d) / (lengths * (p @ lengths)) >= -1e-11)
        oracle = by_nnls(gram)
        assert abs(p @ gram @ p - oracle @ gram @ oracle) <= 1e-9 * scale
        if kind in ("any", "conflict"):
            np.testing.assert_allclose(p, oracle, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_no_general_solver_finds_less(kind):
    vectors = vectors_of(kind, 6, np.random.default_rng(6))
    gram = vectors @ vectors.T / np.mean(vectors**2)
    p = min_norm_weights(gram)
    found = minimize(
        lambda x: x @ gram @ x,
        np.full(6, 1 / 6),
        jac=lambda x: 2 * gram @ x,
        bounds=[(0, 1)] * 6,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    ).x
    x = found.clip(0) / found.clip(0).sum()
    assert p @ gram @ p <= (x @ gram @ x) * (1 + 1e-9) + 1e-12 * np.trace(gram)
    assert p @ gram @ p == pytest.approx(x @ gram @ x, rel=1e-3, abs=1e-4 * np.trace(gram))


@pytest.mark.parametrize("gram", [np.ones((2, 3)), np.ones(4), np.ones((0, 0)), np.array([[np.nan]])])
def test_what_is_no_gram_matrix_is_refused(gram):
    with pytest.raises(InputError, match="must be a square matrix of finite numbers"):
        min_norm_weights(gram)
