"""Properties of every rule; FedAvg, Loss, L-DAWA, M-DAWA against a slow transcription of Eqs. 1-6 of L-DAWA."""

import pickle
from dataclasses import replace
from functools import partial
from math import exp, sqrt

import numpy as np
import pytest
import torch

from fedssl.arrays import NO_COSINES, GlobalLayers
from strategies.aggregate import aggregate
from strategies.fedavg import fedavg
from strategies.l_dawa import l_dawa
from strategies.loss_weighted import loss_weighted
from strategies.m_dawa import m_dawa
from strategies.weighted_sum import WeightedSum, num_per_block
from tests.arrays import same
from tests.strategies.made import all_layers, clients_of, every_rule, every_weighted_sum, layers, model, update


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


@every_weighted_sum
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


def test_the_number_of_threads_changes_nothing():
    random = np.random.default_rng(0)
    start = {f"fc{i}.weight": random.standard_normal((600, 1000), np.float32) for i in range(6)}  # 3.6 M: 4 threads
    updates = []
    for client in range(3):
        moved = {name: array + random.standard_normal(array.shape, "f4") for name, array in start.items()}
        updates.append(update(client, moved))
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


def test_normalized_clients_that_turn_away_stay_bounded():
    # Cosines 1/2 and -1/2: divided by their sum the layer would be infinite; by that of their sizes it is
    # (w_0 / 2 - w_1 / 2) / 1.
    start = layers(a=[1, 0])
    first, second = layers(a=[1, sqrt(3)]), layers(a=[-1, sqrt(3)])
    result = l_dawa(start, [update(0, first), update(1, second)], normalize=True)
    np.testing.assert_allclose(result["a"], [1, 0], atol=1e-7)
    at_right_angles = l_dawa(start, [update(0, layers(a=[0, 1]))], normalize=True)
    np.testing.assert_array_equal(at_right_angles["a"], [0, 0])


MODES = [
    *({"weighting": how, "scale": scale} for how in ("uniform", "examples", "loss") for scale in ("none", "layer")),
    {"weighting": "loss", "scale": "model", "buffers": "scale", "normalize": True},
]


@pytest.mark.parametrize(
    ("clients", "size"),
    # At least 5 clients in a block, and at most 16 blocks: 100 / 16 = 6.25, rounded up.
    [(1, 5), (5, 5), (80, 5), (81, 6), (100, 7), (1000, 63)],
)
def test_block_sizes(clients, size):
    assert num_per_block(clients) == size


def test_the_order_of_the_additions():
    # In float32 2^24 + 1 = 2^24 (a tie, rounded to even), but 2^24 + 2 is exact. Seven clients have 2^24, 1, 1, 1, 1 in
    # the first block, which sums to 2^24, and 1, 1 in the second, which sums to 2. Without blocks the sum is 2^24.
    values = [2.0**24, 1, 1, 1, 1, 1, 1]
    updates = [update(client, layers(a=[value])) for client, value in enumerate(values)]
    result = fedavg(layers(a=[0]), updates, weighting="uniform")["a"]
    assert result[0] == np.float32(2**24 + 2) / np.float32(7)
    assert result[0] != np.float32(2**24) / np.float32(7)


def in_shared_memory(block):
    """Return a block as another process receives it: its arrays are read-only."""
    received = pickle.loads(pickle.dumps(block))
    for array in received.layers.values():
        array.flags.writeable = False
    return received


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(("number", "elsewhere"), [(3, 1), (5, 2), (5, 5), (8, 1), (22, 2), (22, 5)])
def test_blocks_summed_elsewhere_give_equal_bits(options, number, elsewhere):
    """The first ``elsewhere`` clients of each block are summed by another aggregator."""
    start = model(0)
    updates = [replace(one, partition_id=k) for k, one in enumerate((clients_of(start) * number)[:number])]
    reference, size = GlobalLayers(start), num_per_block(number)
    rule, other = WeightedSum(**options), WeightedSum(**options)
    expected = aggregate(start, updates, rule)

    for aggregator in (rule, other):
        aggregator.set_clients(list(range(number)))
    rule.start(reference)
    received = []
    for first in range(0, number, size):
        block = updates[first : first + size]
        other.start(GlobalLayers(start))
        for one in block[:elsewhere]:
            other.add(one, reference.cosines_of(one.layers))
        received.append(in_shared_memory(other.take_block()))
        before = pickle.dumps(received[-1].layers)
        rule.merge(received[-1])
        for one in block[elsewhere:]:
            rule.add(one, reference.cosines_of(one.layers))
        assert pickle.dumps(received[-1].layers) == before
    first_block = pickle.dumps(received[0].layers)
    assert same(rule.finish(), expected)
    assert pickle.dumps(received[0].layers) == first_block


def test_blocks_without_updates_change_nothing():
    start = model(0)
    reference = GlobalLayers(start)
    results = []
    for clients in ([5, 15], [*range(16)]):  # in the first block, and in the second and fourth of 4
        rule = WeightedSum(weighting="loss")
        rule.set_clients(clients)
        rule.start(reference)
        for client, one in zip((5, 15), clients_of(start), strict=False):
            rule.add(replace(one, partition_id=client), reference.cosines_of(one.layers))
        results.append(rule.finish())
    assert same(*results)


def test_a_client_of_an_earlier_round_follows_the_last_block():
    rule = WeightedSum()
    rule.set_clients(list(range(0, 14, 2)))
    rule.start(GlobalLayers(layers(a=[0])))
    assert [rule.block_of(client) for client in (0, 8, 10, 12)] == [0, 0, 1, 1]
    assert rule.block_of(5) == 0
    rule.add(update(10, layers(a=[1])), NO_COSINES)
    assert rule.block_of(5) == rule.block_of(14) == 1
