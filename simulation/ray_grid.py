"""Engine ``ray``: a Flower ``Grid`` over Ray actors, in which the unchanged ClientApp runs on all CPUs and GPUs.

The ServerApp runs in the process that was started. Contents that clients share go into Ray's object store once, where
all actors of a host read them without a copy; replies come back through it and are freed when the server has folded
them in. An actor is waited for as long as it lives; one that has died is started again, its client counts as failed,
and the round goes on.
"""

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from ray.exceptions import ObjectLostError, RayActorError, RayError

from fedssl.config.settings import EngineSettings, MachineSettings
from fedssl.errors import RunError
from simulation.grid import (
    SimulatedGrid,
    assign_message_id,
    error_reply,
    load_client_app,
    make_context,
    run_client_app,
    run_server_app,
    set_task_identity,
)
from simulation.ray_session import check_hosts, ray_session
from simulation.resources import ClientResources, plan_client_resources

log = logging.getLogger("fedssl")

POLL_SECONDS = 0.1  # seconds that a look at the actors takes if none of them is done
LOG_INTERVAL = 30.0  # seconds between two lines that say that nobody works yet
OUT_OF_MEMORY = "OutOfMemoryError"  # what torch raises if a GPU is full
OUT_OF_MEMORY_HINT = "a smaller batch_size or a larger engine.client_gpus may help"


class ClientActor:
    """A process in which clients train one after the other."""

    def __init__(self, client_app: ClientApp | None = None) -> None:
        set_task_identity()
        self._client_app = client_app or load_client_app()

    def ready(self) -> None:
        """Return when the process can train, i.e. as soon as it can answer at all."""

    def run_client_app(self, content: RecordDict, message: Message, context: Context) -> tuple[Message, Context]:
        """The client's reply to a message that comes without its content, and what its node is like after it."""
        message.content = content
        return run_client_app(self._client_app, message, context), context


class RayGrid(SimulatedGrid):
    """Nodes whose clients run side by side in Ray actors.

    Queries, which only ask what a node is, are answered in this process. A client that finds too little memory on its
    GPU runs once more when nobody else does.

    Parameters
    ----------
    num_clients : int
    actors : int
        How many clients run at a time.
    client : Share
        What an actor occupies.
    client_app : ClientApp, optional
        None: that of this project, imported by each actor.
    """

    def __init__(
        self, *, num_clients: int, actors: int, client: ClientResources, client_app: ClientApp | None = None
    ) -> None:
        super().__init__(num_clients=num_clients)
        self._client_app = client_app
        self._contexts = {node: make_context(node, num_clients=num_clients) for node in self.get_node_ids()}
        # A task that was cut off must not run again by itself: the client may have kept its state already.
        actor = ray.remote(num_cpus=client.cpus, num_gpus=client.gpus, max_restarts=0, max_task_retries=0)(ClientActor)
        self._new_actor: Callable[[], Any] = lambda: actor.options(scheduling_strategy="SPREAD").remote(client_app)
        self._replies: deque[Message] = deque()
        self._pending: deque[_PendingCall] = deque()
        self._retry_alone: deque[_PendingCall] = deque()
        self._starting: dict[Any, Any] = {}
        self._running: dict[Any, tuple[Any, _PendingCall]] = {}
        self._idle: list[Any] = []
        self._last_activity = time.monotonic()
        for _ in range(actors):
            self._start_actor()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the actors that are free and queue the others."""
        self._cancel_stale()
        # The contents themselves too: while they live nothing else has their id.
        put: dict[int, tuple[RecordDict, Any]] = {}
        ids = []
        for message in messages:
            ids.append(assign_message_id(message))
            if message.metadata.message_type.startswith("query"):
                context = self._contexts[message.metadata.dst_node_id]
                self._replies.append(run_client_app(self._client_app or load_client_app(), message, context))
                continue
            if id(message.content) not in put:
                put[id(message.content)] = message.content, ray.put(message.content)
            without = copy.copy(message)
            without.content = RecordDict()
            self._pending.append(_PendingCall(without, put[id(message.content)][1]))
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The next reply to one of these messages, if one comes within a tenth of a second.

        Raises
        ------
        RunError
            An actor cannot be started.
        """
        wanted = set(message_ids)
        replies = []
        while self._replies:
            replies.append(self._replies.popleft())
        for task in self._done() if not replies else ():
            actor, call = self._running.pop(task)
            reply = self._reply(task, actor, call)
            if reply is not None:
                replies.append(reply)
        self._dispatch()
        return [reply for reply in replies if reply.metadata.reply_to_message_id in wanted]

    # --- actors ---

    def _start_actor(self) -> None:
        actor = self._new_actor()
        self._starting[actor.ready.remote()] = actor

    def _replace(self, actor: Any) -> None:
        with suppress(RayError):
            ray.kill(actor)
        self._start_actor()

    def _done(self) -> list[Any]:
        """The task of a client that has ended, if one has within `POLL_SECONDS`; actors that are ready become idle."""
        tasks = [*self._starting, *self._running]
        done, _ = ray.wait(tasks, timeout=POLL_SECONDS) if tasks else ([], [])
        for task in [task for task in done if task in self._starting]:
            actor = self._starting.pop(task)
            try:
                ray.get(task)
            except RayError as error:
                raise RunError(f"a process for clients could not be started: {_reason(error)}") from error
            self._idle.append(actor)
            done.remove(task)
        if self._running or self._idle:
            self._last_activity = time.monotonic()
        elif time.monotonic() - self._last_activity > LOG_INTERVAL:
            self._last_activity = time.monotonic()
            log.warning("waiting for Ray's processes, which are still starting")
        return done

    def _dispatch(self) -> None:
        while self._pending and self._idle:
            self._run(self._pending.popleft(), self._idle.pop())
        if self._retry_alone and self._idle and not self._running and not self._pending:
            actor = self._idle.pop()
            for other in self._idle:  # idle processes too keep memory of their GPU
                self._replace(other)
            self._idle.clear()
            self._run(self._retry_alone.popleft(), actor)

    def _run(self, call: "_PendingCall", actor: Any) -> None:
        context = self._contexts[call.message.metadata.dst_node_id]
        self._running[actor.run_client_app.remote(call.content, call.message, context)] = actor, call

    def _reply(self, task: Any, actor: Any, call: "_PendingCall") -> Message | None:
        """The reply of a task that has ended, None if it is to run again; its actor is free again, or replaced."""
        try:
            reply: Message
            reply, self._contexts[call.message.metadata.dst_node_id] = ray.get(task)
        except (RayActorError, ObjectLostError) as error:
            log.warning("a process for clients has died and is started again: %s", _reason(error))
            self._replace(actor)
            return error_reply(call.message, f"its process died: {_reason(error)}")
        except RayError as error:  # e.g. a reply that cannot be sent
            reply = error_reply(call.message, _reason(error))
        if not (reply.has_error() and OUT_OF_MEMORY in (reply.error.reason or "")):
            self._idle.append(actor)
            return reply
        self._replace(actor)  # it would keep what it has of the GPU's memory
        if call.is_retry:
            return error_reply(call.message, f"{reply.error.reason}; {OUT_OF_MEMORY_HINT}")
        log.warning("a client found too little memory on its GPU and runs once more, alone")
        self._retry_alone.append(replace(call, is_retry=True))
        return None

    def _cancel_stale(self) -> None:
        """Nobody waits any more for what was asked before: drop it, and replace the actors that are still at it."""
        self._replies.clear()
        self._pending.clear()
        for task, (actor, call) in list(self._running.items()):
            ready, _ = ray.wait([task], timeout=0)
            del self._running[task]
            if ready:
                self._reply(task, actor, call)
            else:
                self._replace(actor)
        self._retry_alone.clear()


@dataclass(frozen=True)
class _PendingCall:
    """A message without its content, the content's place in the object store, and whether it runs a second time."""

    message: Message
    content: Any
    is_retry: bool = False


def run_ray(
    overrides: Sequence[str],
    *,
    num_clients: int,
    concurrency: int,
    folder: Path,
    engine: EngineSettings,
    machine: MachineSettings,
) -> None:
    """Run the app to its end, the server in this process, the clients in Ray's; what it raises is raised.

    Parameters
    ----------
    overrides : sequence of str
        The words of the command line; paths in them must be absolute, because actors have another working directory.
    num_clients : int
        Of the federation.
    concurrency : int
        How many are of use: those that train in a round.
    folder : Path
        Of the run.
    engine : EngineSettings
        What a client is to have.
    machine : MachineSettings
        Device and threads of a client.

    Raises
    ------
    InputError
        The machine has not what is asked for, or there is no such cluster; no client has run.
    RunError
        Ray's processes cannot be started.
    """
    own_gpus = 0 if machine.device == "cpu" and engine.address is None else None
    with ray_session(gpus=own_gpus, address=engine.address) as hosts:
        if engine.address is not None:
            check_hosts(folder)
        client, actors = plan_client_resources(hosts, engine=engine, machine=machine, max_clients=concurrency)
        grid = RayGrid(num_clients=num_clients, actors=actors, client=client)
        run_server_app(grid, overrides, client_cores=actors * client.cpus)  # as if all were on this host


def _reason(error: RayError) -> str:
    """The last line of what Ray says, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
