"""Rounds whose updates are summed in blocks by other processes: the same bits, reports and errors."""

import pickle

import numpy as np
import pytest

from server_app.exchanges.sums import LostSumError, SummedContent
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.eua import EUA
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.loss_weighted import LossWeighted
from strategies.m_dawa import MDAWA
from strategies.types import GLOBAL, ServerState
from strategies.weighted_sum import WeightedSum
from tests.arrays import same
from tests.server_app.small import small_federation
from tests.server_app.test_round import crash, good, make_grid, missing_array, not_finite


class PickledSum:
    """Sum of a block as another process sends it: a copy with read-only arrays."""

    def __init__(self, aggregator):
        self.aggregator, self.lost = aggregator, False

    def get(self):
        if self.lost:
            raise LostSumError("its process died")
        block = pickle.loads(pickle.dumps(self.aggregator.take_block()))
        for array in block.layers.values():
            array.flags.writeable = False
        return block


class SummingGrid:
    """Grid that sums the first ``number`` clients of each block, and whose sums of the blocks ``lost`` are lost."""

    def __init__(self, grid, *, number, lost=()):
        self.grid, self.number, self.lost = grid, number, lost
        self.task, self.sums, self.summed = None, {}, []

    def sum_updates(self, task):
        self.task = pickle.loads(pickle.dumps(task))
        self.sums = {}

    def push_messages(self, messages):
        messages = list(messages)
        position = {}
        self.allowed = set()
        for message in messages if self.task else ():
            block = self.task.block_of(message.metadata.dst_node_id)
            position[block] = position.get(block, -1) + 1
            if position[block] < self.number:
                self.allowed.add(message.metadata.dst_node_id)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids):
        replies = list(self.grid.pull_messages(message_ids))
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self.allowed or reply.has_error():
                continue
            block = self.task.block_of(node)
            if block not in self.sums:
                aggregator = pickle.loads(pickle.dumps(self.task.aggregator))
                aggregator.start(self.task.expected)
                self.sums[block] = PickledSum(aggregator)
                self.sums[block].lost = block in self.lost
            summed = self.task.add(self.sums[block].aggregator, reply)
            if not isinstance(summed, str):
                self.summed.append(node)
            reply.content = SummedContent(summed, self.sums[block])
        return replies


def play(strategy, behaviours, *, number=None, lost=(), rounds=2, observers=(), **updates):
    """Return the state and the last report after some rounds, and the numbers of summed updates."""
    local = make_grid(behaviours)
    grid = local if number is None else SummingGrid(local, number=number, lost=lost)
    context = small_federation(local, strategy, **updates)
    state, report = ServerState(), None
    for _ in range(rounds):
        state, report = run_round(WallClockExchange(grid), lambda: context, state, observers=observers)
    return state, report, 0 if number is None else len(grid.summed)


STRATEGIES = {"fedavg": FedAvg, "loss": LossWeighted, "l_dawa": LDAWA, "m_dawa": MDAWA}
STRATEGIES["l_dawa options"] = lambda: LDAWA(weighting="examples", buffers="scale", normalize=True)


@pytest.mark.parametrize("make_strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("number", [1, 3, 5])
def test_sums_of_other_processes_change_no_bit_and_no_report(make_strategy, number):
    random = np.random.default_rng(0)
    scales = random.uniform(0.5, 2, 10)

    def noisy(layers, partition):
        return {name: (array * np.float32(scales[partition])).astype(array.dtype) for name, array in layers.items()}

    behaviours = [noisy, noisy, crash, noisy, not_finite, missing_array, *[noisy] * 4]
    state, report, _ = play(make_strategy(), behaviours)
    summed_state, summed_report, num_summed = play(make_strategy(), behaviours, number=number)
    assert same(summed_state.models[GLOBAL].layers, state.models[GLOBAL].layers)
    assert summed_report == report
    assert report.dropped.keys() == {2, 4, 5}
    # Blocks of five: 0 to 4 and 5 to 9. Of their first clients 2, 4 and 5 are invalid.
    assert num_summed == 2 * {1: 1 + 0, 3: 2 + 2, 5: 3 + 4}[number]


def test_clients_of_a_lost_sum_are_dropped():
    behaviours = [good] * 10
    state, report, _ = play(FedAvg(), behaviours, number=3, lost={1}, rounds=1)
    expected, _, _ = play(FedAvg(), [crash if client in (5, 6, 7) else good for client in range(10)], rounds=1)
    assert same(state.models[GLOBAL].layers, expected.models[GLOBAL].layers)
    assert report.dropped == dict.fromkeys((5, 6, 7), "its process died")
    assert [row.client for row in report.clients] == [0, 1, 2, 3, 4, 8, 9]
    assert state.last_participation.keys() == {0, 1, 2, 3, 4, 8, 9}


class HalfServer(ServerStrategy):
    """Server that does not use the updates of odd clients."""

    def destination_models(self, state, round, client, start):
        return () if client % 2 else (start,)


@pytest.mark.parametrize(
    ("strategy", "observers", "updates"),
    [
        (EUA(), (), {}),
        (FedSSLStrategy(HalfServer(WeightedSum)), (), {}),
        (FedAvg(), (lambda client, layers: None,), {}),
        (FedAvg(), (), {"max_norm_ratio": 100.0}),
        (FedAvg(), (), {"round_deadline": 60.0}),
        (FedAvg(), (), {"over_selection": 1}),
    ],
    ids=["needs all updates", "some are not used", "observers", "norms", "deadline", "over-selection"],
)
def test_the_server_receives_each_update_that_it_needs(strategy, observers, updates):
    behaviours = [good] * 6
    _, report, num_summed = play(strategy, behaviours, number=4, rounds=1, observers=observers, **updates)
    assert num_summed == 0
    assert len(report.clients) == 6
