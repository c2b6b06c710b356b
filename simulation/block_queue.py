"""Queue of calls of clients for Ray actors, which sum the updates of a block of clients.

An actor owns a block, runs its clients in order and sums their updates. If no block is left, an actor runs the last
client of another's block instead of idling, and replies with that client's whole update. Each block is therefore the
sum of its first clients and single updates of the others, which the server adds in order.

An actor gets several calls at once (`task_size`).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from flwr.app import Message
from ray.exceptions import RayError

from server_app.exchanges.sums import LostSumError
from simulation.client_actor import TASK_SECONDS
from simulation.ray_session import last_line

TAKE_TIMEOUT = 60.0  # seconds


def task_size(waiting: int, *, processes: int, seconds: float | None) -> int:
    """Return the number of clients of the next task, by guided self-scheduling (Polychronopoulos and Kuck, 1987).

    It is half of an equal share of the ``waiting`` clients, so that all processes end together, and at most
    `TASK_SECONDS` of work. ``seconds`` is the time of a client; with None, i.e. not measured, a task has one client.
    """
    if seconds is None:
        return 1
    return max(1, min(math.ceil(waiting / (2 * processes)), int(TASK_SECONDS / seconds)))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A message without its content, the reference to its content and task, its block, and whether it is a retry."""

    message: Message
    payload: Any
    block: int | None = None
    is_retry: bool = False


@dataclass
class ActorSum:
    """Sum of the first clients of a block, in an actor, or in the object store after `take`."""

    actor: Any
    block: int
    is_used: bool = False  # whether a client was added
    reference: Any = None

    def take(self) -> None:
        """Move the sum into the object store. The actor adds no further clients."""
        if self.is_used and self.reference is None:
            self.reference = self.actor.take_block.remote(self.block)

    def get(self) -> Any:
        """Return the sum; raises `LostSumError`."""
        if self.reference is None:
            raise LostSumError("a client of the same process has not replied in time")
        try:
            return ray.get(self.reference)
        except RayError as error:
            raise LostSumError(f"its process died: {last_line(error)}") from error


@dataclass
class _Block:
    pending: deque[Call] = field(default_factory=deque)
    sum: ActorSum | None = None  # that its owner adds to
    is_closed: bool = False  # no further client is added to its sum


class BlockQueue:
    """Calls in order. Those without a block run first."""

    def __init__(self) -> None:
        self._single: deque[Call] = deque()
        self._blocks: dict[int, _Block] = {}
        self._sums: dict[Any, list[ActorSum]] = {}  # of each actor

    def __len__(self) -> int:
        return len(self._single) + sum(len(block.pending) for block in self._blocks.values())

    def clear(self) -> None:
        """Remove all calls and sums."""
        self._single.clear()
        self._blocks.clear()
        self._sums.clear()

    def add(self, call: Call) -> None:
        """Add a call after those of its block."""
        if call.block is None:
            self._single.append(call)
        else:
            self._blocks.setdefault(call.block, _Block()).pending.append(call)

    def next_calls(self, actor: Any, size: int) -> list[tuple[Call, ActorSum | None]]:
        """Return at most ``size`` next calls of an idle actor, as from `next_call`."""
        return [self.next_call(actor) for _ in range(min(size, len(self)))]

    def put_back(self, calls: Sequence[tuple[Call, ActorSum | None]]) -> None:
        """Return calls of an actor that it has not run. Those that it was to sum are the next ones of their block."""
        for call, actor_sum in reversed(calls):
            if actor_sum is None:  # it is added to no sum, because other clients of its block may have run
                self._single.appendleft(call)
            elif actor_sum.block in self._blocks:  # it is not after `clear`
                self._blocks[actor_sum.block].pending.appendleft(call)

    def next_call(self, actor: Any) -> tuple[Call, ActorSum | None]:
        """Return the next call of an idle actor, and the sum that the actor adds its update to."""
        if self._single:
            return self._single.popleft(), None
        blocks = [block for block in self._blocks.values() if block.pending]
        for block in blocks:
            if block.sum is not None and block.sum.actor == actor and not block.is_closed:
                return block.pending.popleft(), block.sum
        for number, block in self._blocks.items():
            if block.pending and block.sum is None:
                block.sum = ActorSum(actor, number)
                self._sums.setdefault(actor, []).append(block.sum)
                return block.pending.popleft(), block.sum
        longest = max(blocks, key=lambda block: len(block.pending))
        return longest.pending.pop(), None

    def close(self, call: Call) -> None:
        """Add no client after this one to the sum of its block: it replies later."""
        if call.block in self._blocks:  # it is not in one after `clear`
            self._blocks[call.block].is_closed = True

    def take_finished(self, busy: Iterable[ActorSum]) -> None:
        """Move the sums that are finished into the object store; ``busy`` are those of clients that are running."""
        running = [id(one) for one in busy]
        for block in self._blocks.values():
            if block.sum is not None and (block.is_closed or not block.pending) and id(block.sum) not in running:
                block.sum.take()

    def stop(self, actor: Any) -> None:
        """Move the sums of an actor into the object store, before it is stopped."""
        sums = self._sums.pop(actor, [])
        for one in sums:
            self._blocks[one.block].is_closed = True
            one.take()
        references = [one.reference for one in sums if one.reference is not None]
        if references:
            ray.wait(references, num_returns=len(references), timeout=TAKE_TIMEOUT)
