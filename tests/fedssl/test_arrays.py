"""Cosines of layers and of models."""

from math import sqrt

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers, cosine_of_products, inner_products
from fedssl.errors import InputError
from strategies.l_dawa import l_dawa
from tests.strategies.made import CLIENTS, DELTA, GLOBAL, layers, model, update


def test_cosines():
    cosines = GlobalLayers(GLOBAL | {"bn.running_var": np.array([3.0, 4.0]), "n": np.array(5)}).cosines_of(
        CLIENTS[0].layers | {"bn.running_var": np.array([4.0, 3.0]), "n": np.array(500)}
    )
    assert cosines.weights == pytest.approx({"a": 0.96, "b": 0})
    assert cosines.statistics == pytest.approx({"bn.running_var": 0.96})
    assert cosines.model == pytest.approx(DELTA)  # neither statistics nor counters
    assert cosines.mean == pytest.approx(0.48)  # two layers of two numbers
    assert cosines.finite


def test_the_mean_of_cosines_goes_by_size():
    # Global a = (3, 4) and b of 6 ones; the client has a = (4, 3), cosine 24/25 = 0.96, and b with one of six ones
    # turned round, cosine (5 - 1)/6 = 2/3. The mean by size is (2 * 0.96 + 6 * 2/3) / 8 = 0.74. The fresh bias, whose
    # cosine counts as 1 in the rules, is no part of it. The model: (24 + 4 + 0) / sqrt((25 + 6) (25 + 6 + 9)).
    start = GlobalLayers(layers(a=[3, 4], b=[1] * 6, bias=[0, 0, 0]))
    cosines = start.cosines_of(layers(a=[4, 3], b=[-1, 1, 1, 1, 1, 1], bias=[3, 0, 0]))
    assert cosines.weights == pytest.approx({"a": 0.96, "b": 2 / 3, "bias": 1})
    assert cosines.mean == pytest.approx(0.74)
    assert cosines.model == pytest.approx(28 / sqrt(31 * 40))
    assert GlobalLayers(layers(bias=[0, 0])).cosines_of(layers(bias=[1, 2])).mean is None
    assert GlobalLayers({}).cosines_of({}).mean is None


def test_cosines_of_a_model_against_a_slow_transcription():
    start, client = model(0), model(1)
    weights = [name for name, array in start.items() if array.dtype.kind == "f" and "running" not in name]
    known = [name for name in weights if start[name].any()]
    assert len(known) == len(weights) - 1
    by_name = {name: slow_cosine(start[name], client[name]) for name in known}
    sizes = {name: start[name].size for name in known}
    cosines = GlobalLayers(start).cosines_of(client)
    expected = sum(sizes[name] * by_name[name] for name in known) / sum(sizes.values())
    assert cosines.mean == pytest.approx(expected, abs=1e-6)
    whole, other = (np.concatenate([one[name].ravel() for name in weights]) for one in (start, client))
    assert cosines.model == pytest.approx(slow_cosine(whole, other), abs=1e-6)


def slow_cosine(one, other):
    one, other = one.astype(float).ravel(), other.astype(float).ravel()
    return one @ other / (np.sqrt(one @ one) * np.sqrt(other @ other))


@pytest.mark.parametrize("name", ["fc.weight", "conv.bias", "bn.running_var"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, -1])
def test_values_that_are_not_finite_are_found(name, value, position):
    start = model(0)
    bad = {key: array.copy() for key, array in model(1).items()}
    bad[name].flat[position] = value
    assert GlobalLayers(start).cosines_of(bad).first_invalid == name
    with pytest.raises(InputError, match=f"client 4: layer {name} has NaN or infinite values"):
        l_dawa(start, [update(4, bad)])


def test_a_squared_norm_above_1e20_is_invalid():
    start = GlobalLayers({"fc.weight": np.ones(4, dtype=np.float32)})
    for value, expected in ((4.9e9, None), (5.1e9, "fc.weight")):  # 4 * (5e9)^2 = 1e20
        layers = {"fc.weight": np.full(4, value, dtype=np.float32)}
        assert start.cosines_of(layers).first_invalid == expected


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1, 1e15, 1e30])
def test_cosines_of_very_large_and_small_layers(size):
    random = np.random.default_rng(0)
    g, w = random.standard_normal((2, 20_000)).astype(np.float32)
    [(wg, ww)], [(_, gg)] = inner_products([w * np.float32(size)], g), inner_products([g], g)
    expected = g.astype(float) @ w / sqrt((g.astype(float) @ g) * (w.astype(float) @ w))
    assert cosine_of_products(wg, ww, gg) == pytest.approx(expected, abs=1e-6)
