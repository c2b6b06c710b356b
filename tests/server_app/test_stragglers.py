"""Rounds end whatever clients do: who is asked, who is waited for, and which late updates count."""

import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Error, Message

from fedssl.errors import InputError, RunError
from fedssl.flower_internals import assign_message_id, set_task_identity
from fedssl.wire.messages import ARRAYS, ClientUpdate, TrainPlan, plan_codec
from server_app.checkpoint import latest_checkpoint, save_checkpoint
from server_app.exchanges.base import TooFewUpdatesError
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.nodes import ClientDirectory, ClientManager
from server_app.policies import apply_stale_update
from server_app.training_loop import run_round
from simulation.grid import SimulatedGrid
from strategies.fedavg import FedAvg
from strategies.types import GLOBAL, ServerState
from tests.federation import Federation as Rounds
from tests.server_app.small import LAYERS, small_federation

NEVER = 10**9


class Scripted(SimulatedGrid):
    """Clients whose replies come after so many looks at the post; ``behave(client, round)`` says when, and what comes.

    A client adds 1 + its number to every layer. What it may send instead: "error", "twice", "other" (an update to
    another plan), "nan", "cut" (bytes that are no array).
    """

    def __init__(self, num_clients, behave):
        super().__init__(num_clients=num_clients)
        self._behave, self._looks, self._due = behave, 0, []
        self.asked, self.sent = [], {}

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(assign_message_id(message))
            plan, client = TrainPlan.from_content(message.content), message.metadata.dst_node_id - 2
            self.asked.append((plan.round, client))
            delay, what = self._behave(client, plan.round)
            layers = {name: array + np.float32(1 + client) for name, array in plan.layers.items()}
            self.sent[plan.round, client] = layers
            for _ in range(2 if what == "twice" else 1):
                self._due.append((self._looks + delay, self._reply(message, plan, layers, client, what)))
        return ids

    def _reply(self, message, plan, layers, client, what):
        if what == "error":
            return Message(Error(code=3, reason="the battery is empty"), reply_to=message)
        if what == "nan":
            layers = {name: array * np.float32(np.nan) for name, array in layers.items()}
        if what == "other":
            empty = {"layers": {}, "settings": "", "metrics": (), "oldest_resumable_round": 0}
            plan = TrainPlan(round=plan.round + 1, code_fingerprint="x", **empty)
        update = ClientUpdate(layers=layers, partition_id=client, num_examples=10)
        content = update.to_content(plan, plan_codec(message.content))
        if what == "cut":
            content[ARRAYS] = ArrayRecord({name: FlowerArray(array) for name, array in layers.items()})
            for array in content[ARRAYS].values():
                array.data = array.data[:-3]
        return Message(content, reply_to=message)

    def deliver(self):
        """Let everything come at the next look."""
        self._due = [(0, reply) for _, reply in self._due]

    def pull_messages(self, message_ids):
        self._looks += 1
        wanted = set(message_ids)
        found = [
            pair for pair in self._due if pair[0] <= self._looks and pair[1].metadata.reply_to_message_id in wanted
        ]
        self._due = [pair for pair in self._due if all(pair is not one for one in found)]
        return [reply for _, reply in found]


def federation(grid, strategy=None, *, timeout=2, **options):
    set_task_identity()
    return small_federation(grid, strategy or FedAvg(weighting="uniform"), timeout=timeout, **options)


class Run:
    """Rounds one after the other."""

    def __init__(self, num_clients, behave, **options):
        self.grid = Scripted(num_clients, behave)
        self.federation = federation(self.grid, **options)
        self.exchange = WallClockExchange(self.grid, keep_contents=self.federation.settings.aggregation.buffered)
        self.state, self.reports = ServerState(), []

    def round(self):
        self.state, report = run_round(self.exchange, lambda: self.federation, self.state)
        self.reports.append(report)
        return report

    @property
    def weight(self):
        return self.state.models[GLOBAL].layers["encoder.weight"]


def prompt(client, round):
    return 1, "good"


def clients(report):
    return [row.client for row in report.clients]


def test_the_first_to_reply_count_if_more_are_asked():
    """5 of 6 are asked, 3 are needed: those that reply after 1, 2 and 3 looks; client 0 never replies."""
    run = Run(
        6, lambda client, round: (NEVER if client == 0 else 7 - client, "good"), clients_per_round=3, over_selection=3
    )
    report = run.round()
    assert clients(report) == [3, 4, 5]
    assert report.dropped == dict.fromkeys([0, 1, 2], "no reply in time")
    assert np.allclose(run.weight, LAYERS["encoder.weight"] + np.mean([4, 5, 6]))


def test_no_more_count_if_several_reply_together():
    run = Run(6, prompt, clients_per_round=3, over_selection=3)
    report = run.round()
    assert len(report.clients) == 3
    assert sorted([*clients(report), *report.dropped]) == list(range(6))


@pytest.mark.parametrize("unusable", [{0}, {0, 1, 2}])
def test_an_unusable_reply_ends_no_run_with_buffering(unusable):
    """A round ends at 3 replies, of which one or all have NaN; client 3, which never replies, is awaited."""
    behaviors = dict.fromkeys(unusable, (1, "nan")) | {3: (NEVER, "good")}
    run = Run(4, lambda client, round: behaviors.get(client, (1, "good")), buffered=True, min_updates=3)
    if len(unusable) == 1:
        assert (clients(run.round()), list(run.reports[0].dropped)) == ([1, 2], [0])
        return
    with pytest.raises(TooFewUpdatesError, match="none of 4 clients sent a usable update"):
        run.round()


def test_an_outlier_ends_no_run_with_buffering(tmp_path):
    """A round ends at 4 replies, of which those above 1.02 of the median norm are not used."""
    overrides = ["num_clients=8", "dataset.limit=160", "aggregation.buffered=true", "aggregation.min_updates=4"]
    rounds = Rounds(tmp_path, *overrides, "aggregation.max_norm_ratio=1.02")
    rounds.run(2)
    assert rounds.report.dropped
    assert len(rounds.report.clients) + len(rounds.report.dropped) == 4


def test_unused_late_replies_neither_end_a_round_nor_delay_it():
    """The first 2 of 3 replies count. The late reply of client 0 arrives before round 2, that of client 2 never."""
    slow = {(0, 1): (NEVER, "good"), (2, 2): (NEVER, "good"), (0, 3): (1, "error"), (1, 3): (1, "error")}
    replies = {"timeout": 60, "clients_per_round": 2, "over_selection": 1}
    run = Run(3, lambda client, round: slow.get((client, round), (2 + client, "good")), **replies)
    assert clients(run.round()) == [1, 2]
    run.grid.deliver()
    report = run.round()
    assert (clients(report), report.late) == ([0, 1], [0])
    start = time.monotonic()
    assert clients(run.round()) == [2]
    assert time.monotonic() - start < 60


def test_a_late_reply_is_counted_and_not_used():
    run = Run(3, lambda client, round: (NEVER if (client, round) == (1, 1) else 1, "good"), round_deadline=1.0)
    assert clients(run.round()) == [0, 2]
    run.grid.deliver()
    before = run.weight.copy()
    report = run.round()
    assert report.late == [1]
    assert clients(report) == [0, 1, 2]
    assert np.allclose(run.weight, before + np.mean([1, 2, 3]))
    assert not run.exchange.pending


def test_a_round_with_too_few_updates_is_repeated():
    """Of 8 clients 4 are asked and 3 needed. In the first attempt all fail, in the second one of them, then none."""
    attempts = []

    def behave(client, round):
        attempt = len(attempts) // 4
        attempts.append(client)
        return 1, "error" if attempt == 0 or (attempt == 1 and len(attempts) in (5, 6)) else "good"

    run = Run(8, behave, clients_per_round=4, min_updates=3, max_retries=2)
    report = run.round()
    assert len(report.clients) == 4
    assert report.round == run.state.round == 1
    first, second, third = attempts[:4], attempts[4:8], attempts[8:]
    assert first != second or second != third
    assert np.allclose(run.weight, LAYERS["encoder.weight"] + np.mean([1 + client for client in third]))


def test_the_run_stops_when_no_attempt_has_enough():
    run = Run(3, lambda client, round: (1, "good" if client == 1 else "error"), min_updates=2, max_retries=1)
    message = "round 1: 1 of 3 clients .* aggregation.min_updates=2 .*battery is empty"
    with pytest.raises(TooFewUpdatesError, match=message):
        run.round()
    assert run.grid.asked == [(1, 0), (1, 1), (1, 2)] * 2
    assert run.state == ServerState()


class Hall(SimulatedGrid):
    """Nodes that come and go."""

    def __init__(self, there):
        super().__init__(num_clients=0)
        self.there = there

    def get_node_ids(self):
        return self.there

    def push_messages(self, messages):
        return []

    def pull_messages(self, message_ids):
        return []


def test_only_present_clients_are_asked():
    grid = Hall([2, 3, 4])
    directory = ClientDirectory(nodes={0: 2, 1: 3, 2: 4}, client_ids={"a": 0, "b": 1, "c": 2})
    client_manager = ClientManager(grid, directory, timeout=0.3)
    assert client_manager.wait_for(1).nodes == {0: 2, 1: 3, 2: 4}
    grid.there = [2, 4]
    assert client_manager.wait_for(2).nodes == {0: 2, 2: 4}
    with pytest.raises(RunError, match=r"2 devices are available and 3 are needed \(aggregation.min_updates\)"):
        client_manager.wait_for(3)
    grid.there = [4, 3]
    assert client_manager.wait_for(2).nodes == {1: 3, 2: 4}


def test_a_late_update_counts_the_less_the_older_it_is():
    """By hand: from 1 the client went to 4 while the model went to 10: 10 + (4 - 1) / sqrt(1 + age)."""
    one = {"w": np.array([4.0], np.float32), "n": np.array([7])}
    begun, now = {"w": np.array([1.0], np.float32), "n": np.array([0])}, {"w": np.array([10.0], np.float32), "n": [9]}
    for age, expected in ((0, 13.0), (3, 11.5), (8, 11.0)):
        found = apply_stale_update(one, start=begun, current=now, staleness=age)
        assert found["w"] == pytest.approx(expected)
        assert found["w"].dtype == np.float32
        assert found["n"] == 7


def test_buffered_rounds_take_what_is_there_and_late_updates_later():
    """Client 2 takes as long as three rounds of two updates; then its way counts with 1 / sqrt(1 + 2) of its length."""
    run = Run(3, lambda client, round: (6 if client == 2 else 1, "good"), buffered=True, min_updates=2)
    weight, ages = LAYERS["encoder.weight"].astype(np.float64), Counter()
    for _ in range(12):
        report = run.round()
        ways = [(1 + row.client) / math.sqrt(1 + row.staleness) for row in report.clients]
        weight = weight + np.mean(ways)
        np.testing.assert_allclose(run.weight, weight, rtol=1e-5)
        ages.update((row.client, row.staleness) for row in report.clients)
        for row in report.clients:  # a late client has what it stored in the round that it trained in
            assert run.state.last_participation[row.client] == (report.round - row.staleness, GLOBAL)
        assert not report.dropped  # a late client is at work
    assert {client for client, _ in ages} == {0, 1, 2}
    assert all(age == 0 for client, age in ages if client != 2)
    late = [age for client, age in ages if client == 2]
    assert late
    assert min(late) >= 1
    assert Counter(client for _, client in run.grid.asked)[2] <= 12 / 2  # it is not asked while it is at work


def test_a_silent_client_is_asked_again_after_the_timeout():
    run = Run(2, lambda client, round: (NEVER if round == 1 else 1, "good"), buffered=True, min_updates=1, timeout=0.1)
    with pytest.raises(TooFewUpdatesError, match="client 0, 1: no reply in time"):
        run.round()
    time.sleep(0.15)
    run.state = ServerState(round=1)
    assert clients(run.round()) == [0, 1]


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(3, 10))])
def test_the_model_is_the_sum_over_used_updates(tmp_path, seed, buffered):
    """6 rounds of 5 clients that are late, silent, wrong, doubled or dead, with a server that dies now and then."""
    random = np.random.default_rng(seed)

    def behave(client, round):
        delay = int(random.choice([1, 2, 4, 9, NEVER], p=[0.5, 0.2, 0.1, 0.1, 0.1]))
        return delay, str(random.choice(["good", "error", "twice", "other", "nan", "cut"], p=[0.5, *5 * [0.1]]))

    options = {"buffered": buffered, "min_updates": 2, "max_retries": 100, "round_deadline": 0.03, "timeout": 0.2}
    run = Run(5, behave, clients_per_round=5 if buffered else 3, over_selection=0 if buffered else 2, **options)
    weight = LAYERS["encoder.weight"].astype(np.float64)
    while run.state.round < 6:
        asked = len(run.grid.asked)
        report = run.round()
        used = [(row.client, row.round - row.staleness, row.staleness) for row in report.clients]
        ways = [(1 + client) / math.sqrt(1 + age) for client, _, age in used]
        weight = weight + np.mean(ways)
        np.testing.assert_allclose(run.weight, weight, rtol=1e-5)
        assert len(used) == len({client for client, _, _ in used}) >= 1
        assert len(used) + (len(report.rejected) if buffered else 0) >= 2
        assert report.dropped.keys().isdisjoint(clients(report))
        now = {client for round, client in run.grid.asked[asked:] if round == report.round}
        assert now >= {client for client, round, age in used if age == 0}
        save_checkpoint(tmp_path, run.state, keep=2)
        if random.random() < 0.3:  # the server dies; what was owed to it is lost
            run.exchange = WallClockExchange(run.grid, keep_contents=buffered)
            run.state = latest_checkpoint(tmp_path)
            assert run.state.round == report.round


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["aggregation.min_updates=4"], "aggregation.min_updates=4 but clients_per_round=3"),
        (["aggregation.over_selection=2"], "over_selection=2 but clients_per_round=3 leaves 1 of num_clients=4"),
    ],
)
def test_what_cannot_come_is_not_waited_for(tmp_path, overrides, reason):
    with pytest.raises(InputError, match=reason):
        Rounds(tmp_path, "num_clients=4", "clients_per_round=3", "dataset.limit=40", *overrides)


def test_fewer_than_are_to_train_are_all_asked():
    run = Run(4, prompt, clients_per_round=3)
    directory = replace(run.federation.directory, nodes={1: 3, 3: 5})
    run.federation = replace(run.federation, directory=directory)
    assert clients(run.round()) == [1, 3]


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_corrected_clock_changes_no_late_reply(hours, monkeypatch):
    """Client 1 replies late; it is awaited for the timeout, whatever the clock shows meanwhile."""
    run = Run(2, lambda client, round: (NEVER if client else 1, "good"), clients_per_round=2, round_deadline=0.2)
    run.round()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
    assert len(run.exchange.in_flight(timeout=60)) == 1
    assert not run.exchange.in_flight(timeout=0)


def test_a_dead_device_is_reported_once_its_time_is_over():
    """Client 3 is awaited until the timeout, and then asked again."""
    run = Run(4, lambda client, round: (NEVER if client == 3 else 1, "good"), buffered=True, min_updates=3, timeout=0.2)
    assert not run.round().dropped
    for _ in range(2):
        time.sleep(0.25)
        report = run.round()
        assert (clients(report), report.dropped) == ([0, 1, 2], {3: "no reply in time"})
