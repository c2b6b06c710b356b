"""A process of engine ``ray`` that runs clients. It imports no more than they need: it starts while the server starts.

A task is a list of clients. Those of tiny models take milliseconds, a task of Ray takes one or two.
"""

import copy
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedssl.flower_internals import set_task_identity
from fedssl.machine.devices import is_gpu, select_device
from fedssl.wire.records import content_bytes
from server_app.exchanges.sums import SummedUpdate, SumTask
from simulation.gpu_placement import device_failure
from simulation.grid import load_client_app, run_client_app
from strategies.types import Mergeable

TASK_SECONDS = 0.3  # after which a task starts no further client
TASK_BYTES = 16_000_000  # of replies, which the server frees together; a larger reply is alone


@dataclass(frozen=True)
class Payload:
    """Content of a message, and what an actor needs to sum the updates of the round, if it may."""

    content: RecordDict
    task: SumTask | None


@dataclass(frozen=True)
class ClientCall:
    """A message without its content, the context of its node, and the number of its payload.

    With ``block`` the update is added to the sum of this block, if it is valid, and returned without its layers.
    """

    message: Message
    context: Context
    payload: int
    block: int | None


@dataclass(frozen=True)
class ClientReply:
    """The reply of a client and the new context of its node. ``summed`` is its update in a sum, or why it is not."""

    message: Message
    context: Context
    summed: SummedUpdate | str | None


class ClientActor:
    """A process that runs one client at a time."""

    def __init__(self, client_app: ClientApp | None = None) -> None:
        set_task_identity()
        self._client_app = client_app or load_client_app()
        self._task: SumTask | None = None
        self._sums: dict[int, Mergeable] = {}  # by block

    def gpu_failure(self, *, compute: bool) -> str | None:
        """Return the GPU and its error; None if torch finds it and, with ``compute``, it works."""
        device = select_device("auto")
        failure: str | None = "torch does not find it"
        if is_gpu(device):
            failure = device_failure(device) if compute else None
        gpus = ", ".join(map(str, ray.get_gpu_ids()))
        return failure and f"GPU {gpus} of {platform.node()}: {failure}"

    def run_clients(self, calls: Sequence[ClientCall], *payloads: Payload) -> tuple[list[ClientReply], float]:
        """Run clients in order. Return the replies of the first ones, and the seconds that they took.

        No further client is run after `TASK_SECONDS`, after `TASK_BYTES`, and after one that has failed: its GPU or
        the memory of this process may be the cause.
        """
        start, seconds, num_bytes = time.perf_counter(), 0.0, 0
        replies: list[ClientReply] = []
        for call in calls:
            reply = self._run(call, payloads[call.payload])
            replies.append(reply)
            seconds = time.perf_counter() - start
            if reply.message.has_error():
                break
            num_bytes += content_bytes(reply.message.content)
            if seconds > TASK_SECONDS or num_bytes > TASK_BYTES:
                break
        return replies, seconds

    def take_block(self, block: int) -> Any:
        """Return and remove the sum of a block."""
        return self._sums.pop(block).take_block()

    def _run(self, call: ClientCall, payload: Payload) -> ClientReply:
        call.message.content = payload.content
        reply = run_client_app(self._client_app, call.message, call.context)
        if call.block is None or payload.task is None or reply.has_error():
            return ClientReply(reply, call.context, None)
        summed = self._add(payload.task, call.block, reply)
        reply.content = RecordDict()
        return ClientReply(reply, call.context, summed)

    def _add(self, task: SumTask, block: int, reply: Message) -> SummedUpdate | str:
        if self._task is None or (self._task.round, self._task.attempt) != (task.round, task.attempt):
            self._task, self._sums = task, {}
        if block not in self._sums:
            self._sums[block] = copy.copy(self._task.aggregator)
            self._sums[block].start(self._task.expected)
        return self._task.add(self._sums[block], reply)
