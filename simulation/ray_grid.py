"""Engine ``ray``: Flower's ``Grid`` over Ray actors, which run the unchanged ClientApp on all CPUs and GPUs.

The ServerApp runs in this process. Contents that several clients receive are put into Ray's object store once, and the
actors of a host read them there without a copy. Replies are freed after the server has aggregated them. Where the
server needs no single update, actors sum those of the clients that they train (`server_app.exchanges.sums`).

If an actor dies or its GPU fails, it is replaced, its clients in the current block have failed, and the round
continues. An actor whose GPU fails twice in a row is not replaced.
"""

import copy
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from ray.exceptions import ObjectLostError, RayActorError, RayError

from client_app.simulated import MARKER_KEY, SimulationMarker
from fedssl.config.settings import MachineSettings
from fedssl.errors import RunError
from fedssl.flower_internals import assign_message_id, error_reply
from fedssl.logs import log
from fedssl.machine.devices import CPU, check_cuda_features, count_accelerators
from fedssl.machine.out_of_memory import OUT_OF_MEMORY
from server_app.app import execute
from server_app.build import RunComponents
from server_app.exchanges.sums import SummedContent, SumTask
from simulation.block_queue import ActorSum, BlockQueue, Call, task_size
from simulation.client_actor import ClientActor, ClientCall, ClientReply, Payload
from simulation.gpu_placement import Placement, measure_client, place_clients
from simulation.grid import NodeContexts, SimulatedGrid, load_client_app, run_client_app
from simulation.ray_session import check_hosts, last_line, ray_session
from simulation.resources import ClientResources, plan_client_resources

POLL_SECONDS = 0.1
LOG_INTERVAL = 30.0  # seconds between two warnings that no actor is ready
MAX_GPU_FAILURES = 2  # in a row, after which a process is not started again


class RayGrid(SimulatedGrid):
    """Nodes whose clients run in parallel in Ray actors, each with the resources ``client``.

    An actor runs several fast clients in one task, see `task_size`. Queries are answered in this process. A client that
    runs out of GPU memory is retried without other clients. ``placements`` are those of the actors, see
    `place_clients`. ``client_app`` defaults to the one of this project, which each actor imports.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        placements: Sequence[Placement],
        client: ClientResources,
        client_app: ClientApp | None = None,
    ) -> None:
        super().__init__(num_clients=num_clients)
        self._client_app = client_app
        self._contexts = NodeContexts(num_clients=num_clients)
        # An interrupted task must not be repeated automatically: the client may have saved its state.
        self._actor_class: Any = ray.remote(
            num_cpus=client.cpus, num_gpus=client.gpus, max_restarts=0, max_task_retries=0
        )(ClientActor)
        self._client_gpus = client.gpus
        self._slots: dict[Any, _Slot] = {}
        self._replies: deque[Message] = deque()
        self._task: SumTask | None = None
        self._pending = BlockQueue()
        self._retry_alone: deque[Call] = deque()
        self._starting: dict[Any, Any] = {}
        self._checking: dict[Any, Any] = {}
        self._running: dict[Any, _Running] = {}
        self._idle: list[Any] = []
        self._client_seconds: float | None = None  # of a client of the newest task
        self._last_activity = time.monotonic()
        for placement in placements:
            self._start_actor(_Slot(placement))

    def sum_updates(self, task: SumTask | None) -> None:
        """Let actors sum the updates in the replies to the next messages."""
        self._task = task

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to idle actors, and queue the rest."""
        self._cancel_stale()
        task, self._task = self._task, None
        # Also holds the contents, so that their ids stay unique.
        put: dict[int, tuple[RecordDict, Any]] = {}
        ids = []
        for message in messages:
            ids.append(assign_message_id(message))
            if message.metadata.message_type.startswith("query"):
                context = self._contexts[message.metadata.dst_node_id]
                self._replies.append(run_client_app(self._client_app or load_client_app(), message, context))
                continue
            if id(message.content) not in put:
                # One object: the layers of the content and of the task share memory.
                put[id(message.content)] = message.content, ray.put(Payload(message.content, task))
            without = copy.copy(message)
            without.content = RecordDict()
            block = task.block_of(message.metadata.dst_node_id) if task else None
            self._pending.add(Call(message=without, payload=put[id(message.content)][1], block=block))
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the next replies to these messages, after at most `POLL_SECONDS`."""
        wanted = set(message_ids)
        replies = list(self._replies)
        self._replies.clear()
        for task in self._done() if not replies else ():
            replies += self._finish(task, self._running.pop(task))
        self._dispatch()
        return [reply for reply in replies if reply.metadata.reply_to_message_id in wanted]

    def _start_actor(self, slot: "_Slot", *, compute: bool = False) -> None:
        """Start an actor. It must find the GPU of the one that it replaces and, with ``compute``, compute on it."""
        actor = self._actor_class.options(scheduling_strategy=slot.placement).remote(self._client_app)
        self._slots[actor] = slot
        self._starting[actor.gpu_failure.remote(compute=compute)] = actor

    def _stop_actor(self, actor: Any) -> "_Slot":
        self._pending.stop(actor)
        with suppress(RayError):
            ray.kill(actor)
        return self._slots.pop(actor)

    def _replace(self, actor: Any, *, compute: bool = False) -> None:
        self._start_actor(self._stop_actor(actor), compute=compute)

    def _done(self) -> list[Any]:
        """Wait for `POLL_SECONDS` at most. Return tasks of clients that have ended, and mark started actors as idle."""
        tasks = [*self._starting, *self._checking, *self._running]
        done, _ = ray.wait(tasks, timeout=POLL_SECONDS) if tasks else ([], [])
        for task in [task for task in done if task in self._starting]:
            self._finish_start(task, self._starting.pop(task))
            done.remove(task)
        for task in [task for task in done if task in self._checking]:
            self._finish_check(task, self._checking.pop(task))
            done.remove(task)
        if self._running or self._idle:
            self._last_activity = time.monotonic()
        elif time.monotonic() - self._last_activity > LOG_INTERVAL:
            self._last_activity = time.monotonic()
            log.warning("waiting for Ray's processes, which are starting, or need free CPUs and GPUs")
        return done

    def _finish_start(self, task: Any, actor: Any) -> None:
        """Mark a started actor as idle, if it finds the GPU of the one that it replaces."""
        slot = self._slots[actor]
        if slot.has_gpu:
            self._finish_check(task, actor)
            return
        try:
            slot.has_gpu = ray.get(task) is None
        except RayError as error:
            raise RunError(f"a process for clients could not be started: {last_line(error)}") from error
        if self._client_gpus and not slot.has_gpu:
            log.warning(
                "torch finds no GPU in a process for clients, which train on the CPU; install a build of torch for the "
                "GPUs of its host, or set engine.client_gpus=0"
            )
        self._idle.append(actor)

    def _finish_check(self, task: Any, actor: Any) -> None:
        """Mark the actor of a finished check as idle if its GPU works, else restart it, or stop using it."""
        try:
            failure: str | None = ray.get(task)
        except RayError as error:
            failure = last_line(error)
        if failure is None:
            self._idle.append(actor)
            return
        slot = self._stop_actor(actor)
        slot.gpu_failures += 1
        if slot.gpu_failures < MAX_GPU_FAILURES:
            log.warning("a GPU has failed, and its process for clients is restarted: %s", failure)
            self._start_actor(slot, compute=True)
            return
        log.warning("a GPU has failed again, and one process less is used for clients: %s", failure)
        if not self._slots:
            raise RunError(f"no GPU is left for clients: {failure}; resume the run when its GPUs work")

    def _dispatch(self) -> None:
        self._take_finished()
        while self._pending and self._idle:
            actor = self._idle.pop()
            size = task_size(len(self._pending), processes=len(self._slots), seconds=self._client_seconds)
            self._run(actor, self._pending.next_calls(actor, size))
            self._take_finished()
        # An actor whose GPU is checked has the memory of its last client.
        if self._retry_alone and self._idle and not (self._running or self._checking or self._pending):
            actor = self._idle.pop()
            for other in self._idle:  # idle processes also occupy GPU memory
                self._replace(other)
            self._idle.clear()
            self._run(actor, [(self._retry_alone.popleft(), None)])

    def _take_finished(self) -> None:
        busy = (actor_sum for running in self._running.values() for _, actor_sum in running.calls)
        self._pending.take_finished(actor_sum for actor_sum in busy if actor_sum is not None)

    def _run(self, actor: Any, calls: Sequence[tuple[Call, ActorSum | None]]) -> None:
        payloads: dict[Any, int] = {}
        client_calls = []
        for call, actor_sum in calls:
            context = self._contexts[call.message.metadata.dst_node_id]
            # A client that is retried alone reports by itself what would fit.
            marker = SimulationMarker(engine_retries=not call.is_retry)
            context.node_config[MARKER_KEY] = marker  # type: ignore[assignment]  # no value of a command line
            payload = payloads.setdefault(call.payload, len(payloads))
            client_calls.append(ClientCall(call.message, context, payload, actor_sum.block if actor_sum else None))
        task = actor.run_clients.remote(client_calls, *payloads)
        self._running[task] = _Running(actor, calls)

    def _finish(self, task: Any, running: "_Running") -> list[Message]:
        """Return the replies of a finished task. Its actor becomes idle or is replaced.

        Clients that the actor has not run are queued again. If it has died or cannot send their replies, all clients of
        the task have failed, even those that it had finished.
        """
        actor, calls = running.actor, running.calls
        try:
            replies: list[ClientReply]
            replies, seconds = ray.get(task)
        except (RayActorError, ObjectLostError) as error:
            log.warning("a process for clients has died and is restarted: %s", last_line(error))
            self._replace(actor, compute=True)  # perhaps its GPU has ended it
            return [error_reply(call.message, f"its process died: {last_line(error)}") for call, _ in calls]
        except RayError as error:  # e.g. a reply that cannot be sent; the sums of the actor have the failed clients
            ray.kill(actor)
            self._replace(actor)
            return [error_reply(call.message, last_line(error)) for call, _ in calls]
        self._client_seconds = seconds / len(replies)
        self._pending.put_back(calls[len(replies) :])
        results = [
            self._result(call, actor_sum, reply) for (call, actor_sum), reply in zip(calls, replies, strict=False)
        ]
        call, last = calls[len(replies) - 1][0], results[-1]  # the actor stops after a failed client
        if not (last.has_error() and OUT_OF_MEMORY in (last.error.reason or "")):
            self._release(actor, failed=last.has_error())
            return results
        self._pending.close(call)  # the clients after this one must not be added before it
        self._replace(actor)  # it would keep its GPU memory
        if call.is_retry:
            return results
        log.warning("a client ran out of accelerator memory and is retried alone")
        self._retry_alone.append(replace(call, is_retry=True))
        return results[:-1]

    def _result(self, call: Call, actor_sum: ActorSum | None, reply: ClientReply) -> Message:
        self._contexts[call.message.metadata.dst_node_id] = reply.context
        if reply.summed is not None and actor_sum is not None:
            actor_sum.is_used |= not isinstance(reply.summed, str)
            reply.message.content = SummedContent(reply.summed, actor_sum)
        return reply.message

    def _release(self, actor: Any, *, failed: bool) -> None:
        """Mark an actor as idle; if its client has failed, after a check of its GPU."""
        if failed and self._slots[actor].has_gpu:
            self._checking[actor.gpu_failure.remote(compute=True)] = actor
            return
        self._slots[actor].gpu_failures = 0
        self._idle.append(actor)

    def _cancel_stale(self) -> None:
        """Drop messages that were sent before, and replace the actors that still run one."""
        self._replies.clear()
        self._pending.clear()
        for task, running in list(self._running.items()):
            ready, _ = ray.wait([task], timeout=0)
            del self._running[task]
            if ready:
                self._finish(task, running)
            else:
                self._replace(running.actor)
        self._pending.clear()
        self._retry_alone.clear()


@dataclass
class _Slot:
    """The placement of an actor and of those that replace it, and how often in a row their GPU has failed.

    ``has_gpu`` is whether torch has found one in the first of them.
    """

    placement: Placement
    has_gpu: bool = False
    gpu_failures: int = 0


@dataclass(frozen=True)
class _Running:
    """Calls that an actor runs one after the other, each with the sum that its update is added to."""

    actor: Any
    calls: Sequence[tuple[Call, ActorSum | None]]


def run_ray(
    components: RunComponents,
    machine: MachineSettings,
    *,
    concurrency: int,
    records: Sequence[logging.LogRecord] = (),
) -> None:
    """Run the app, with the server in this process and the clients in Ray's, at most ``concurrency`` at once.

    ``machine`` is that of the clients. ``records`` were logged before.
    """
    settings = components.settings
    engine, folder = settings.engine, settings.recording.folder
    assert folder is not None
    gpus = count_accelerators(machine.device) if engine.address is None else None
    with ray_session(gpus=gpus, address=engine.address) as hosts:
        if engine.address is not None:
            check_hosts(folder)
        client, clients = plan_client_resources(
            hosts,
            engine=engine,
            machine=machine,
            max_clients=concurrency,
            measure=lambda: measure_client(replace(settings, machine=machine)),
        )
        if not client.gpus:
            check_cuda_features(settings.training, torch.device(CPU))
        grid = RayGrid(
            num_clients=settings.num_clients,
            placements=place_clients(hosts, client=client, clients=clients),
            client=client,
        )
        # Assumes that all clients are on this host.
        execute(grid, components, records=records, client_cores=clients * client.cpus)
