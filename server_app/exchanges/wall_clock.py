"""The exchange with devices, and with simulated clients without virtual time."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

from fedssl.wire.messages import NO_REPLY
from server_app.exchanges.base import Exchange, Late, Lost, Received, SentRound, in_client_order
from server_app.exchanges.sums import SumTask
from server_app.messaging import ActivityHook, ClientMessenger, no_activity, replies_of


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


class WallClockExchange(ClientMessenger, Exchange):
    """Exchange in wall-clock time."""

    def __init__(self, grid: Grid, *, keep_contents: bool = False, on_activity: ActivityHook = no_activity) -> None:
        super().__init__(grid, keep_contents=keep_contents, on_activity=on_activity)
        self._silent = set[int]()  # nodes that have not replied in time to an earlier message

    def in_flight(self, *, timeout: float) -> set[int]:
        self._silent |= self.expire(older_than=timeout)
        return self.pending_nodes()

    def replies(self, sent: SentRound) -> Iterator[Received]:
        if isinstance(self._grid, SummingGrid):
            # Which clients of a block reply in time is not known before.
            self._grid.sum_updates(None if sent.policy.may_end_early else sent.sum_task())
        policy = sent.policy
        pairs = self.send_and_receive(
            sent.messages,
            timeout=sent.timeout,
            deadline=policy.deadline,
            min_replies=policy.min_replies,
            uses_late=policy.uses_late,
        )
        replies = replies_of(pairs)
        if policy.min_replies is not None and not policy.uses_late:
            replies = first_replies(replies, policy.min_replies)
        nodes = {client: node for node, client in sent.nodes.items()}

        def is_lost(client: int) -> bool:  # with enough replies the others are used later, if they come in time
            is_awaited = policy.uses_late and self.has_enough and nodes[client] in self.pending_nodes()
            return not is_awaited or nodes[client] in self._silent

        yield from in_client_order(replies, sent, is_lost=is_lost)
        yield from self.late()
        for node in self._silent.difference(sent.nodes) & sent.clients.keys():
            yield Lost(sent.clients[node], NO_REPLY)
        self._silent &= self.pending_nodes()

    def late(self) -> list[Late]:
        """Return the late replies that arrived during the newest exchange, the stalest first."""
        return sorted((Late(*pair) for pair in self.late_replies), key=Late.order)

    def flush(self) -> None:
        if isinstance(self._grid, FlushableGrid):
            self._grid.flush()


def first_replies(replies: Iterable[Message], number: int) -> Iterator[Message]:
    """Return replies until ``number`` are without error. Others, which arrive with the last one, are not used."""

    def is_used(reply: Message) -> bool:
        nonlocal number
        used = number > 0
        number -= not reply.has_error()
        return used

    return filter(is_used, replies)  # unlike a generator, it holds no reply, which is a whole model
