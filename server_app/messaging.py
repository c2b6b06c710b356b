"""The exchange of messages with clients over the rounds of a run."""

import math
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class MessageExchange:
    """Sends messages and receives replies, those that are late as well.

    Parameters
    ----------
    grid : Grid
    keep_contents : bool
        Whether the contents of messages are kept until their replies are there.

    Attributes
    ----------
    pending : dict of str to Message
        Messages of earlier exchanges, by their ids, that nobody has replied to yet.
    late_replies : list of (Message, Message)
        Messages of earlier exchanges and the replies to them that came during the newest one.
    """

    def __init__(self, grid: Grid, *, keep_contents: bool = False) -> None:
        self._grid, self._keep_contents = grid, keep_contents
        self.pending: dict[str, Message] = {}
        self.late_replies: list[tuple[Message, Message]] = []

    def expire(self, *, older_than: float) -> None:
        """Wait no longer for replies to messages that were made more than so many seconds ago."""
        oldest = time.time() - older_than
        self.pending = {id: message for id, message in self.pending.items() if message.metadata.created_at > oldest}

    def flush(self) -> None:
        """Return when what the clients of this process keep is in their files; other clients wait for it themselves."""
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
    ) -> Iterator[Message]:
        """Replies as they arrive, until there are enough, or all are there, or time is over.

        Parameters
        ----------
        messages : iterable of Message
        timeout : float
            Seconds to wait for the next reply.
        deadline : float, optional
            Seconds after which nobody is waited for any more.
        min_replies : int, optional
            Replies without errors, late ones included, after which nobody is waited for any more.
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
                    else:
                        unanswered.pop(id, None)
                        yield reply
                    del reply  # one model each
                if min_replies is not None and good >= min_replies:
                    return
        finally:
            for id, message in unanswered.items():
                if not self._keep_contents:
                    message.content = RecordDict()
                self.pending[id] = message
