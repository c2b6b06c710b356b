"""The exchange in virtual time: who runs in a round, who is lost, and what the clock shows."""

import math

import numpy as np
import pytest
from flwr.app import Error, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedssl.availability import ALWAYS_ONLINE, OnlineTimes
from fedssl.errors import RunError
from fedssl.flower_internals import assign_message_id, set_task_identity
from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.checkpoint import _check_in_flight
from server_app.exchanges.base import TooFewUpdatesError
from server_app.exchanges.virtual_time import DROPPED_OUT, OFFLINE, VirtualTime, VirtualTimeExchange
from server_app.training_loop import run_round
from simulation.grid import SimulatedGrid
from strategies.fedavg import FedAvg
from strategies.types import GLOBAL, ServerState
from tests.server_app.small import LAYERS, small_federation

NO_REPLY = "no reply in time"


class Instant(SimulatedGrid):
    """Clients that reply at once; a client adds 1 + its number to every layer, or fails.

    ``order`` sorts the replies of an exchange, as the engines do in their ways.
    """

    def __init__(self, num_clients, *, fails=(), order=lambda replies: replies):
        super().__init__(num_clients=num_clients)
        self._fails, self._order, self._replies, self.ran = fails, order, [], []

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(assign_message_id(message))
            plan, client = TrainPlan.from_content(message.content), message.metadata.dst_node_id - 2
            self.ran.append((plan.round, client))
            if client in self._fails:
                self._replies.append(Message(Error(code=3, reason="the battery is empty"), reply_to=message))
                continue
            layers = {name: array + np.float32(1 + client) for name, array in plan.layers.items()}
            content = ClientUpdate(layers=layers, partition_id=client, num_examples=10).to_content(plan)
            self._replies.append(Message(content, reply_to=message))
        return ids

    def pull_messages(self, message_ids):
        replies, self._replies = self._order(self._replies), []
        return replies


class Online:
    """Availability by hand: ``times`` by client, always without an entry; ``dropout`` has (client, round, attempt)."""

    def __init__(self, times=None, dropout=()):
        self._times, self._dropout = times or {}, dropout

    def online_times(self, client):
        return self._times.get(client, ALWAYS_ONLINE)

    def drops_out(self, client, round, attempt):
        return (client, round, attempt) in self._dropout


class Run:
    """Rounds one after the other. Client k takes ``times[k]`` seconds."""

    def __init__(self, times, *, availability=None, grid=None, **options):
        set_task_identity()
        self.grid = grid or Instant(len(times))
        self.federation = small_federation(self.grid, FedAvg(weighting="uniform"), timeout=2, **options)
        self.model = VirtualTime(
            availability=availability or Online(),
            client_time=lambda work: times[work.client],
            num_clients=len(times),
            is_in_seconds=True,
            keeps_late=self.federation.settings.aggregation.buffered,
        )
        self.exchange = VirtualTimeExchange(self.grid, self.model)
        self.state = ServerState()

    def round(self):
        self.state, report = run_round(self.exchange, lambda: self.federation, self.state)
        return report

    @property
    def weight(self):
        return self.state.models[GLOBAL].layers["encoder.weight"]


def clients(report):
    return [row.client for row in report.clients]


def test_a_round_takes_as_long_as_its_slowest_client():
    run = Run([1.0, 4.0, 2.5])
    report = run.round()
    assert [(row.client, row.virtual_seconds) for row in report.clients] == [(0, 1.0), (1, 4.0), (2, 2.5)]
    assert (report.measured["virtual_seconds"], report.measured["virtual_time"]) == (4.0, 4.0)
    report = run.round()
    assert (report.measured["virtual_seconds"], report.measured["virtual_time"]) == (4.0, 8.0)


def test_clients_that_arrive_after_the_deadline_do_not_run():
    run = Run([1.0, 4.0, 2.5, 2.0], round_deadline=2.0)
    report = run.round()
    assert clients(report) == [0, 3]  # at the deadline is in time
    assert report.dropped == {1: NO_REPLY, 2: NO_REPLY}
    assert run.grid.ran == [(1, 0), (1, 3)]
    assert report.measured["virtual_time"] == 2.0
    np.testing.assert_allclose(run.weight, LAYERS["encoder.weight"] + np.mean([1, 4]))


def test_the_next_arriving_client_replaces_one_that_fails():
    """Clients 0 and 1 arrive first. Client 0 fails, so client 2 trains as well; client 3 does not."""
    grid = Instant(4, fails={0})
    run = Run([1.0, 2.0, 3.0, 4.0], grid=grid, clients_per_round=2, over_selection=2)
    report = run.round()
    assert (clients(report), report.dropped.keys(), report.measured["virtual_time"]) == ([1, 2], {0, 3}, 3.0)
    assert grid.ran == [(1, 0), (1, 1), (1, 2)]
    np.testing.assert_allclose(run.weight, LAYERS["encoder.weight"] + np.mean([2, 3]))


def test_a_client_that_goes_offline_is_lost_then():
    """Client 1 takes 4 s and goes offline after 3 s; the round ends then, because client 0 has arrived."""
    run = Run([1.0, 4.0], availability=Online({1: OnlineTimes(((0.0, 3.0),))}))
    report = run.round()
    assert (clients(report), report.dropped, report.measured["virtual_time"]) == ([0], {1: OFFLINE}, 3.0)
    assert run.grid.ran == [(1, 0)]
    assert run.state.last_participation.keys() == {0}
    report = run.round()  # client 1 is offline now
    assert (clients(report), report.dropped, report.measured["virtual_seconds"]) == ([0], {}, 1.0)


def test_a_client_that_drops_out_takes_its_time():
    run = Run([1.0, 4.0], availability=Online(dropout={(1, 1, 0)}))
    report = run.round()
    assert (clients(report), report.dropped, report.measured["virtual_time"]) == ([0], {1: DROPPED_OUT}, 4.0)
    assert clients(run.round()) == [0, 1]


def test_only_clients_that_are_online_are_sampled():
    times = {0: OnlineTimes(((0.0, 2.0),), 10.0), 1: OnlineTimes(((5.0, 9.0),), 10.0)}
    run = Run([1.0, 1.0], availability=Online(times))
    assert (clients(run.round()), run.exchange._clock) == ([0], 1.0)
    assert (clients(run.round()), run.exchange._clock) == ([0], 2.0)
    report = run.round()  # waits from 2 to 5
    assert (clients(report), report.measured["virtual_seconds"], report.measured["virtual_time"]) == ([1], 4.0, 6.0)


def test_a_round_waits_until_enough_are_online_together():
    times = {0: OnlineTimes(((0.0, 2.0),), 10.0), 1: OnlineTimes(((1.5, 4.0),), 10.0)}
    run = Run([0.25, 0.25], availability=Online(times), min_updates=2)
    report = run.round()
    assert (clients(report), report.measured["virtual_time"]) == ([0, 1], 1.75)
    report = run.round()
    assert (clients(report), report.measured["virtual_time"]) == ([0, 1], 2.0)
    report = run.round()
    assert (clients(report), report.measured["virtual_time"]) == ([0, 1], 11.75)


def test_too_few_clients_for_ever_end_the_run():
    times = {0: OnlineTimes(((0.0, 2.0),), 10.0), 1: OnlineTimes(((3.0, 4.0),), 10.0)}
    run = Run([1.0, 1.0], availability=Online(times), min_updates=2)
    message = "after virtual time 0 s, 2 of 2 clients are never online together, .*lower it, or"
    with pytest.raises(RunError, match=message):
        run.round()


def test_buffered_rounds_use_late_updates_and_drop_lost_ones():
    """By hand, with rounds of 2 updates: clients 0 and 1 take 1 s, client 2 takes 2.5 s, and client 3 is lost at 1.5 s.

    Round 1 ends at 1 s with 0 and 1. Round 2 has 0 and 1 again, at 2 s; on the way client 3 is lost. Round 3, of
    clients 0, 1 and 3 (which is offline): client 2 arrives at 2.5 s with the age of 2 rounds, then client 0 at 3 s.
    """
    times = {3: OnlineTimes(((0.0, 1.5),))}
    run = Run([1.0, 1.0, 2.5, 9.0], availability=Online(times), buffered=True, min_updates=2)
    seen = []
    for _ in range(3):
        report = run.round()
        rows = [(row.client, row.staleness, row.virtual_seconds) for row in report.clients]
        seen.append((rows, report.dropped, report.measured["virtual_time"]))
    pair = [(0, 0, 1.0), (1, 0, 1.0)]
    assert seen == [(pair, {}, 1.0), (pair, {3: OFFLINE}, 2.0), ([(0, 0, 1.0), (2, 2, 2.5)], {}, 3.0)]
    delta = np.mean([1, 2]), np.mean([1, 2]), np.mean([1, 3 / math.sqrt(3)])
    np.testing.assert_allclose(run.weight, LAYERS["encoder.weight"] + sum(delta), rtol=1e-6)


def test_a_deadline_of_buffered_rounds_keeps_clients_in_flight():
    run = Run([1.0, 5.0], buffered=True, min_updates=1, round_deadline=2.0)
    assert [clients(run.round()) for _ in range(3)] == [[0], [0], [0]]
    assert run.exchange.in_flight(timeout=2) == {3}
    run = Run([3.0, 5.0], buffered=True, min_updates=1, round_deadline=2.0, max_retries=1)
    report = run.round()  # nobody has arrived after 2 s; in the second attempt client 0 has
    assert (report.measured["virtual_time"], [(row.client, row.staleness) for row in report.clients]) == (3.0, [(0, 0)])


@pytest.mark.parametrize("order", [lambda replies: replies[::-1], lambda replies: sorted(replies, key=id)])
def test_the_order_of_replies_changes_nothing(order):
    options = {"buffered": True, "min_updates": 2, "clients_per_round": 4}
    times = list(np.random.default_rng(0).lognormal(size=6))
    runs = [Run(times, **options), Run(times, grid=Instant(6, order=order), **options)]
    for _ in range(5):
        reports = [run.round() for run in runs]
        assert reports[0].clients == reports[1].clients
        assert np.array_equal(runs[0].weight, runs[1].weight)


def test_a_snapshot_restores_clock_and_messages():
    times = [1.0, 2.0, 7.0]
    availability = Online(dropout={(2, 1, 0)})
    runs = [Run(times, availability=availability, buffered=True, min_updates=1) for _ in range(2)]
    for _ in range(2):
        runs[0].round()
    saved = runs[0].exchange.snapshot()
    _check_in_flight(saved)
    moved = "x" * len(runs[1].federation.context.client_config)  # settings with another folder
    runs[1].exchange.restore(saved, settings=moved)
    assert {entry.message.content["config"]["settings"] for entry in runs[1].exchange._held.values()} == {moved}
    runs[1].state = runs[0].state
    for _ in range(9):
        reports = [run.round() for run in runs]
        assert reports[0] == reports[1]
        assert np.array_equal(runs[0].weight, runs[1].weight)
    assert runs[0].exchange._clock > 7


def expected_round(flying, clock, *, deadline, needed, keeps):
    """Return clients in order of arrival, the lost ones, the clock and who is in flight, event by event."""
    arrived, lost, limit = [], [], clock + deadline
    while flying and len(arrived) < needed:
        client = min(flying, key=lambda one: (flying[one][0], one))
        end, is_lost = flying[client]
        if end > limit:
            clock = limit
            break
        clock = max(clock, end)
        (lost if is_lost else arrived).append(client)
        del flying[client]
    return arrived, lost, clock, flying if keeps else {}


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_rounds_equal_a_simulation_event_by_event(seed, buffered, has_deadline, over_selects):
    random = np.random.default_rng(seed)
    num, needed = 6, 2
    times = [float(number) for number in random.integers(1, 9, num)]
    starts = random.uniform(0, 20, num)
    windows = {client: OnlineTimes(((start, start + 12.0),), 20.0) for client, start in enumerate(starts) if client % 2}
    dropout = {(client, round, 0) for client in range(num) for round in range(1, 7) if random.random() < 0.2}
    over = 2 if over_selects and not buffered else 0
    deadline = 5.0 if has_deadline else math.inf
    run = Run(
        times,
        availability=Online(windows, dropout),
        clients_per_round=num - over,
        buffered=buffered,
        min_updates=needed if buffered else 1,
        over_selection=over,
        round_deadline=deadline if has_deadline else None,
    )
    flying, clock = {}, 0.0
    for round in range(1, 7):
        online = {client for client in range(num) if client not in windows}
        online |= {client for client, one in windows.items() if one.online_until(clock) is not None}
        for client in online - flying.keys():
            end, until = clock + times[client], windows.get(client, ALWAYS_ONLINE).online_until(clock)
            flying[client] = (until, True) if until < end else (end, (client, round, 0) in dropout)
        limit = needed if buffered else num - over if over else math.inf
        arrived, lost, clock, flying = expected_round(flying, clock, deadline=deadline, needed=limit, keeps=buffered)
        if len(arrived) < (needed if buffered else 1):
            with pytest.raises(TooFewUpdatesError):
                run.round()
            return
        report = run.round()
        assert sorted(clients(report)) == sorted(arrived)
        assert {client for client, reason in report.dropped.items() if reason != NO_REPLY} == set(lost)
        assert report.measured["virtual_time"] == pytest.approx(clock)
        assert {node - 2 for node in run.exchange.in_flight(timeout=2)} == set(flying)


def test_a_client_that_arrives_when_going_offline_is_in_time():
    run = Run([1.0, 3.0], availability=Online({1: OnlineTimes(((0.0, 3.0),))}))
    assert clients(run.round()) == [0, 1]


def test_attempts_have_their_own_draws_and_time():
    """In the first attempt at round 1 both drop out after 4 s; the second one takes 4 s, too."""
    run = Run([1.0, 4.0], availability=Online(dropout={(0, 1, 0), (1, 1, 0)}), max_retries=1)
    report = run.round()
    assert clients(report) == [0, 1]
    assert (report.measured["virtual_seconds"], report.measured["virtual_time"]) == (8.0, 8.0)


def test_a_round_ends_before_its_deadline_if_all_have_arrived():
    assert Run([1.0, 4.0], round_deadline=9.0).round().measured["virtual_time"] == 4.0
