"""The exchange with devices, and with simulated clients without virtual time."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from server_app.exchanges.base import Late, Received, SentRound, in_client_order
from server_app.exchanges.sums import SumTask
from server_app.messaging import ClientMessenger, replies_of
from server_app.updates import RoundResult


@runtime_checkable
class FlushableGrid(Protocol):
    """Grid whose clients write their states in the background of this process."""

    def flush(self) -> None: ...


@runtime_checkable
class SummingGrid(Protocol):
    """Grid whose clients' processes can sum their updates."""

    def sum_updates(self, task: SumTask | None) -> None:
        """Sum the updates in the replies to the next messages, or stop doing so."""
        ...


class WallClockExchange(ClientMessenger):
    """Exchange in wall-clock time; implements `server_app.exchanges.base.Exchange`."""

    def in_flight(self, *, timeout: float) -> set[int]:
        self.expire(older_than=timeout)
        return self.pending_nodes()

    def offline(self, clients: Callable[[], Collection[int]], *, needed: int, wanted: int) -> frozenset[int]:
        return frozenset()

    def replies(self, sent: SentRound) -> Iterator[Received]:
        if isinstance(self._grid, SummingGrid):
            # Which clients of a block reply in time is not known before.
            self._grid.sum_updates(None if sent.policy.may_end_early else sent.sum_task())
        policy = sent.policy
        pairs = self.send_and_receive(
            sent.messages, timeout=sent.timeout, deadline=policy.deadline, min_replies=policy.min_replies
        )
        yield from in_client_order(replies_of(pairs), sent)
        yield from self.late()

    def late(self) -> list[Late]:
        """Return the late replies that arrived during the newest exchange, the stalest first."""
        return sorted((Late(*pair) for pair in self.late_replies), key=Late.order)

    def record(self, result: RoundResult) -> RoundResult:
        return result

    def flush(self) -> None:
        """Wait until the states of clients of this process are in their files. Other clients wait themselves."""
        if isinstance(self._grid, FlushableGrid):
            self._grid.flush()

    def snapshot(self) -> Mapping[str, Any]:
        """Return nothing: messages to devices are not known to a new process."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        pass
