"""Replies are pulled often at first, and less often in a long wait."""

import pytest
from flwr.app import Message, RecordDict

from server_app import messaging
from server_app.messaging import ClientMessenger
from tests.wire import message_of


class SlowGrid:
    """A grid with a clock, whose replies arrive at given seconds after the start."""

    def __init__(self, arrivals):
        self.now, self.pulls, self._arrivals, self._sent = 0.0, [], list(arrivals), []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds

    def push_messages(self, messages):
        self._sent = list(messages)
        return [message.metadata.message_id for message in self._sent]

    def pull_messages(self, ids):
        self.now += 0.001  # a call takes time
        self.pulls.append(self.now)
        sent = zip(self._arrivals, self._sent, strict=True)
        due = [message for at, message in sent if at <= self.now and message.metadata.message_id in ids]
        return [Message(RecordDict(), reply_to=message) for message in due]


@pytest.fixture
def exchange(monkeypatch):
    """Run an exchange, and return the grid and the times at which replies were yielded."""

    def run(arrivals, **options):
        grid = SlowGrid(arrivals)
        monkeypatch.setattr(messaging, "time", grid)
        messages = [message_of(RecordDict()) for _ in arrivals]
        return grid, [grid.now for _ in ClientMessenger(grid).send_and_receive(messages, **options)]

    return run


@pytest.mark.parametrize("seconds", [0.01, 1, 20, 60, 3600])
def test_a_reply_is_seen_within_a_twentieth_of_its_wait(exchange, seconds):
    _, (seen,) = exchange([seconds], timeout=7200)
    assert seconds <= seen <= seconds + min(3, max(0.11, seconds / 20)) + 0.01


def test_a_long_wait_takes_few_pulls(exchange):
    """An hour: 10 a second for 2 s, then 20 ln(60 s / 2 s) = 68, then one in 3 s."""
    grid, _ = exchange([3600], timeout=7200)
    assert len(grid.pulls) == pytest.approx(20 + 68 + 3540 / 3, rel=0.05)


def test_pulls_are_frequent_again_after_a_reply(exchange):
    _, seen = exchange([1000, 1003.5], timeout=7200)
    assert seen[1] - 1003.5 <= 0.11


@pytest.mark.parametrize("options", [{"timeout": 500}, {"timeout": 7200, "deadline": 500}])
def test_the_wait_ends_in_time(exchange, options):
    grid, seen = exchange([3600], **options)
    assert seen == []
    assert grid.now == pytest.approx(500, abs=0.01)
