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
from typing import Any

import ray
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from ray.exceptions import RayActorError, RayError

from fedssl.errors import RunFailed
from fedssl.settings import EngineSettings, MachineSettings
from simulation.grid import SimulatedGrid, answer, context_of, failed, identify, number, run_server
from simulation.ray_session import Share, ray_session, share

log = logging.getLogger("fedssl")

POLL = 0.1  # seconds that a look at the actors takes if none of them is done
SAY_EVERY = 30.0  # seconds between two lines that say what is waited for


class ClientActor:
    """A process in which clients train one after the other."""

    def __init__(self, client_app: ClientApp | None = None) -> None:
        identify()
        if client_app is None:
            from client_app.app import app

            client_app = app
        self._client_app = client_app

    def ready(self) -> None:
        """Return when the process can train, i.e. as soon as it can answer at all."""

    def answer(self, content: RecordDict, message: Message, context: Context) -> tuple[Message, Context]:
        """The client's reply to a message that comes without its content, and what its node is like after it."""
        message.content = content
        return answer(self._client_app, message, context), context


class RayGrid(SimulatedGrid):
    """Nodes whose clients run side by side in Ray actors.

    Parameters
    ----------
    num_clients : int
    actors : int
        How many clients run at a time.
    client : Share
        What an actor occupies.
    client_app : ClientApp, optional
        None: that of this project, imported by each actor.

    Raises
    ------
    RunFailed
        No actor can be started. Until the first one is ready the constructor waits.
    """

    def __init__(self, *, num_clients: int, actors: int, client: Share, client_app: ClientApp | None = None) -> None:
        super().__init__(num_clients=num_clients)
        self._contexts = {node: context_of(node, num_clients=num_clients) for node in self.get_node_ids()}
        # A task that was cut off must not run again by itself: the client may have kept its state already.
        actor = ray.remote(num_cpus=client.cpus, num_gpus=client.gpus, max_restarts=0, max_task_retries=0)(ClientActor)
        self._new: Callable[[], Any] = lambda: actor.remote(client_app)
        self._waiting: deque[tuple[Message, Any]] = deque()
        self._starting: dict[Any, Any] = {}
        self._running: dict[Any, tuple[Any, Message]] = {}
        self._idle: list[Any] = []
        for _ in range(actors):
            self._start_actor()
        self._wait_for_the_first()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the actors that are free and queue the others."""
        self._give_up_old_work()
        put: dict[
            int, tuple[RecordDict, Any]
        ] = {}  # contents themselves too: while they live nothing else has their id
        ids = []
        for message in messages:
            ids.append(number(message))
            if id(message.content) not in put:
                put[id(message.content)] = message.content, ray.put(message.content)
            without = copy.copy(message)
            without.content = RecordDict()
            self._waiting.append((without, put[id(message.content)][1]))
        self._hand_out()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The next reply to one of these messages, if one comes within a tenth of a second."""
        wanted = set(message_ids)
        replies = []
        for task in self._done():
            actor, message = self._running.pop(task)
            reply = self._reply(task, actor, message)
            if message.metadata.message_id in wanted:
                replies.append(reply)
        self._hand_out()
        return replies

    # --- actors ---

    def _start_actor(self) -> None:
        actor = self._new()
        self._starting[actor.ready.remote()] = actor

    def _wait_for_the_first(self) -> None:
        begun = said = time.monotonic()
        while not self._idle:
            self._done()
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                log.warning("waiting for Ray's processes, which are still starting (%.0f s so far)", said - begun)

    def _done(self) -> list[Any]:
        """The task of a client that has ended, if one has within `POLL` seconds; actors that are ready become idle."""
        tasks = [*self._starting, *self._running]
        done, _ = ray.wait(tasks, timeout=POLL) if tasks else ([], [])
        for task in [task for task in done if task in self._starting]:
            actor = self._starting.pop(task)
            try:
                ray.get(task)
            except RayError as error:
                raise RunFailed(f"a process for clients could not be started: {_reason(error)}") from error
            self._idle.append(actor)
            done.remove(task)
        return done

    def _hand_out(self) -> None:
        while self._waiting and self._idle:
            (message, content), actor = self._waiting.popleft(), self._idle.pop()
            context = self._contexts[message.metadata.dst_node_id]
            self._running[actor.answer.remote(content, message, context)] = actor, message

    def _reply(self, task: Any, actor: Any, message: Message) -> Message:
        """The reply of a task that has ended; its actor is free again, or replaced."""
        try:
            reply: Message
            reply, self._contexts[message.metadata.dst_node_id] = ray.get(task)
        except RayActorError as error:
            log.warning("a process for clients has died and is started again: %s", _reason(error))
            self._start_actor()
            return failed(message, f"its process died: {_reason(error)}")
        except RayError as error:  # e.g. a reply that cannot be sent
            reply = failed(message, _reason(error))
        self._idle.append(actor)
        return reply

    def _give_up_old_work(self) -> None:
        """Nobody waits any more for what was asked before: drop it, and replace the actors that are still at it."""
        self._waiting.clear()
        for task, (actor, message) in list(self._running.items()):
            ready, _ = ray.wait([task], timeout=0)
            del self._running[task]
            if ready:
                self._reply(task, actor, message)
                continue
            with suppress(RayError):
                ray.kill(actor)
            self._start_actor()


def run_ray(
    overrides: Sequence[str],
    *,
    num_clients: int,
    clients_at_a_time: int,
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
    clients_at_a_time : int
        How many are of use: those that train in a round.
    engine : EngineSettings
        What a client is to have.
    machine : MachineSettings
        Device and threads of a client.

    Raises
    ------
    InputError
        The machine has not what is asked for; no client has run.
    RunFailed
        Ray's processes cannot be started.
    """
    with ray_session(gpus=0 if machine.device == "cpu" else None) as there:
        client, actors = share(
            there,
            client_cpus=engine.client_cpus,
            client_gpus=engine.client_gpus,
            threads=machine.threads,
            at_most=clients_at_a_time,
        )
        gpus = f" and {client.gpus:g} of {there.gpus} GPUs" if client.gpus else ""
        print(f"{actors} clients at a time, each on {client.cpus} of {there.cpus} CPUs{gpus}", flush=True)
        run_server(RayGrid(num_clients=num_clients, actors=actors, client=client), overrides)


def _reason(error: RayError) -> str:
    """The last line of what Ray says, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
