"""The exchange of messages with clients over the rounds of a run."""

import math
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class Post:
    """Sends messages and receives replies, those that are late as well.

    Parameters
    ----------
    grid : Grid
    keep : bool
        Whether the contents of messages are kept until their replies are there.

    Attributes
    ----------
    owed : dict of str to Message
        Messages of earlier exchanges, by their ids, that nobody has replied to yet.
    late : list of (Message, Message)
        Messages of earlier exchanges and the replies to them that came during the newest one.
    """

    def __init__(self, grid: Grid, *, keep: bool = False) -> None:
        self._grid, self._keep = grid, keep
        self.owed: dict[str, Message] = {}
        self.late: list[tuple[Message, Message]] = []

    def forget(self, *, older: float) -> None:
        """Wait no longer for replies to messages that were made more than so many seconds ago."""
        then = time.time() - older
        self.owed = {id: message for id, message in self.owed.items() if message.metadata.created_at > then}

    def settle(self) -> None:
        """Return when what the clients of this process keep is in their files; other clients wait for it themselves."""
        settle = getattr(self._grid, "settle", None)
        if settle is not None:
            settle()

    def exchange(
        self,
        messages: Iterable[Message],
        *,
        timeout: float,
        deadline: float | None = None,
        enough: int | None = None,
    ) -> Iterator[Message]:
        """Replies as they arrive, until there are enough, or all are there, or time is over.

        Parameters
        ----------
        messages : iterable of Message
        timeout : float
            Seconds to wait for the next reply.
        deadline : float, optional
            Seconds after which nobody is waited for any more.
        enough : int, optional
            Replies without errors, late ones included, after which nobody is waited for any more.
        """
        messages = list(messages)
        self.late.clear()
        now = time.monotonic()
        last, until, pause, good = now + (deadline or math.inf), now + timeout, 0.005, 0
        # In the order of sending; the id of a message that could not be sent is empty.
        pending = {id: message for id, message in zip(self._grid.push_messages(messages), messages, strict=False) if id}
        try:
            while (pending or (enough and self.owed)) and time.monotonic() < min(until, last):
                replies = list(self._grid.pull_messages([*pending, *self.owed]))
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
                    if id in self.owed:
                        self.late.append((self.owed.pop(id), reply))
                    else:
                        pending.pop(id, None)
                        yield reply
                    del reply  # one model each
                if enough is not None and good >= enough:
                    return
        finally:
            for id, message in pending.items():
                if not self._keep:
                    message.content = RecordDict()
                self.owed[id] = message
