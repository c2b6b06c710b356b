"""The exchange of messages with clients over the rounds of a run."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

NO_REPLY = "no reply in time"


log = logging.getLogger("fedssl")


class MessageExchange:
    """Sends messages and receives replies, late ones included.

    With ``keep_contents`` the contents of messages are kept until their replies arrive.

    Attributes
    ----------
    pending : dict of str to Message
        Messages of earlier exchanges without a reply, by message id.
    late_replies : list of (Message, Message)
        Messages of earlier exchanges and the replies to them that arrived during the newest one.
    """

    def __init__(self, grid: Grid, *, keep_contents: bool = False) -> None:
        self._grid, self._keep_contents = grid, keep_contents
        self.pending: dict[str, Message] = {}
        self.late_replies: list[tuple[Message, Message]] = []

    def expire(self, *, older_than: float) -> None:
        """Stop waiting for replies to messages that are more than ``older_than`` seconds old."""
        oldest = time.time() - older_than
        self.pending = {id: message for id, message in self.pending.items() if message.metadata.created_at > oldest}

    def flush(self) -> None:
        """Wait until the states of clients of this process are in their files. Other clients wait themselves."""
        settle = getattr(self._grid, "settle", None)
        if settle is not None:
            settle()

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float,
        deadline: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[Message, Message]]:
        """Yield messages with their replies as they arrive, until there are enough, all have arrived, or time is over.

        Parameters
        ----------
        timeout : float
            Seconds to wait for the next reply.
        deadline : float, optional
            Seconds after which waiting ends.
        min_replies : int, optional
            Number of replies without errors, late ones included, after which waiting ends.
        """
        messages = list(messages)
        self.late_replies.clear()
        now = time.monotonic()
        last, until, pause, good = now + (deadline or math.inf), now + timeout, 0.005, 0
        # In the order of sending; the id of a message that could not be sent is empty.
        unanswered = {
            id: message for id, message in zip(self._grid.push_messages(messages), messages, strict=False) if id
        }
        try:
            while (unanswered or (min_replies and self.pending)) and time.monotonic() < min(until, last):
                replies = list(self._grid.pull_messages([*unanswered, *self.pending]))
                if replies:
                    pause = 0.005
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
        if not client_of:  # messages have an id once they are sent, i.e. after the first reply was requested
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
