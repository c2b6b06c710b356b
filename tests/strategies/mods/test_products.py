"""Rounds with LoRA's factors: what each aggregation sends, and the weights that result, against dense float64 ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.config.aggregation_settings import AggregationSettings
from fedssl.config.component import Component
from fedssl.encoders.base import Encoder
from fedssl.low_rank_products import LowRankLayer
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_layers
from fedssl.wire.messages import TrainPlan
from server_app.messaging import receive
from server_app.round import Round
from strategies.eua import EUA
from strategies.fedavg import FedAvg
from strategies.krum import Krum
from strategies.l_dawa import LDAWA
from strategies.m_dawa import MDAWA
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.contexts import default_settings, federation_of, run_context
from tests.federation import finish
from tests.server_app.test_round import make_grid

FC = LowRankLayer("encoder.fc.weight", "encoder.fc.lora_A", "encoder.fc.lora_B", 2.0)
CLIENTS = 5
STRATEGIES = {"fedavg": FedAvg, "l_dawa": LDAWA, "l_dawa normalize": lambda: LDAWA(normalize=True)}
STRATEGIES |= {"m_dawa": MDAWA, "eua": EUA, "krum": lambda: Krum(malicious=1, select=2)}


def parameter(random, *shape):
    return nn.Parameter(torch.from_numpy(random.standard_normal(shape)))


class Tuned(SSLMethod):
    """Factors of rank 2, the weight that they are added to if the server changes it, and a head, all in float64."""

    def __init__(self, aggregation):
        super().__init__()
        random = np.random.default_rng(0)
        self.encoder = Encoder()
        self.encoder.fc = nn.Module()
        self.encoder.fc.lora_A = parameter(random, 2, 7)
        self.encoder.fc.lora_B = parameter(random, 5, 2)
        self.encoder.define_stages(stages=(), widths=())
        self.head = parameter(random, 3)
        self.low_rank_layers = (FC,)
        if aggregation in ("exact", "stack"):
            self.encoder.fc.weight = parameter(random, 5, 7).requires_grad_(False)
            self.server_merged_names = (FC.weight,)


def tiny_b_huge_a(layers, partition):
    """Return factors of the product of `trained`."""
    update = trained(layers, partition)
    return update | {FC.a: 1e6 * update[FC.a], FC.b: 1e-6 * update[FC.b]}


def federation(grid, strategy, aggregation, ranks=(), method=None, max_norm_ratio=None):
    model = default_settings().model
    tuning = Component({**model.tuning.values, "aggregation": aggregation, "ranks": ranks})
    method = method or Tuned(aggregation)
    context = run_context(
        method,
        initial_layers=lambda: exchanged_layers(method),
        clients_per_round=CLIENTS,
        model=replace(model, tuning=tuning),
        aggregation=AggregationSettings(max_norm_ratio=max_norm_ratio),
    )
    return federation_of(grid, strategy, context)


def trained(layers, partition):
    """Return the upload of a client: all layers but the weight, each moved by random numbers."""
    random = np.random.default_rng(10 + partition)
    return {
        name: array + 0.5 * random.standard_normal(array.shape) for name, array in layers.items() if name != FC.weight
    }


def bad_rank(layers, partition):
    return trained(layers, partition) | {FC.a: np.zeros((3, 7)), FC.b: np.zeros((5, 3))}


def with_weight(layers, partition):
    return trained(layers, partition) | {FC.weight: np.zeros((5, 7))}


def run(
    strategy, aggregation, *, rounds=1, behaviors=(trained,) * CLIENTS, reverse=False, ranks=(), max_norm_ratio=None
):
    """The state and the last report after some rounds, and all messages."""
    grid = make_grid(behaviors)
    context = federation(grid, strategy, aggregation, ranks, max_norm_ratio=max_norm_ratio)
    state, messages = ServerState(), []
    for _ in range(rounds):
        one = Round(context, state)
        messages += one.messages
        replies = list(receive(grid, one.messages, timeout=60))
        state, report = finish(one, replies[::-1] if reverse else replies)
    return state, report, messages


def total(layers, weight):
    return layers.get(FC.weight, weight) + FC.scale * layers[FC.b] @ layers[FC.a]


def dense_round(strategy, layers):
    """The same strategy on a model whose product is one dense weight, and the head; the new product."""
    grid = make_grid([trained] * CLIENTS)
    uploads = [trained(layers, client) for client in range(CLIENTS)]
    start = {"encoder.fc": FC.scale * layers[FC.b] @ layers[FC.a], "head": layers["head"]}
    dense = [{"encoder.fc": FC.scale * one[FC.b] @ one[FC.a], "head": one["head"]} for one in uploads]

    class Dense(SSLMethod):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()
            self.encoder.fc = nn.Parameter(torch.from_numpy(start["encoder.fc"].copy()))
            self.encoder.define_stages(stages=(), widths=())
            self.head = nn.Parameter(torch.from_numpy(start["head"].copy()))

    grid = make_grid([lambda received, client: dense[client]] * CLIENTS)
    one = Round(federation(grid, strategy, "factors", method=Dense()), ServerState())
    state, _ = finish(one, receive(grid, one.messages, timeout=60))
    return state.models[GLOBAL].layers["encoder.fc"]


WEIGHT = exchanged_layers(Tuned("exact"))[FC.weight]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


@every_strategy
@pytest.mark.parametrize("aggregation", ["exact", "stack"])
def test_new_weights_are_those_of_dense_aggregation(strategy, aggregation):
    layers = exchanged_layers(Tuned(aggregation))
    for round in (1, 2):
        state, _, _ = run(strategy(), aggregation, rounds=round)
        expected = layers[FC.weight] + dense_round(strategy(), layers)
        layers = state.models[GLOBAL].layers
        np.testing.assert_allclose(total(layers, WEIGHT), expected, rtol=1e-10, atol=1e-10)
    if aggregation == "stack":
        assert not layers[FC.b].any()
        assert layers[FC.a].any()


@pytest.mark.parametrize("aggregation", ["factors", "exact", "stack", "svd"])
def test_only_weights_changed_by_the_server_are_sent(aggregation):
    _, report, messages = run(FedAvg(), aggregation, rounds=2)
    assert not report.dropped  # no client has uploaded the weight
    for message in messages:
        plan = TrainPlan.from_content(message.content)
        assert (FC.weight in plan.layers) == (aggregation in ("exact", "stack"))
        if aggregation in ("exact", "stack"):
            assert set(plan.upload_names) == {FC.a, FC.b, "head"}


@pytest.mark.parametrize("aggregation", ["exact", "stack", "svd"])
def test_bits_do_not_depend_on_arrival_or_threads(aggregation):
    layers = []
    for reverse, threads in ((False, 1), (True, 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            state, _, _ = run(LDAWA() if aggregation != "stack" else FedAvg(), aggregation, rounds=2, reverse=reverse)
        finally:
            torch.set_num_threads(before)
        layers.append(state.models[GLOBAL].layers)
    assert all(np.array_equal(layers[0][name], layers[1][name]) for name in layers[0])


@pytest.mark.parametrize("aggregation", ["factors", "exact", "stack", "svd"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (bad_rank, r"layer encoder.fc.lora_A has shape \(3, 7\) instead of \(2, 7\)"),
        (with_weight, "layer encoder.fc.weight is not part of the global model"),
    ],
)
def test_a_bad_update_is_dropped(aggregation, bad, reason):
    behaviors = [trained, trained, bad, trained, trained]
    state, report, _ = run(FedAvg(), aggregation, behaviors=behaviors)
    assert list(report.dropped) == [2]
    assert pytest.raises(AssertionError, match=reason).matches(AssertionError(report.dropped[2]))
    # As if the client had not replied.
    grid = make_grid([trained] * CLIENTS)
    one = Round(federation(grid, FedAvg(), aggregation), ServerState())
    replies = list(receive(grid, one.messages, timeout=60))
    expected, _ = finish(one, [*replies[:2], *replies[3:]])
    assert same(state.models[GLOBAL].layers, expected.models[GLOBAL].layers)


@pytest.mark.parametrize("aggregation", ["factors", "exact", "stack", "svd"])
def test_huge_factors_are_dropped_if_factors_are_combined(aggregation):
    # svd and stack use the product alone.
    behaviors = [trained, trained, tiny_b_huge_a, trained, trained]
    state, report, _ = run(FedAvg(), aggregation, behaviors=behaviors, max_norm_ratio=10)
    if aggregation in ("stack", "svd"):
        assert report.dropped == {}
        expected, _, _ = run(FedAvg(), aggregation)
        product, other = (total(one.models[GLOBAL].layers, 0) for one in (state, expected))
        np.testing.assert_allclose(product, other, rtol=1e-6, atol=1e-6)
        return
    assert list(report.dropped) == [2]
    assert "its low-rank factors moved" in report.dropped[2]
    assert [row.client for row in report.clients] == [0, 1, 3, 4]
    # Without the limit the mean of A is that of the attack.
    state, report, _ = run(FedAvg(), aggregation, behaviors=behaviors)
    assert report.dropped == {}
    assert abs(state.models[GLOBAL].layers[FC.a]).max() > 1e4
