"""Sums of blocks of clients: sizes, order of additions, and sums that other processes computed."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from strategies.fedavg import fedavg
from strategies.weighted_sum import NO_COSINES, WeightedSum, num_per_block
from tests.strategies.made import clients_of, layers, model, same, update

MODES = [
    *(
        {"weighting": weighting, "scale": scale}
        for weighting in ("uniform", "examples", "loss")
        for scale in ("none", "layer")
    ),
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
@pytest.mark.parametrize("number", [3, 5, 8, 22])
@pytest.mark.parametrize("elsewhere", [1, 2, 5])
def test_blocks_summed_elsewhere_give_equal_bits(options, number, elsewhere):
    """The first ``elsewhere`` clients of each block are summed by another aggregator."""
    start = model(0)
    updates = [replace(one, partition_id=k) for k, one in enumerate((clients_of(start) * number)[:number])]
    reference, size = GlobalLayers(start), num_per_block(number)
    rule, other = WeightedSum(**options), WeightedSum(**options)
    rule.start(reference)
    rule.add_all(updates)
    expected = rule.finish()

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
