"""A federation that reorders, delays, duplicates and damages messages, by a seed."""

import random
from collections.abc import Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedssl.flower_internals import error_reply
from simulation.grid import LocalGrid

HARMLESS = ("in order", "delayed", "duplicated", "repeated later")
DROPPING = ("NaN", "truncated", "failed")  # the client is dropped, in every run with this seed
MAX_POLLS = 5_000  # of a run: virtual time


class Hang(AssertionError):
    """The server polls without end."""


class FaultyGrid(LocalGrid):
    """Replies in a random order of arrival, with faults that depend on the seed, the client and the round."""

    seed = 0  # set by the schedule, since `simulation.grid.run_local` creates the grid
    drops = True

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._random = random.Random(self.seed)
        self._delays: dict[str, int] = {}
        self._old: list[Message] = []
        self._polls = 0

    def _fault(self, message: Message) -> str:
        """Return the fault of a reply. It must not depend on the order of messages, which a resumed run changes."""
        metadata = message.metadata
        if not metadata.message_type.startswith("train"):
            return "in order"
        draw = random.Random(f"{self.seed} {metadata.dst_node_id} {metadata.group_id}")
        return draw.choice(HARMLESS + (DROPPING if self.drops and draw.random() < 0.4 else ()))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._polls += 1
        if self._polls > MAX_POLLS:
            raise Hang("the server waits for ever")
        waiting = [id for id in message_ids if id in self._queue]
        if not waiting:
            return []
        id = self._random.choice(sorted(waiting))
        message = self._queue[id]
        fault = self._fault(message)
        if fault == "delayed" and self._delays.setdefault(id, 3):
            self._delays[id] -= 1
            return []
        (reply,) = super().pull_messages([id])
        replies = [self._changed(message, reply, fault)]
        if fault == "duplicated":
            replies *= 2
        if fault == "repeated later":
            self._old.append(reply)
        elif self._old and self._random.random() < 0.5:
            replies.insert(0, self._old.pop())
        return replies

    def _changed(self, message: Message, reply: Message, fault: str) -> Message:
        if fault == "failed":
            return error_reply(message, "the battery is empty")
        if fault in ("NaN", "truncated") and reply.has_content():
            for record in reply.content.array_records.values():
                record.update(_changed_arrays(record, fault))
        return reply


def _changed_arrays(record: ArrayRecord, fault: str) -> dict[str, Array]:
    changed = {}
    for name, array in record.items():
        if fault == "NaN":
            values = array.numpy().copy()
            if values.dtype.kind == "f" and values.size:
                values.flat[0] = np.nan
                changed[name] = Array(values)
        else:
            changed[name] = Array(array.dtype, array.shape, array.stype, array.data[:-3])
    return changed
