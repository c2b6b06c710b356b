"""Sums of blocks of clients: sizes, order of additions, and sums that other processes computed."""

import pickle

import numpy as np
import pytest

from fedssl.arrays import ReferenceLayers
from strategies.fedavg import fedavg
from strategies.weighted_sum import WeightedSum, block_size
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
    assert block_size(clients) == size


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
    updates = (clients_of(start) * number)[:number]
    reference, size = ReferenceLayers(start), block_size(number)
    rule, other = WeightedSum(**options), WeightedSum(**options)
    rule.start(reference)
    rule.add_all(updates)
    expected = rule.finish()

    rule.start(reference)
    received = []
    for first in range(0, number, size):
        block = updates[first : first + size]
        other.start(ReferenceLayers(start))
        for one in block[:elsewhere]:
            other.add(one, reference.cosines_of(one.layers))
        received.append(in_shared_memory(other.take_block()))
        before = pickle.dumps(received[-1].layers)
        rule.add_block(received[-1])
        for one in block[elsewhere:]:
            rule.add(one, reference.cosines_of(one.layers))
        rule.end_block()
        assert pickle.dumps(received[-1].layers) == before
    first_block = pickle.dumps(received[0].layers)
    assert same(rule.finish(), expected)
    assert pickle.dumps(received[0].layers) == first_block


def test_a_block_without_clients_changes_nothing():
    start = model(0)
    reference = ReferenceLayers(start)
    results = []
    for empty_blocks in (0, 2):
        rule = WeightedSum(weighting="loss")
        rule.start(reference)
        for one in clients_of(start)[:2]:
            for _ in range(empty_blocks):
                rule.end_block()
            rule.add(one, reference.cosines_of(one.layers))
            rule.end_block()
        results.append(rule.finish())
    assert same(*results)
