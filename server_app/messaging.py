"""The exchange of messages with clients over the rounds of a run."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.availability import Workload
from server_app.exchanges.sums import SumTask

log = logging.getLogger("fedssl")

NO_REPLY = "no reply in time"
ACTIVITY_SECONDS = 1.0  # between two reports of the nodes that have not replied

# Receives the nodes with a message of this exchange without a reply, and those with one of an earlier exchange.
ActivityHook = Callable[[set[int], set[int]], None]


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


class MessageExchange:
    """Sends messages and receives replies, late ones included.

    With ``keep_contents`` the contents of messages are kept until their replies arrive. ``is_reliable`` is whether
    every reply arrives sometime, so that a client without one is not dropped. ``on_activity`` is called at start and
    end of an exchange, and within `ACTIVITY_SECONDS` of a reply.
    """

    is_reliable = False

    def __init__(
        self, grid: Grid, *, keep_contents: bool = False, on_activity: ActivityHook = lambda waiting, late: None
    ) -> None:
        self._grid, self._keep_contents, self._on_activity = grid, keep_contents, on_activity
        # Messages of earlier exchanges without a reply, by message id.
        self.pending: dict[str, Message] = {}
        # Messages of earlier exchanges and the replies to them that arrived during the newest one.
        self.late_replies: list[tuple[Message, Message]] = []
        # In virtual time, by node: why messages that ended during the newest exchange have no reply, and the virtual
        # seconds of clients that replied.
        self.lost: dict[int, str] = {}
        self.client_seconds: dict[int, float] = {}

    @property
    def virtual_time(self) -> float | None:
        """Return the clock of virtual time in seconds; None in wall-clock time."""
        return None

    def schedule(self, make_workloads: Callable[[], Mapping[int, Workload]]) -> None:
        """Set the work of the next messages by node, which takes virtual time. Here it takes wall-clock time."""

    def wait_until_online(self, clients: Collection[int], *, number: int, wanted: int) -> frozenset[int]:
        """Return the clients that are offline in virtual time; there are none in wall-clock time."""
        return frozenset()

    def nodes_in_flight(self) -> set[int]:
        """Return the nodes with a message of an earlier exchange without a reply."""
        return {message.metadata.dst_node_id for message in self.pending.values()}

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint saves of the messages in flight. Those of devices are not known to a new process."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a `snapshot`."""

    def expire(self, *, older_than: float) -> None:
        """Stop waiting for replies to messages that are more than ``older_than`` seconds old."""
        oldest = time.time() - older_than
        self.pending = {id: message for id, message in self.pending.items() if message.metadata.created_at > oldest}

    def flush(self) -> None:
        """Wait until the states of clients of this process are in their files. Other clients wait themselves."""
        if isinstance(self._grid, FlushableGrid):
            self._grid.flush()

    def sum_updates(self, make_task: Callable[[], SumTask | None]) -> None:
        """Let clients' processes sum the updates in the replies to the next messages, if they can."""
        if isinstance(self._grid, SummingGrid):
            self._grid.sum_updates(make_task())

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float,
        deadline: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[Message, Message]]:
        """Yield messages with their replies as they arrive, until there are enough, all have arrived, or time is over.

        Waiting ends ``timeout`` seconds after the last reply, after ``deadline`` seconds, and after ``min_replies``
        replies without errors, late ones included.
        """
        messages = list(messages)
        self.late_replies.clear()
        now = time.monotonic()
        last, until, pause, good = now + (deadline or math.inf), now + timeout, 0.005, 0
        # In the order of sending; the id of a message that could not be sent is empty.
        unanswered = {
            id: message for id, message in zip(self._grid.push_messages(messages), messages, strict=False) if id
        }
        report_at = 0.0
        try:
            while (unanswered or (min_replies and self.pending)) and time.monotonic() < min(until, last):
                if time.monotonic() > report_at:
                    self._on_activity({one.metadata.dst_node_id for one in unanswered.values()}, self.nodes_in_flight())
                    report_at = math.inf
                replies = list(self._grid.pull_messages([*unanswered, *self.pending]))
                if replies:
                    pause, report_at = 0.005, min(report_at, time.monotonic() + ACTIVITY_SECONDS)
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.1)
                while replies:
                    reply = replies.pop()
                    good += not reply.has_error()
                    until = time.monotonic() + timeout
                    id = reply.metadata.reply_to_message_id
                    if id in self.pending:
                        self.late_replies.append((self.pending.pop(id), reply))
                    elif id in unanswered:
                        yield unanswered.pop(id), reply
                    else:
                        log.warning("an unexpected reply of node %d is ignored", reply.metadata.src_node_id)
                    del reply  # one model each
                if min_replies is not None and good >= min_replies:
                    return
        finally:
            for id, message in unanswered.items():
                if not self._keep_contents:
                    message.content = RecordDict()
                self.pending[id] = message
            self._on_activity(set(), self.nodes_in_flight())


def receive(grid: Grid, messages: Iterable[Message], *, timeout: float) -> Iterator[Message]:
    """Return replies as they arrive, until all have arrived or none arrives for ``timeout`` seconds."""
    return replies_of(MessageExchange(grid).send_and_receive(messages, timeout=timeout))


def replies_of(pairs: Iterable[tuple[Message, Message]]) -> Iterator[Message]:
    """Return the replies of (message, reply) pairs. Unlike a generator, it holds no reply, which is a whole model."""
    return map(itemgetter(1), pairs)


def ordered_by_client(
    replies: Iterable[Message], *, sent: Sequence[Message], clients: Mapping[int, int]
) -> Iterator[tuple[int, Message | str]]:
    """Yield replies to the messages ``sent`` in order of the clients, whose ids ``clients`` has by node id.

    A failed or missing reply is a reason, in any order.
    """
    expected = sorted(clients.values())
    waiting: dict[int, Message] = {}
    client_of: dict[str, int] = {}
    for reply in replies:
        if reply.metadata.reply_to_message_id not in client_of:  # messages have an id once they are sent
            client_of = {message.metadata.message_id: clients[message.metadata.dst_node_id] for message in sent}
        # An error reply that Flower itself creates has the server's node id, so only the message identifies the client.
        client = client_of.get(reply.metadata.reply_to_message_id, -1)
        if client not in expected or client in waiting:
            log.warning("an unexpected reply of node %d is ignored", reply.metadata.src_node_id)
        elif reply.has_error():
            expected.remove(client)
            yield client, f"it failed with {reply.error.reason}"
        else:
            waiting[client] = reply
        del reply  # a streamed reply is a whole model: free it before the next one is created
        while expected and expected[0] in waiting:
            client = expected.pop(0)
            yield client, waiting.pop(client)
    for client in expected:
        yield client, waiting.pop(client) if client in waiting else NO_REPLY
