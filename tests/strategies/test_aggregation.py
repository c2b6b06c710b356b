"""FedAvg, Loss, L-DAWA, M-DAWA: Eqs. 1-6 of L-DAWA by hand and against a slow transcription, then their properties."""

from dataclasses import replace
from functools import partial
from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from fedssl.errors import InputError
from fedssl.layers import GlobalLayers, cosine, products
from fedssl.messages import ClientUpdate, TrainPlan
from server_app.round import Round
from strategies.base import Travels
from strategies.fedavg import FedAvg, fedavg
from strategies.l_dawa import LDAWA, l_dawa, scale_layers
from strategies.loss import Loss, loss_weighted
from strategies.m_dawa import MDAWA, m_dawa
from strategies.weighted_sum import WeightedSum
from tests.federation import Federation

RULES = {
    "fedavg": fedavg,
    "fedavg uniform": partial(fedavg, weighting="uniform"),
    "loss": loss_weighted,
    "l_dawa": l_dawa,
    "l_dawa examples": partial(l_dawa, weighting="examples"),
    "l_dawa loss": partial(l_dawa, weighting="loss"),
    "l_dawa scale": partial(l_dawa, buffers="scale"),
    "l_dawa normalize": partial(l_dawa, weighting="loss", buffers="scale", normalize=True),
    "m_dawa": m_dawa,
    "m_dawa scale": partial(m_dawa, buffers="scale"),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def layers(dtype=np.float32, **arrays):
    return {name: np.array(values, dtype) for name, values in arrays.items()}


def update(partition_id, arrays, num_examples=None, train_loss=None):
    return ClientUpdate(layers=arrays, partition_id=partition_id, num_examples=num_examples, train_loss=train_loss)


# --- two clients by hand ---
#
# Global a = (3, 4), b = (12, 0): |a| = 5, |b| = 12, |model| = 13.
# Client 0 has a = (4, 3), b = (0, 12), the same norms. Its products with the global layers are 24 and 0, so the cosines
# are 24/25 = 0.96 for a, 0 for b and 24/169 for the model. Client 1 equals the global model: all its cosines are 1.
# With 1 and 3 examples beta is (1/4, 3/4). So it is with losses ln 3 and 0, because exp(-ln 3) : exp(0) is 1/3 : 1.

GLOBAL = layers(a=[3, 4], b=[12, 0])
CLIENTS = [
    update(0, layers(a=[4, 3], b=[0, 12]), num_examples=1, train_loss=log(3)),
    update(1, layers(a=[3, 4], b=[12, 0]), num_examples=3, train_loss=0.0),
]
DELTA = 24 / 169


@pytest.mark.parametrize(
    ("rule", "a", "b"),
    [
        # Eq. 1, beta = n_k / n: a = (4 + 3*3, 3 + 3*4) / 4, b = (3*12, 12) / 4
        (fedavg, [3.25, 3.75], [9, 3]),
        # Eq. 1, beta = 1/K: a = (4 + 3, 3 + 4) / 2, b = (12, 12) / 2
        (partial(fedavg, weighting="uniform"), [3.5, 3.5], [6, 6]),
        # softmax of (-ln 3, 0) is (1/4, 3/4)
        (loss_weighted, [3.25, 3.75], [9, 3]),
        # The cosines only weigh: a = (0.96 * 4 + 3, 0.96 * 3 + 4) / (0.96 + 1), b = (0 + 12, 0 + 0) / (0 + 1)
        (partial(l_dawa, normalize=True), [6.84 / 1.96, 6.88 / 1.96], [12, 0]),
        # Eqs. 2-3: (24/169 w_0 + w_1) / 2
        (m_dawa, [(4 * DELTA + 3) / 2, (3 * DELTA + 4) / 2], [6, 6 * DELTA]),
        # Eq. 4: a = (0.96 * 4 + 3, 0.96 * 3 + 4) / 2, b = (0 + 12, 0 * 12 + 0) / 2
        (l_dawa, [3.42, 3.44], [6, 0]),
        # Eq. 5: a = (0.96 * 4 + 3*3, 0.96 * 3 + 3*4) / 4, b = (3*12, 0) / 4
        (partial(l_dawa, weighting="examples"), [3.21, 3.72], [9, 0]),
        # Eq. 6: beta is again (1/4, 3/4)
        (partial(l_dawa, weighting="loss"), [3.21, 3.72], [9, 0]),
    ],
    ids=["Eq. 1 examples", "Eq. 1 uniform", "loss", "normalize", "Eqs. 2-3", "Eq. 4", "Eq. 5", "Eq. 6"],
)
def test_two_clients_by_hand(rule, a, b):
    result = rule(GLOBAL, CLIENTS)
    np.testing.assert_allclose(result["a"], a, rtol=1e-6)
    np.testing.assert_allclose(result["b"], b, rtol=1e-6, atol=1e-7)


def test_buffers_and_counters_by_hand():
    # running_var goes (3, 4) -> (4, 3), cosine 0.96, and (3, 4), cosine 1; the weight, [1] -> [-1] and [1], gives the
    # model cosines -1 and 1. Counter: (10 + 3 * 13) / 4 = 12.25.
    start = {"bn.weight": np.ones(1), "bn.running_var": np.array([3.0, 4.0]), "bn.num_batches_tracked": np.array(7)}
    clients = [
        update(0, {**start, "bn.weight": -np.ones(1), "bn.running_var": np.array([4.0, 3.0])}, num_examples=1),
        update(1, start, num_examples=3),
    ]
    clients[0].layers["bn.num_batches_tracked"], clients[1].layers["bn.num_batches_tracked"] = (
        np.array(10),
        np.array(13),
    )
    for rule, variance in (
        (l_dawa, [3.5, 3.5]),
        (partial(l_dawa, buffers="scale"), [(0.96 * 4 + 3) / 2, (0.96 * 3 + 4) / 2]),
        (m_dawa, [3.5, 3.5]),
        (partial(m_dawa, buffers="scale"), [(-4 + 3) / 2, (-3 + 4) / 2]),
    ):
        result = rule(start, clients)
        np.testing.assert_allclose(result["bn.running_var"], variance)
        np.testing.assert_allclose(result["bn.weight"], [1])  # the opposite client has its sign flipped
        assert result["bn.num_batches_tracked"] == 12  # 11.5, rounded to even
    for n, expected in ((3, 12), (9, 13)):  # 12.25 and 12.7: to the nearest, not cut off
        clients[1] = update(1, clients[1].layers, num_examples=n)
        counter = fedavg(start, clients)["bn.num_batches_tracked"]
        assert (counter, counter.dtype, counter.shape) == (expected, start["bn.num_batches_tracked"].dtype, ())


# --- many clients, slowly ---


def model(seed, dtype=np.float32):
    """Layers of all kinds; ``fc.weight`` has many rows and a rest, ``conv.bias`` is zero in the first model."""
    random = np.random.default_rng(seed)
    return {
        "conv.weight": random.standard_normal((8, 3, 3, 3)).astype(dtype),
        "conv.bias": (seed * random.standard_normal(8)).astype(dtype),
        "bn.weight": random.uniform(0.5, 1.5, 8).astype(dtype),
        "bn.running_mean": random.standard_normal(8).astype(dtype),
        "bn.running_var": random.uniform(0.5, 1.5, 8).astype(dtype),
        "bn.num_batches_tracked": np.array(10 * seed + 3),
        "fc.weight": random.standard_normal((301, 301)).astype(dtype),
        "temperature": np.array(random.uniform(0.1, 1), dtype),
    }


def clients_of(start, number=5, dtype=np.float32):
    """Updates that keep something of the direction of ``start``."""
    updates = []
    for client in range(number):
        own = model(client + 1, dtype)
        mixed = {
            name: own[name] if array.dtype.kind == "i" else np.asarray(array + (client + 0.5) * own[name], dtype)
            for name, array in start.items()
        }
        updates.append(update(client, mixed, num_examples=10 + 7 * client, train_loss=4 + (client - 2) ** 2 / 2))
    return updates


def slowly(start, updates, *, beta, scale, buffers, normalize):
    """The equations as they stand, in float64."""
    statistics = [name for name in start if "running" in name]
    weights = [name for name, array in start.items() if array.dtype.kind == "f" and name not in statistics]

    def delta(client, names):
        g = np.concatenate([start[name].astype(float).ravel() for name in names])
        w = np.concatenate([client.layers[name].astype(float).ravel() for name in names])
        if not g.any() or not w.any():
            return 1.0
        return min(1.0, np.sum(g * w) / (sqrt(np.sum(g * g)) * sqrt(np.sum(w * w))))

    result = {}
    for name, array in start.items():
        total, divisor = np.zeros(array.shape), 0.0
        for client, share in zip(updates, np.array(beta) / np.sum(beta), strict=True):
            scaled = name in weights or (name in statistics and buffers == "scale")
            s = 1.0 if scale == "none" or not scaled else delta(client, weights if scale == "model" else [name])
            total += share * s * client.layers[name].astype(float)
            divisor += share * abs(s)
        if normalize:
            total /= divisor
        result[name] = np.rint(total) if array.dtype.kind == "i" else total
    return result


@every_rule
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rules_equal_the_equations(rule, dtype):
    start = model(0, dtype)
    updates = clients_of(start, dtype=dtype)
    options = rule.keywords if isinstance(rule, partial) else {}
    function = rule.func if isinstance(rule, partial) else rule
    beta = {
        "uniform": [1.0] * 5,
        "examples": [u.num_examples for u in updates],
        "loss": [exp(-u.train_loss) for u in updates],
    }[options.get("weighting", {fedavg: "examples", loss_weighted: "loss"}.get(function, "uniform"))]
    expected = slowly(
        start,
        updates,
        beta=beta,
        scale={fedavg: "none", loss_weighted: "none", l_dawa: "layer", m_dawa: "model"}[function],
        buffers=options.get("buffers", "average"),
        normalize=options.get("normalize", False),
    )
    result = rule(start, updates)
    tolerance = {np.float16: 1e-3, np.float32: 2e-6, np.float64: 1e-12}[dtype]
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


# --- properties ---


@every_rule
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_names_order_shapes_and_dtypes_survive(rule, dtype):
    start = model(0, dtype)
    result = rule(start, clients_of(start, dtype=dtype))
    assert list(result) == list(start)
    for name, array in start.items():
        assert type(result[name]) is np.ndarray
        assert (result[name].shape, result[name].dtype) == (array.shape, array.dtype), name


@every_rule
def test_order_of_updates_changes_nothing(rule):
    start = model(0)
    updates = clients_of(start)
    expected = rule(start, updates)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert same(rule(start, [updates[position] for position in order]), expected)


@every_rule
def test_clients_equal_to_the_global_model_change_nothing(rule):
    start = model(3)
    for number in (1, 3):
        result = rule(start, [update(client, start, 7 + client, 2.5) for client in range(number)])
        for name, array in start.items():
            np.testing.assert_allclose(result[name], array, rtol=3e-7)


@every_rule
def test_inputs_are_not_changed_and_may_be_read_only(rule):
    start = model(0)
    updates = clients_of(start)
    before = [{name: array.copy() for name, array in arrays.items()} for arrays in (start, *all_layers(updates))]
    for arrays in (start, *all_layers(updates)):
        for array in arrays.values():
            array.flags.writeable = False
    result = rule(start, updates)
    assert all(same(one, other) for one, other in zip((start, *all_layers(updates)), before, strict=True))
    assert not any(np.shares_memory(result[name], arrays[name]) for arrays in all_layers(updates) for name in result)


@every_rule
def test_memory_layout_does_not_matter(rule):
    start = model(0)
    updates = clients_of(start)
    strided = [
        update(u.partition_id, {n: a.copy(order="F") for n, a in u.layers.items()}, u.num_examples, u.train_loss)
        for u in updates
    ]
    assert same(rule(start, strided), rule(start, updates))


@pytest.mark.parametrize("weighting", ["uniform", "examples", "loss"])
@pytest.mark.parametrize("scale", ["none", "layer", "model"])
def test_one_by_one_equals_all_at_once_bit_for_bit(weighting, scale):
    start = model(0)
    updates = clients_of(start)  # the losses fall and rise: the sum is rescaled on the way
    rule = WeightedSum(weighting=weighting, scale=scale)
    reference = GlobalLayers(start)
    rule.start(reference)
    rule.add_all(updates)
    at_once = rule.finish()
    rule.start(reference)
    for one in updates:
        rule.add(one, reference.compare(one.layers))
    assert same(rule.finish(), at_once)


def test_the_number_of_threads_changes_nothing():
    random = np.random.default_rng(0)
    start = {f"fc{i}.weight": random.standard_normal((600, 1000), np.float32) for i in range(6)}  # 3.6 M: 4 threads
    updates = [
        update(client, {name: array + random.standard_normal(array.shape, np.float32) for name, array in start.items()})
        for client in range(3)
    ]
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(l_dawa(start, updates))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("shift", [1000, 1e6, -1000])
def test_only_differences_of_losses_matter(shift):
    shifted = [update(c.partition_id, c.layers, train_loss=c.train_loss + shift) for c in CLIENTS]
    expected = l_dawa(GLOBAL, CLIENTS, weighting="loss")
    for name, array in l_dawa(GLOBAL, shifted, weighting="loss").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_hopeless_loss_gets_no_weight(order):
    losses = [0.5, 2000.0]
    clients = [update(k, CLIENTS[k].layers, train_loss=losses[order[k]]) for k in (0, 1)]
    best = clients[order.index(0)]
    assert same(l_dawa(GLOBAL, clients, weighting="loss"), l_dawa(GLOBAL, [best]))


@pytest.mark.parametrize("rule", [l_dawa, m_dawa])
def test_an_opposite_client_is_turned_round(rule):
    start = layers(a=[3, 4], b=[12, 0])
    opposite = update(0, {name: -array for name, array in start.items()})
    assert same(rule(start, [opposite]), start)


def test_normalized_clients_that_turn_away_do_not_blow_a_layer_up():
    # Cosines 1/2 and -1/2: divided by their sum the layer would be infinite; by that of their sizes it is
    # (w_0 / 2 - w_1 / 2) / 1.
    start = layers(a=[1, 0])
    first, second = layers(a=[1, sqrt(3)]), layers(a=[-1, sqrt(3)])
    result = l_dawa(start, [update(0, first), update(1, second)], normalize=True)
    np.testing.assert_allclose(result["a"], [1, 0], atol=1e-7)
    at_right_angles = l_dawa(start, [update(0, layers(a=[0, 1]))], normalize=True)
    np.testing.assert_array_equal(at_right_angles["a"], [0, 0])


def test_a_client_that_scales_leaves_no_cosines_to_normalize_by():
    with pytest.raises(InputError, match=r"strategy.normalize=true .* strategy.scale_at=client"):
        LDAWA(normalize=True, scale_at="client")


@pytest.mark.parametrize("rule", [l_dawa, m_dawa])
@pytest.mark.parametrize("zero", ["global", "client", "both"])
def test_zero_layers_are_averaged(rule, zero):
    # A fresh bias: the mean of the clients' biases, because the cosine with zero counts as 1.
    start = layers(bias=[3, 4]) if zero == "client" else layers(bias=[0, 0])
    first = layers(bias=[1, 2]) if zero == "global" else layers(bias=[0, 0])
    result = rule(start, [update(0, first), update(1, first)])
    np.testing.assert_array_equal(result["bias"], first["bias"])


# --- cosines ---


def test_cosines():
    cosines = GlobalLayers(GLOBAL | {"bn.running_var": np.array([3.0, 4.0]), "n": np.array(5)}).compare(
        CLIENTS[0].layers | {"bn.running_var": np.array([4.0, 3.0]), "n": np.array(500)}
    )
    assert cosines.weights == pytest.approx({"a": 0.96, "b": 0})
    assert cosines.buffers == pytest.approx({"bn.running_var": 0.96})
    assert cosines.model == pytest.approx(DELTA)  # neither statistics nor counters
    assert cosines.mean == pytest.approx(0.48)  # two layers of two numbers
    assert cosines.finite


def test_the_mean_of_cosines_goes_by_size_and_leaves_out_what_points_nowhere():
    # Global a = (3, 4) and b of 6 ones; the client has a = (4, 3), cosine 24/25 = 0.96, and b with one of six ones
    # turned round, cosine (5 - 1)/6 = 2/3. The mean by size is (2 * 0.96 + 6 * 2/3) / 8 = 0.74. The fresh bias, whose
    # cosine counts as 1 in the rules, is no part of it. The model: (24 + 4 + 0) / sqrt((25 + 6) (25 + 6 + 9)).
    start = GlobalLayers(layers(a=[3, 4], b=[1] * 6, bias=[0, 0, 0]))
    cosines = start.compare(layers(a=[4, 3], b=[-1, 1, 1, 1, 1, 1], bias=[3, 0, 0]))
    assert cosines.weights == pytest.approx({"a": 0.96, "b": 2 / 3, "bias": 1})
    assert cosines.mean == pytest.approx(0.74)
    assert cosines.model == pytest.approx(28 / sqrt(31 * 40))
    assert GlobalLayers(layers(bias=[0, 0])).compare(layers(bias=[1, 2])).mean is None
    assert GlobalLayers({}).compare({}).mean is None


def test_cosines_of_a_model_against_a_slow_transcription():
    start, client = model(0), model(1)
    weights = [name for name, array in start.items() if array.dtype.kind == "f" and "running" not in name]
    known = [name for name in weights if start[name].any()]
    assert len(known) == len(weights) - 1
    by_name = {name: slow_cosine(start[name], client[name]) for name in known}
    sizes = {name: start[name].size for name in known}
    cosines = GlobalLayers(start).compare(client)
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
    assert GlobalLayers(start).compare(bad).offender == name
    with pytest.raises(InputError, match=f"client 4: layer {name} has NaN or infinite values"):
        l_dawa(start, [update(4, bad)])


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1, 1e15, 1e30])
def test_cosines_of_very_large_and_small_layers(size):
    random = np.random.default_rng(0)
    g, w = random.standard_normal((2, 20_000)).astype(np.float32)
    (wg, ww), (_, gg) = products([w * np.float32(size), g], g)
    expected = g.astype(float) @ w / sqrt((g.astype(float) @ g) * (w.astype(float) @ w))
    assert cosine(wg, ww, gg) == pytest.approx(expected, abs=1e-6)


def test_rounding_cannot_take_a_cosine_above_one():
    assert cosine(1 + 1e-9, 1, 1) == 1


def test_products_of_a_large_layer_are_accurate():
    random = np.random.default_rng(0)
    w, g = random.standard_normal((2, 1_000_003)).astype(np.float32) + np.float32(0.5)
    [(wg, ww)] = products([w], g)
    assert wg == pytest.approx(w.astype(float) @ g.astype(float), rel=1e-6)
    assert ww == pytest.approx(w.astype(float) @ w.astype(float), rel=1e-6)


# --- bad input ---


@pytest.mark.parametrize("rule", [fedavg, l_dawa, m_dawa])
def test_updates_that_do_not_fit_are_refused(rule):
    missing, wrong, extra, kind = (dict(CLIENTS[0].layers) for _ in range(4))
    del missing["b"]
    wrong["b"] = np.zeros((1, 2), np.float32)
    extra["c"] = np.zeros(2, np.float32)
    kind["b"] = np.zeros(2, np.int64)
    for bad, reason in (
        (missing, "client 9: layer b is missing"),
        (wrong, r"client 9: layer b has shape \(1, 2\) instead of \(2,\)"),
        (extra, "client 9: layer c is not part of the global model"),
        (kind, "client 9: layer b has dtype int64 instead of float32"),
    ):
        with pytest.raises(InputError, match=reason):
            rule(GLOBAL, [CLIENTS[1], update(9, bad, 3, 1.0)])


@every_rule
def test_no_updates_are_refused(rule):
    with pytest.raises(InputError, match="at least one is needed"):
        rule(GLOBAL, [])


@pytest.mark.parametrize(
    ("rule", "client", "reason"),
    [
        (fedavg, update(9, GLOBAL), "client 9: num-examples is None"),
        (fedavg, update(9, GLOBAL, num_examples=0), "client 9: num-examples=0 is not positive"),
        (partial(l_dawa, weighting="examples"), update(9, GLOBAL, train_loss=1.0), "client 9: num-examples is None"),
        (partial(l_dawa, weighting="loss"), update(9, GLOBAL, num_examples=1), "client 9: train-loss is None"),
        (partial(l_dawa, weighting="loss"), update(9, GLOBAL, train_loss=np.nan), "client 9: train-loss is nan"),
        (loss_weighted, update(9, GLOBAL, num_examples=1), "client 9: train-loss is None"),
    ],
)
def test_metrics_that_are_missing_are_refused(rule, client, reason):
    with pytest.raises(InputError, match=reason):
        rule(GLOBAL, [CLIENTS[0], client])


def test_unknown_options_are_refused():
    for make in (partial(fedavg, GLOBAL, CLIENTS), FedAvg):
        with pytest.raises(InputError, match="weighting=loss is not a choice; allowed are examples, uniform"):
            make(weighting="loss")
    for make in (partial(l_dawa, GLOBAL, CLIENTS), LDAWA):
        with pytest.raises(InputError, match="weighting=size is not a choice; allowed are uniform, examples, loss"):
            make(weighting="size")
    for make in (partial(m_dawa, GLOBAL, CLIENTS), MDAWA, LDAWA):
        with pytest.raises(InputError, match="buffers=drop is not a choice; allowed are average, scale"):
            make(buffers="drop")
    with pytest.raises(InputError, match="scale_at=phone is not a choice; allowed are server, client"):
        LDAWA(scale_at="phone")
    with pytest.raises(InputError, match="warmup_rounds=-1 is negative"):
        LDAWA(warmup_rounds=-1)


# --- strategies ---


def ever_needed(strategy):
    """Metrics that the rule needs in some round, as people are told."""
    return strategy.server.travels(Travels(down="", up="", needs=("nothing of this",), stays="")).needs


def run(strategy, round):
    reference = GlobalLayers(GLOBAL)
    rule = strategy.server.rule(round)
    rule.start(reference)
    for client in CLIENTS:
        rule.add(client, reference.compare(client.layers))
    return rule.finish()


@pytest.mark.parametrize(
    ("strategy", "expected", "needs"),
    [
        (FedAvg(), fedavg, ("num-examples",)),
        (FedAvg(weighting="uniform"), partial(fedavg, weighting="uniform"), ()),
        (Loss(), loss_weighted, ("train-loss",)),
        (LDAWA(), l_dawa, ()),
        (LDAWA(weighting="examples"), partial(l_dawa, weighting="examples"), ("num-examples",)),
        (LDAWA(weighting="loss"), partial(l_dawa, weighting="loss"), ("train-loss",)),
        (MDAWA(), m_dawa, ()),
    ],
)
def test_strategies_apply_their_rule_and_ask_for_no_more_than_it_needs(strategy, expected, needs):
    assert ever_needed(strategy) == needs
    for round in (1, 2):  # nothing is left over from a round
        assert strategy.server.rule(round).needs == needs
        assert same(run(strategy, round), expected(GLOBAL, CLIENTS))


def test_warm_up():
    strategy = LDAWA(weighting="loss", warmup_rounds=2)
    assert ever_needed(strategy) == ("num-examples", "train-loss")
    by_loss = partial(l_dawa, weighting="loss")
    for round, expected in ((1, fedavg), (2, fedavg), (3, by_loss)):
        assert strategy.server.rule(round).needs == (("train-loss",) if round == 3 else ("num-examples",))
        assert same(run(strategy, round), expected(GLOBAL, CLIENTS))


@pytest.mark.parametrize("weighting", ["uniform", "examples", "loss"])
@pytest.mark.parametrize("buffers", ["average", "scale"])
def test_layers_scaled_by_the_clients_give_the_same_model(weighting, buffers):
    start = model(0)
    updates = clients_of(start)
    scaled = [replace(one, layers=scale_layers(start, one.layers, buffers=buffers)) for one in updates]
    strategy = LDAWA(weighting=weighting, buffers=buffers, scale_at="client")
    rule, reference = strategy.server.rule(1), GlobalLayers(start)
    rule.start(reference)
    for one in scaled:
        rule.add(one, reference.compare(one.layers))
    result = rule.finish()
    for name, array in l_dawa(start, updates, weighting=weighting, buffers=buffers).items():
        assert result[name].dtype == array.dtype
        np.testing.assert_allclose(result[name], array, rtol=1e-6, atol=1e-6)
    assert same(updates[0].layers, clients_of(start)[0].layers)  # new arrays


@pytest.mark.parametrize(
    ("name", "kind", "metrics"),
    [
        ("fedavg", FedAvg, ("num-examples", "train-loss", "seconds")),
        ("loss", Loss, ("train-loss", "seconds")),
        ("l_dawa", LDAWA, ("seconds",)),
        ("m_dawa", MDAWA, ("seconds",)),
    ],
)
def test_settings_build_the_strategy(tmp_path, name, kind, metrics):
    federation = Federation(tmp_path, f"strategy={name}")
    assert type(federation.strategy) is kind
    first = Round(federation.prepared.federation, federation.state)
    assert {TrainPlan.from_content(message.content).metrics for message in first.messages} == {metrics}


def same(one, other):
    return list(one) == list(other) and all(
        np.array_equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def all_layers(updates):
    return [one.layers for one in updates]
