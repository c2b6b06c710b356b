"""EUA: Eqs. 7-10 of FedU2 by hand and against a slow transcription, and properties."""

import json
from functools import partial

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers, is_weight
from fedssl.errors import InputError
from strategies.eua import EUA, EUAAggregator, eua, solve
from tests.federation import Federation
from tests.strategies.made import model, update
from tests.strategies.test_gram_matrix import by_nnls

# theta = (1, 1) in two layers; theta_0 = (1, 0) and theta_1 = (3, 1). delta_0 = (0, 1), delta_1 = (-2, 0), the lengths
# are 1 and 2. Their mean is (-1, 1/2), of length sqrt(5)/2.
# log (Eq. 7): g_0 = 2 (0, 1) / 1 = (0, 2), g_1 = 2 (-2, 0) / 4 = (-1, 0). Orthogonal: p in proportion to 1/4 and 1,
# i.e. (1/5, 4/5); d = (-4/5, 2/5), of length 2/sqrt(5). d / ||d|| = (-2, 1) / sqrt(5): the step is (-1, 1/2).
# unit: g_0 = (0, 2), g_1 = (-2, 0): p = (1/2, 1/2), d = (-1, 1), of length sqrt(2).
# Change rates (Eq. 7, eta = 1) are g_k times the direction: (2, 2) / sqrt(5) along d and along the mean, which has the
# same direction; along (-1, 1) / sqrt(2) they are (2, 1) / sqrt(2).

START = {"a": np.array([1.0], np.float32), "b": np.array([1.0], np.float32)}
PAIR = [
    update(0, {"a": np.array([1.0], np.float32), "b": np.array([0.0], np.float32)}),
    update(1, {"a": np.array([3.0], np.float32), "b": np.array([1.0], np.float32)}),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 0.5]),
        ({"server_lr": 0.5}, [1.5, 0.75]),
        ({"step": "constant"}, [1.8, 0.6]),
        ({"step": "constant", "server_lr": 0.5}, [1.4, 0.8]),
        ({"deviation": "unit"}, [1 + np.sqrt(5 / 8), 1 - np.sqrt(5 / 8)]),
        ({"deviation": "unit", "step": "constant"}, [2, 0]),
    ],
)
def test_two_clients_by_hand(options, expected):
    result = eua(START, PAIR, **options)
    np.testing.assert_allclose([result["a"][0], result["b"][0]], expected, rtol=1e-6, atol=1e-6)


def test_weights_and_rates_by_hand():
    gram = np.diag([1.0, 4.0])
    found = solve(gram)
    np.testing.assert_allclose(found.weights, [0.2, 0.8], rtol=1e-9)
    assert (found.before, found.after) == (pytest.approx(2 / np.sqrt(5)), pytest.approx(2 / np.sqrt(5)))
    found = solve(gram, deviation="unit")
    np.testing.assert_allclose(found.weights, [0.5, 0.5], rtol=1e-9)
    assert (found.before, found.after) == (pytest.approx(2 / np.sqrt(5)), pytest.approx(1 / np.sqrt(2)))


def flat(layers):
    return np.concatenate([array.astype(float).ravel() for name, array in layers.items() if is_weight(name, array)])


def slowly(start, updates, *, deviation="log", step="normalized", server_lr=1.0):
    """Eqs. 7-10 as they stand, in float64: p, the new weights, and the change rates along the mean and along d."""
    theta = flat(start)
    deltas = np.stack([theta - flat(update.layers) for update in updates])
    rates = np.stack([2 * delta / np.sum(delta**2) for delta in deltas])
    g = rates if deviation == "log" else np.stack([2 * delta / np.linalg.norm(delta) for delta in deltas])
    p = by_nnls(g @ g.T)
    d, mean = p @ g, deltas.mean(0)
    length = np.linalg.norm(mean) / np.linalg.norm(d) if step == "normalized" else 1
    along = [rates @ direction / np.linalg.norm(direction) for direction in (mean, d)]
    return p, theta - server_lr * length * d, along


def in_conflict(start, number, dtype=np.float32, size=1e-3):
    """Clients near the global model that pull one layer to both sides, of unlike lengths."""
    updates = []
    for client in range(number):
        own = model(client + 1, dtype)
        far = size * (1 + client % 3)
        layers = {name: array if array.dtype.kind == "i" else array + far * own[name] for name, array in start.items()}
        side = (1 if client % 3 else -1.3) * 2 * far
        layers["fc.weight"] = layers["fc.weight"] + side * model(99)["fc.weight"]
        updates.append(update(client, {name: np.asarray(layers[name], start[name].dtype) for name in start}))
    return updates


@pytest.mark.parametrize("deviation", ["log", "unit"])
@pytest.mark.parametrize("step", ["normalized", "constant"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rule_equals_the_equations(deviation, step, dtype):
    start = model(0, dtype)
    options = {"deviation": deviation, "step": step, "server_lr": 0.7}
    updates = in_conflict(start, 7, dtype, size=1e-1)
    result = eua(start, updates, **options)
    p, expected, (before, after) = slowly(start, updates, **options)
    # Weights of tiny deviations from a large step: compared by the length of the step.
    error = np.abs(flat(result) - expected) / np.abs(flat(start)).clip(1)
    assert error.max() < {np.float16: 2e-3, np.float32: 2e-6, np.float64: 1e-6}[dtype]
    for name in ("bn.running_mean", "bn.running_var"):
        mean = np.mean([update.layers[name].astype(float) for update in updates], axis=0)
        np.testing.assert_allclose(result[name], mean, rtol=2e-3 if dtype == np.float16 else 1e-6)

    rule = run(start, updates, **options)
    np.testing.assert_allclose(rule.solution.weights, p, atol=1e-5)
    assert rule.solution.before == pytest.approx(before.min(), rel=1e-4)
    assert rule.solution.after == pytest.approx(after.min(), rel=1e-4)
    if deviation == "log":
        assert rule.solution.before < 0 < rule.solution.after  # the mean leaves a client behind, d none
        np.testing.assert_allclose(after[p > 1e-6], after.min(), rtol=1e-6)


def run(start, updates, **options):
    """The rule after one round."""
    rule = EUAAggregator(**options)
    reference = GlobalLayers(start)
    rule.start(reference)
    for one in updates:
        rule.add(one, reference.cosines_of(one.layers))
    rule.finish()
    return rule


def test_a_client_equal_to_the_global_model_is_left_out():
    start = model(0)
    updates = in_conflict(start, 3)
    rule = run(start, [*updates, update(3, start)])
    assert rule.solution.weights[3] == 0
    np.testing.assert_allclose(rule.solution.weights[:3], run(start, updates).solution.weights, atol=1e-7)
    with_it, without = eua(start, [*updates, update(3, start)]), eua(start, updates)
    np.testing.assert_allclose(flat(with_it), flat(without), rtol=1e-6, atol=1e-7)
    # Statistics are the mean of all.
    mean = np.mean([client.layers["bn.running_var"] for client in (*updates, update(3, start))], axis=0)
    np.testing.assert_allclose(with_it["bn.running_var"], mean, rtol=1e-6)


def test_clients_equal_to_the_global_model_change_nothing():
    start = model(3)
    for number in (1, 3):
        updates = [update(client, start) for client in range(number)]
        result = eua(start, updates)
        assert np.array_equal(flat(result), flat(start))
        for name, array in start.items():
            np.testing.assert_allclose(result[name], array, rtol=3e-7)
        found = run(start, updates).solution
        assert (list(found.weights), found.before, found.after) == ([0] * number, None, None)


@pytest.mark.parametrize("step", ["normalized", "constant"])
@pytest.mark.parametrize("second", [1.0, 2.5])
def test_opposite_clients_leave_the_weights_and_average_the_rest(step, second):
    start = model(0)
    noise = {name: 1e-2 * array for name, array in model(1).items() if array.dtype.kind == "f"}
    updates = [
        update(
            client, {name: np.asarray(array + side * noise.get(name, 4), array.dtype) for name, array in start.items()}
        )
        for client, side in enumerate((1, -second))
    ]
    result = eua(start, updates, step=step)
    assert np.array_equal(flat(result), flat(start))
    for name in ("bn.running_mean", "bn.num_batches_tracked"):
        mean = (updates[0].layers[name].astype(float) + updates[1].layers[name]) / 2
        np.testing.assert_allclose(result[name], np.rint(mean) if mean.ndim == 0 else mean, rtol=1e-5)
    found = run(start, updates).solution
    # delta_1 = -s delta_0: g_0 = 2 / ||delta_0||, g_1 = -g_0 / s, so p is in proportion to 1 and s.
    np.testing.assert_allclose(found.weights, np.array([1, second]) / (1 + second), atol=1e-4)
    assert found.after == 0


@pytest.mark.parametrize("make", [partial(eua, START, PAIR), EUA])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"deviation": "exp"}, "^strategy.deviation=exp must be log or unit$"),
        ({"step": "long"}, "^strategy.step=long must be normalized or constant$"),
        ({"server_lr": 0.0}, "^strategy.server_lr=0.0 must be a number above 0$"),
        ({"server_lr": float("inf")}, "^strategy.server_lr=inf must be a finite number above 0$"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, option, message):
    with pytest.raises(InputError, match=message):
        make(**option)


def test_a_round_equals_the_rule_and_records_what_it_found(tmp_path):
    federation = Federation(tmp_path, "strategy=eua", "num_clients=3", "server_optimizer=none")
    before = federation.layers
    after = federation.run(1)
    updates = []
    for row, content in zip(federation.report.clients, federation.updates, strict=True):
        updates.append(update(row.client, {name: array.numpy() for name, array in content["arrays"].items()}))
        assert set(content["metrics"]) == {"seconds"}
    p, expected, (mean, d) = slowly(before, updates)
    np.testing.assert_allclose(flat(after), expected, rtol=1e-4, atol=1e-5)
    strategy_metrics = json.loads(json.dumps(federation.report.strategy_metrics))
    assert strategy_metrics["weights"] == pytest.approx({"0": p[0], "1": p[1], "2": p[2]}, abs=1e-5)
    assert strategy_metrics["conflict_before"] == pytest.approx(mean.min(), rel=1e-4)
    assert strategy_metrics["conflict_after"] == pytest.approx(d.min(), rel=1e-4)
    assert strategy_metrics["conflict_after"] >= strategy_metrics["conflict_before"]
