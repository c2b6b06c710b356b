"""Products of factors: by hand, against dense float64 matrices, and their cosines among other layers."""

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.low_rank_products import (
    FactorPairs,
    LowRank,
    LowRankLayer,
    cut_factors,
    deviation_products,
    pad_factors,
    stack,
)


def low_rank(seed, shape=(5, 7), rank=2, scale=1.5, dtype=np.float64):
    random = np.random.default_rng(seed)
    b, a = random.standard_normal((shape[0], rank)), random.standard_normal((rank, shape[1]))
    return LowRank(b.astype(dtype), a.astype(dtype), scale)


def dense(product):
    return product.scale * product.b.astype(np.float64) @ product.a.astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [1, 2, 6])  # 6: more than the matrix can have
def test_products_against_dense_matrices(dtype, rank):
    one, other = low_rank(0, rank=rank, dtype=dtype), low_rank(1, rank=3, scale=0.5, dtype=dtype)
    assert one.shape == (5, 7)
    np.testing.assert_allclose(one.dense(), dense(one), rtol=1e-13, atol=1e-13)
    assert one.inner(other) == pytest.approx((dense(one) * dense(other)).sum(), rel=1e-12)
    assert one.square() == pytest.approx((dense(one) ** 2).sum(), rel=1e-12)
    np.testing.assert_allclose(one.minus(other).dense(), dense(one) - dense(other), rtol=1e-12, atol=1e-12)
    total = stack([2.0, -0.25], [one, other])
    assert total.rank == rank + 3
    np.testing.assert_allclose(total.dense(), 2 * dense(one) - dense(other) / 4, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_products_keep_their_differences(step):
    # The reference has the 64 bits of a long double. Inner products of the products themselves would lose them: at
    # 1e-6, squares of differences are 1e-12 of squares of products, of which float64 has 1e-16.
    initial = low_rank(0, (40, 60), 4)
    near = [LowRank(initial.b + step * low_rank(k, (40, 60), 4).b, initial.a + step * low_rank(k, (40, 60), 4).a, 1.5)
            for k in (1, 2, 3)]  # fmt: skip
    products = [one.b.astype(np.longdouble) @ one.a for one in (initial, *near)]
    exact = [1.5 * (product - products[0]).ravel() for product in products[1:]]
    expected = np.array([[float(x @ y) for y in exact] for x in exact])
    lengths = np.sqrt(expected.diagonal())
    np.testing.assert_array_less(abs(deviation_products(initial, near) - expected), 1e-10 * np.outer(lengths, lengths))


@pytest.mark.parametrize("rank", [1, 2, 4, 5])
def test_truncation_against_a_dense_decomposition(rank):
    total = stack([1.0, 0.5, -2.0], [low_rank(seed) for seed in range(3)])
    u, s, vt = np.linalg.svd(total.dense(), full_matrices=False)
    expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
    nearest = LowRank(total.b, total.a, 1.0).truncate(rank)
    np.testing.assert_allclose(nearest.dense(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(nearest.a @ nearest.a.T, np.eye(rank), atol=1e-12)
    # The leading columns and rows are the truncation to a smaller rank.
    smaller = LowRank(nearest.b[:, :1], nearest.a[:1], nearest.scale)
    np.testing.assert_allclose(smaller.dense(), s[0] * np.outer(u[:, 0], vt[0]), rtol=1e-10, atol=1e-10)


# A product with its factors, one whose factor A is fixed, and another weight. 2 (1, 0)^T (3, 4) has the length 10.
PAIRS = FactorPairs(
    (LowRankLayer("encoder.fc.weight", "encoder.fc.lora_A", "encoder.fc.lora_B", 2.0),
     LowRankLayer("encoder.out.weight", "encoder.out.lora_A", "encoder.out.lora_B", 1.0)),
    {"encoder.out.lora_A": np.array([[1.0, 0], [1, 1]])},
)  # fmt: skip
START = {"encoder.fc.lora_A": np.array([[3.0, 4]]), "encoder.fc.lora_B": np.array([[1.0], [0]])}
START |= {"encoder.out.lora_B": np.array([[1.0, 0]]), "projector.weight": np.array([3.0, 4])}


def test_cosines_do_not_depend_on_the_factors_of_a_product():
    start = GlobalLayers({"a": low_rank(0).a, "b": low_rank(0).b}, FactorPairs((LowRankLayer("w", "a", "b", 1.5),)))
    b, a = low_rank(1).b, low_rank(1).a
    turn = np.array([[2.0, 1], [-1, 3]])
    layers = {"a": a, "b": b}, {"a": np.linalg.solve(turn, a), "b": b @ turn}
    one, other = map(start.cosines_of, layers)
    assert other.weights == pytest.approx(one.weights, rel=1e-13)
    x, y = dense(low_rank(0)).ravel(), dense(low_rank(1)).ravel()
    assert one.weights == pytest.approx({"w": x @ y / np.sqrt((x @ x) * (y @ y))}, rel=1e-12)


def test_a_product_counts_with_the_elements_of_its_matrix():
    """v has 2 numbers and the cosine (1, 0) . (3, 4) / 5 = 0.6; the product of 5 x 2 and 2 x 7 numbers has 35."""
    pairs = FactorPairs((LowRankLayer("w", "a", "b", 1.5),))
    start = GlobalLayers({"a": low_rank(0).a, "b": low_rank(0).b, "v": np.array([[1.0, 0]])}, pairs)
    found = start.cosines_of({"a": low_rank(1).a, "b": low_rank(1).b, "v": np.array([[3.0, 4]])})
    assert found.mean == pytest.approx((35 * found.weights["w"] + 2 * 0.6) / 37, rel=1e-12)


@pytest.mark.parametrize("fixed_a", [False, True])
def test_the_change_of_a_product_is_that_of_its_matrix(fixed_a):
    first, last = low_rank(0), low_rank(1)
    pairs = FactorPairs((LowRankLayer("w", "a", "b", 1.5),), fixed={"a": first.a} if fixed_a else {})
    vector = np.array([1.0, 2])
    models = [{"b": one.b, "v": k * vector} | ({} if fixed_a else {"a": one.a}) for k, one in ((1, first), (3, last))]
    start = GlobalLayers(models[0], pairs)
    changes = start.changes(models[1])
    moved = dense(LowRank(last.b, first.a if fixed_a else last.a, 1.5)) - dense(first)
    found = start.with_layers(changes).product("b", changes)
    np.testing.assert_allclose(dense(found), moved, rtol=1e-12, atol=1e-12)
    assert found.rank == (2 if fixed_a else 4)
    assert changes["v"].tolist() == [2, 4]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("factor", ["encoder.fc.lora_A", "encoder.fc.lora_B"])
def test_a_nonfinite_factor_is_found_beside_zeros(factor, value):
    bad = {name: np.zeros_like(array) if name.startswith("encoder.fc") else array for name, array in START.items()}
    bad[factor] = np.full_like(bad[factor], value)
    assert GlobalLayers(START, PAIRS).cosines_of(bad).first_invalid == "encoder.fc.weight"


def test_factors_of_a_smaller_rank_are_the_leading_ones():
    layers = {"a": np.arange(6.0).reshape(3, 2), "b": np.arange(12.0).reshape(4, 3), "head": np.ones((3, 3))}
    pairs = (LowRankLayer("w", "a", "b", 1.0),)
    cut = cut_factors(layers, pairs, 2)
    np.testing.assert_array_equal(cut["a"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(cut["b"], [[0, 1], [3, 4], [6, 7], [9, 10]])
    padded = pad_factors(cut, pairs, {name: array.shape for name, array in layers.items()})
    np.testing.assert_array_equal(padded["a"], [[0, 1], [2, 3], [0, 0]])
    np.testing.assert_array_equal(padded["b"], [[0, 1, 0], [3, 4, 0], [6, 7, 0], [9, 10, 0]])
    assert padded["head"] is cut["head"] is layers["head"]
    assert pad_factors(layers, pairs, {"a": (2, 2), "b": (4, 2)})["a"].shape == (3, 2)
