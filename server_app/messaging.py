"""Messages to clients and their replies, late ones included."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.logs import log

ACTIVITY_SECONDS = 1.0  # between two reports of the nodes that have not replied
MAX_PAUSE = 3.0  # seconds between two pulls, as Flower's grid; less within a minute of a reply

# Receives the nodes with a message of this exchange without a reply, and those with one of an earlier exchange.
ActivityHook = Callable[[set[int], set[int]], None]


def no_activity(waiting: set[int], late: set[int]) -> None:
    """Report nothing."""


class ClientMessenger:
    """Sends messages and receives replies, late ones included.

    With ``keep_contents`` the contents of messages are kept until their replies arrive. ``on_activity`` is called at
    start and end of an exchange, and within `ACTIVITY_SECONDS` of a reply.
    """

    def __init__(self, grid: Grid, *, keep_contents: bool = False, on_activity: ActivityHook = no_activity) -> None:
        self._grid, self._keep_contents, self._on_activity = grid, keep_contents, on_activity
        # Messages of earlier exchanges without a reply, by message id.
        self.pending: dict[str, Message] = {}
        self._sent_at: dict[str, float] = {}  # monotonic time, since the clock may be corrected meanwhile
        # Messages of earlier exchanges and the replies to them that arrived during the newest one.
        self.late_replies: list[tuple[Message, Message]] = []
        self.has_enough = False  # whether the newest exchange ended because there were enough replies

    def pending_nodes(self) -> set[int]:
        """Return the nodes with a message of an earlier exchange without a reply."""
        return {message.metadata.dst_node_id for message in self.pending.values()}

    def expire(self, *, older_than: float) -> set[int]:
        """Stop waiting for replies to messages more than ``older_than`` seconds old, and return their nodes."""
        oldest, before = time.monotonic() - older_than, self.pending_nodes()
        self.pending = {id: message for id, message in self.pending.items() if self._sent_at[id] > oldest}
        self._sent_at = {id: self._sent_at[id] for id in self.pending}
        return before - self.pending_nodes()

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float,
        deadline: float | None = None,
        min_replies: int | None = None,
        uses_late: bool = False,
    ) -> Iterator[tuple[Message, Message]]:
        """Yield messages with their replies as they arrive, until there are enough, all have arrived, or time is over.

        Waiting ends ``timeout`` seconds after the last reply, after ``deadline`` seconds, and after ``min_replies``
        replies without errors, with those of earlier exchanges if it ``uses_late`` ones.
        """
        messages = list(messages)
        self.late_replies.clear()
        sent_at = replied_at = time.monotonic()
        last, pause, good = sent_at + (deadline or math.inf), 0.005, 0
        self.has_enough = False
        # In the order of sending; the id of a message that could not be sent is empty.
        unanswered = {
            id: message for id, message in zip(self._grid.push_messages(messages), messages, strict=False) if id
        }
        report_at = 0.0
        try:
            while (unanswered or (uses_late and self.pending)) and time.monotonic() < min(replied_at + timeout, last):
                if time.monotonic() > report_at:
                    self._on_activity({one.metadata.dst_node_id for one in unanswered.values()}, self.pending_nodes())
                    report_at = math.inf
                replies = list(self._grid.pull_messages([*unanswered, *self.pending]))
                if replies:
                    pause, report_at = 0.005, min(report_at, time.monotonic() + ACTIVITY_SECONDS)
                else:
                    now = time.monotonic()
                    time.sleep(max(0.0, min(pause, replied_at + timeout - now, last - now)))
                    pause = min(2 * pause, max(0.1, (now - replied_at) / 20), MAX_PAUSE)
                while replies:
                    reply = replies.pop()
                    replied_at = time.monotonic()
                    id = reply.metadata.reply_to_message_id
                    good += not reply.has_error() and (uses_late or id in unanswered)
                    if id in self.pending:
                        self.late_replies.append((self.pending.pop(id), reply))
                    elif id in unanswered:
                        yield unanswered.pop(id), reply
                    else:
                        log.warning("an unexpected reply of node %d is ignored", reply.metadata.src_node_id)
                    del reply  # one model each
                self.has_enough = min_replies is not None and good >= min_replies
                if self.has_enough:
                    return
        finally:
            for id, message in unanswered.items():
                if not self._keep_contents:
                    message.content = RecordDict()
                self.pending[id], self._sent_at[id] = message, sent_at
            self._on_activity(set(), self.pending_nodes())


def receive(grid: Grid, messages: Iterable[Message], *, timeout: float) -> Iterator[Message]:
    """Return replies as they arrive, until all have arrived or none arrives for ``timeout`` seconds."""
    return replies_of(ClientMessenger(grid).send_and_receive(messages, timeout=timeout))


def replies_of(pairs: Iterable[tuple[Message, Message]]) -> Iterator[Message]:
    """Return the replies of (message, reply) pairs. Unlike a generator, it holds no reply, which is a whole model."""
    return map(itemgetter(1), pairs)
