"""Strategies see LoRA's products: every rule against the same rule on dense float64 weights, and properties."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.arrays import GlobalLayers
from fedssl.encoders.base import Encoder
from fedssl.low_rank_products import FactorPairs, LowRank
from fedssl.methods.base import SSLMethod
from fedssl.wire.messages import TrainPlan
from server_app.policies import apply_stale_update
from strategies.encoder_divergence import divergence, encoder_divergence
from strategies.eua import EUAAggregator
from strategies.euc import DiscrepancySum, EUCServer
from strategies.gossip import NeighborAverage, consensus_distance
from strategies.gram_matrix import deviation_gram
from strategies.krum import KrumAggregator
from strategies.l_dawa import LDAWA, l_dawa, scale_layers
from strategies.low_rank_aggregation import combine, exact_weight, nearest_factors, stacked_weight
from strategies.m_dawa import m_dawa
from strategies.types import AggregatedModel, GlobalModel, LinearAggregator
from strategies.update_store import UpdateStorage, in_memory
from strategies.weighted_sum import WeightedSum
from tests.strategies.low_rank import (
    CONV,
    FC,
    clients_near,
    dense_layers,
    dense_updates,
    low_rank_model,
    pairs_of,
    reference,
)
from tests.strategies.made import update
from tests.strategies.test_krum import chosen_of

LINEAR = {
    "fedavg": partial(WeightedSum, weighting="examples"),
    "loss": partial(WeightedSum, weighting="loss"),
    "l_dawa": partial(WeightedSum, scale="layer"),
    "l_dawa loss": partial(WeightedSum, scale="layer", weighting="loss"),
    "l_dawa normalize": partial(WeightedSum, scale="layer", weighting="examples", normalize=True),
    "m_dawa": partial(WeightedSum, scale="model"),
    "eua": EUAAggregator,
    "eua unit": partial(EUAAggregator, deviation="unit", step="constant", server_lr=0.3),
    "euc": partial(DiscrepancySum, weighting="examples"),
    "gossip": partial(NeighborAverage, 2, {0: 0.1, 1: 0.2, 3: 0.3, 4: 0.15}),
    "krum": partial(KrumAggregator, malicious=1, select=2),
}
every_linear_rule = pytest.mark.parametrize("rule", LINEAR.values(), ids=LINEAR.keys())


def aggregate(aggregator, start, updates):
    aggregator.start(start)
    for one in updates:
        aggregator.add(one, start.cosines_of(one.layers))
    return aggregator.finish()


def aggregated(rule, *dtype, **options):
    """The model before a round, its updates, and what the rule makes of them."""
    start, aggregator = reference(*dtype, **options), rule()
    updates = clients_near(start)
    return start, updates, aggregator, aggregate(aggregator, start, updates)


def new_products(aggregator, start, updates):
    """The dense product of the strategy for each pair."""
    return {
        start.compared_name(name): combine(
            aggregator.combination(name),
            start.product(name, start.layers),
            {one.partition_id: start.product(name, one.layers) for one in updates},
        ).dense()
        for name in start.products
    }


@every_linear_rule
@pytest.mark.parametrize("fixed_a", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_new_products_are_those_of_dense_weights(rule, fixed_a, dtype):
    start, updates, aggregator, layers = aggregated(rule, dtype, fixed_a=fixed_a)
    assert isinstance(aggregator, LinearAggregator)
    products = new_products(aggregator, start, updates)
    dense_start = GlobalLayers(dense_layers(start.layers, start.pairs))
    dense = aggregate(rule(), dense_start, dense_updates(updates, start.pairs))
    assert list(layers) == list(start.layers)
    # The coefficients of EUA and M-DAWA also depend on other weights, which are compared in float32.
    whole_model = rule in (LINEAR["eua"], LINEAR["eua unit"], LINEAR["m_dawa"])
    tolerance = 1e-6 if dtype == np.float32 and whole_model else 1e-10
    for name, product in products.items():
        error = np.abs(product - dense[name]).max() / np.abs(dense[name]).max()
        assert error < tolerance, name


@every_linear_rule
def test_the_new_factors_are_the_same_combinations(rule):
    # B' has the coefficients of the strategy. So has A', except that it is not scaled by cosines.
    start, updates, aggregator, layers = aggregated(rule)
    for name in start.products:
        combination = aggregator.combination(name)
        expected = combination.initial * start.layers[name] + sum(
            combination.clients.get(one.partition_id, 0) * one.layers[name] for one in updates
        )
        np.testing.assert_allclose(layers[name], expected, rtol=1e-12, atol=1e-12)


@every_linear_rule
def test_exact_and_stacked_weights_against_dense_ones(rule):
    # W + s B A for all modes: of the clients' W + P_k, with P' from the test above.
    start, updates, aggregator, layers = aggregated(rule)
    random = np.random.default_rng(5)
    for name, pair in start.products.items():
        initial = start.product(name, start.layers)
        products = {one.partition_id: start.product(name, one.layers) for one in updates}
        product = combine(aggregator.combination(name), initial, products)
        weight = random.standard_normal((6, 2, 2, 2) if pair == CONV else (5, 9))
        expected = weight + product.dense().reshape(weight.shape)
        factors = start.product(name, layers)
        moved = exact_weight(weight, product, factors)
        assert moved.shape == weight.shape
        np.testing.assert_allclose(moved + factors.dense().reshape(weight.shape), expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(stacked_weight(weight, product), expected, rtol=1e-12, atol=1e-12)
        assert stacked_weight(weight.astype(np.float32), product).dtype == np.float32
        u, s, vt = np.linalg.svd(product.dense())
        nearest = (u[:, :2] * s[:2]) @ vt[:2]
        np.testing.assert_allclose(product.truncate(2).dense(), nearest, rtol=1e-10, atol=1e-10)


def test_singular_vectors_keep_the_signs_of_the_initial_factors():
    # [6 0; 0 -2] = 2 B A with rows (1, 0) and (0, 1) of A = V^T, and columns (3, 0) and (0, -1) of B, up to signs.
    product = LowRank(np.array([[6.0, 0], [0, -2]]), np.eye(2))
    for signs in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        b, a = np.array([[2.0, 0.2], [0.2, -1]]) * signs, np.array([[0.9, 0.1], [0.1, 0.9]]) * np.array([signs]).T
        nearest = nearest_factors(product, LowRank(b.astype(np.float32), a.astype(np.float32), 2.0))
        np.testing.assert_allclose(nearest.b, np.array([[3, 0], [0, -1]]) * signs, atol=1e-6)
        np.testing.assert_allclose(nearest.a, np.diag(signs), atol=1e-6)
        assert nearest.a.dtype == nearest.b.dtype == np.float32


def test_l_dawa_scales_one_factor_by_the_products_cosine():
    # (4, 3) instead of (3, 4): the cosine is 0.96. A single client's product is scaled once, as a dense weight is.
    start = GlobalLayers({FC.a: np.array([[3.0, 4]]), FC.b: np.array([[2.0], [0]])}, FactorPairs((FC,)))
    client = update(0, {FC.a: np.array([[4.0, 3]]), FC.b: np.array([[2.0], [0]])}, num_examples=1)
    for layers in (l_dawa(start, [client]), m_dawa(start, [client]), scale_layers(start, client.layers)):
        np.testing.assert_allclose(layers[FC.b], [[1.92], [0]])
        np.testing.assert_array_equal(layers[FC.a], [[4, 3]])


@pytest.mark.parametrize("fixed_a", [False, True])
@pytest.mark.parametrize("moved", [0.5, 1e-3, 1e-6])
@pytest.mark.parametrize("memory", [2**40, 0])  # 0: all updates are in the file
def test_the_gram_matrix_of_deviations_is_that_of_products(fixed_a, moved, memory, tmp_path):
    start = reference(fixed_a=fixed_a)
    updates = clients_near(start, moved=moved)
    storage = UpdateStorage(tmp_path, memory=memory)
    store = storage.new_store(start)
    for one in updates:
        store.add(one.layers)
    gram = deviation_gram(start.weights(), store, exact=True)
    expected = slow_gram(start, updates)
    lengths = np.sqrt(expected.diagonal())
    np.testing.assert_array_less(abs(gram - expected), 1e-10 * np.outer(lengths, lengths))
    storage.close()


def slow_gram(start, updates):
    """Inner products of theta - theta_k over all weights, with the 64 bits of long doubles."""

    def vector(layers):
        parts = []
        for name, array in layers.items():
            wide = array.astype(np.longdouble)
            if name in start.products:
                pair = start.products[name]
                a = layers[pair.a] if pair.a in layers else start.pairs.fixed[pair.a]
                parts.append(pair.scale * (wide @ a.astype(np.longdouble)).ravel())
            elif name.startswith("projector") and array.dtype.kind == "f":
                parts.append(wide.ravel())
        return np.concatenate(parts)

    deviations = [vector(one.layers) - vector(start.layers) for one in updates]
    return np.array([[float(x @ y) for y in deviations] for x in deviations])


def test_rules_do_not_depend_on_the_factors_of_a_product():
    # (B R) (R^-1 A) is the same client. Its factors differ, which rules on factors would see.
    start = reference()
    updates = clients_near(start)
    turn = np.array([[2.0, 1], [-1, 3]])
    b, a = updates[1].layers[FC.b], updates[1].layers[FC.a]
    turned = update(1, updates[1].layers | {FC.b: b @ turn, FC.a: np.linalg.solve(turn, a)})
    others = [updates[0], turned, *updates[2:]]
    one, other = (in_memory([one.layers for one in some]) for some in (updates, others))
    expected = deviation_gram(start.weights(), one, exact=True)
    np.testing.assert_allclose(deviation_gram(start.weights(), other, exact=True), expected, rtol=1e-10, atol=1e-10)
    assert chosen_of(start, others, select=2) == chosen_of(start, updates, select=2)


def test_sums_of_blocks_scale_like_the_whole_sum():
    start = reference(np.float32)
    updates = clients_near(start, 7)
    whole, blocks = (WeightedSum(scale="layer", weighting="loss") for _ in range(2))
    expected = l_dawa(start, updates, weighting="loss")
    blocks.set_clients([one.partition_id for one in updates])
    for aggregator in (whole, blocks):
        aggregator.start(start)
    other = WeightedSum(scale="layer", weighting="loss")
    other.start(start)
    for one in updates[:5]:
        other.add(one, start.cosines_of(one.layers))
    blocks.merge(other.take_block())
    for one in updates[5:]:
        blocks.add(one, start.cosines_of(one.layers))
    result = blocks.finish()
    assert all(np.array_equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("fixed_a", [False, True])
def test_euc_measures_the_discrepancy_of_products(weighting, fixed_a):
    start = reference(fixed_a=fixed_a)
    updates = clients_near(start)
    aggregator = DiscrepancySum(weighting=weighting)
    aggregate(aggregator, start, updates)
    weights = np.array([one.num_examples if weighting == "examples" else 1 for one in updates], float)
    weights /= weights.sum()
    dense = [one.layers for one in dense_updates(updates, start.pairs)]
    assert aggregator.discrepancy.keys() == {FC.weight, CONV.weight, "projector.weight"}
    for name, value in aggregator.discrepancy.items():
        mean = sum(w * layers[name] for w, layers in zip(weights, dense, strict=True))
        expected = sum(w * ((layers[name] - mean) ** 2).sum() for w, layers in zip(weights, dense, strict=True))
        assert value == pytest.approx(expected, rel=1e-10)


def test_euc_defers_both_factors_together():
    # Clients k = -1, 0, 1 move the projector by k everywhere: 20 numbers, d = 20 * 2/3. They move B of fc by k t, t
    # such that the product moves by a length of sqrt(1.7 * 20): d = 1.7 * 20 * 2/3, of 28 numbers in its factors. The
    # convolution's 42 numbers have d = 0. In the order of d / numbers (0, 0.67, 0.81) there remain (48, 28, 0) of 90
    # numbers, and shares (0, 1 / 2.7, 1) of d: 28/90 < 1/2.7 stops after the projector.
    start = reference()
    step = np.ones((5, 2))
    step *= np.sqrt(1.7 * 20) / np.linalg.norm(FC.scale * step @ start.layers[FC.a])
    updates = []
    for k in range(3):
        moved = {
            FC.b: start.layers[FC.b] + (k - 1) * step,
            "projector.weight": start.layers["projector.weight"] + (k - 1),
        }
        updates.append(update(k, start.layers | moved))
    server = EUCServer(interval=2, weighting="uniform")
    aggregator = server.aggregator(2)
    layers = aggregate(aggregator, start, updates)
    expected = {CONV.weight: 0, "projector.weight": 40 / 3, FC.weight: 1.7 * 40 / 3}
    assert aggregator.discrepancy == pytest.approx(expected, abs=1e-12)
    model, received = GlobalModel(layers=start.layers), {0: tuple(layers)}
    done = AggregatedModel(model=model, round=2, layers=layers, aggregator=aggregator, received=received, num_clients=3)
    state, _ = server.after_aggregation(done)
    assert state["intervals"] == {CONV.a: 2, CONV.b: 2, "projector.weight": 2, FC.a: 1, FC.b: 1}


def test_consensus_is_measured_on_products():
    start = reference()
    models = [one.layers for one in clients_near(start, 4)]
    weights = [dense_layers(layers, start.pairs) for layers in models]
    dense = [np.concatenate([array.ravel() for name, array in one.items() if "_" not in name]) for one in weights]
    mean = np.mean(dense, axis=0)
    expected = np.sqrt(np.mean([((one - mean) ** 2).sum() for one in dense]) / (mean**2).sum())
    assert consensus_distance([start.with_layers(layers) for layers in models]) == pytest.approx(expected, rel=1e-10)
    assert consensus_distance([start] * 3) < 1e-15


def test_a_stale_update_moves_the_factors():
    # Buffered aggregation adds changes to factors, a client's product included: with start = current it is as sent.
    start = reference()
    client = clients_near(start, 1)[0].layers
    moved = apply_stale_update(client, start=start.layers, current=start.layers, staleness=0)
    np.testing.assert_allclose(
        dense_layers(moved, start.pairs)[FC.weight], dense_layers(client, start.pairs)[FC.weight]
    )


class Tuned(SSLMethod):
    """Encoder whose only trained weights are a pair of factors, A fixed or not."""

    def __init__(self, *, fixed_a):
        super().__init__()
        self.encoder = Encoder()
        self.encoder.define_stages(stages=(), widths=())
        self.encoder.fc = nn.Module()
        arrays = low_rank_model(0)
        self.encoder.fc.weight = nn.Parameter(torch.zeros(5, 9, dtype=torch.float64), requires_grad=False)
        self.encoder.fc.lora_A = nn.Parameter(torch.from_numpy(arrays[FC.a]), requires_grad=not fixed_a)
        self.encoder.fc.lora_B = nn.Parameter(torch.from_numpy(arrays[FC.b]))
        self.low_rank_layers = (FC,)


@pytest.mark.parametrize("distance", ["mean_conv_l2", "squared_l2"])
def test_the_divergence_of_an_encoder_is_that_of_its_products(distance):
    start = {name: low_rank_model(1)[name] for name in (FC.a, FC.b)}
    method = Tuned(fixed_a=False)
    before, after = (dense_layers(layers, pairs_of())[FC.weight] for layers in (start, low_rank_model(0)))
    square = ((after - before) ** 2).sum()
    expected = square if distance == "squared_l2" else np.sqrt(square)
    assert encoder_divergence(method, start, distance=distance) == pytest.approx(expected, rel=1e-12)
    same = {name: low_rank_model(0)[name] for name in (FC.a, FC.b)}
    assert encoder_divergence(method, same, distance=distance) == 0
    infinite = GlobalLayers(start | {FC.a: np.full((2, 9), np.inf)}, pairs_of())
    assert not np.isfinite(divergence(infinite, start, distance=distance))


def test_the_client_of_l_dawa_scales_products():
    method = Tuned(fixed_a=False)
    start = {name: low_rank_model(1)[name] for name in (FC.a, FC.b)}
    plan = TrainPlan(
        round=1, layers=start, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="",
        upload_names=(FC.a, FC.b),
    )  # fmt: skip
    uploaded = LDAWA(scale_at="client").client.upload(method, plan)
    x, y = (dense_layers(layers, pairs_of())[FC.weight].ravel() for layers in (start, low_rank_model(0)))
    cosine = x @ y / np.sqrt((x @ x) * (y @ y))
    np.testing.assert_allclose(uploaded[FC.b], cosine * low_rank_model(0)[FC.b])
    np.testing.assert_array_equal(uploaded[FC.a], low_rank_model(0)[FC.a])
