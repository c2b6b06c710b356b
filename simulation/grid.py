"""A Flower ``Grid`` for simulations: what the engines share, and the engine ``local``, which runs all in one process.

The grid makes what Flower's runtime otherwise makes, so it needs names that Flower keeps to itself (`flwr.supercore`,
`flwr.common`, the id in a message's metadata); flwr<1.42 keeps them as they are.
"""

import logging
import shlex
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from client_app.simulated import MARKER_KEY, SimulationMarker
from client_app.state_store import WriteBehind
from fedssl.config.settings import MachineSettings
from fedssl.machine.devices import select_device

log = logging.getLogger("fedssl")

RUN_ID, SERVER_NODE = 1, 1


class SimulatedGrid(Grid):
    """A federation of ``num_clients`` nodes with fixed ids, each of which holds the partition of its place."""

    def __init__(self, *, num_clients: int) -> None:
        self.num_clients = num_clients
        set_task_identity()

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes, in the order of their partitions."""
        return list(range(SERVER_NODE + 1, SERVER_NODE + 1 + self.num_clients))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Yield the replies as they come."""
        pending = dict.fromkeys(self.push_messages(messages))
        while pending:
            for reply in self.pull_messages(pending):
                del pending[reply.metadata.reply_to_message_id]
                yield reply

    # --- parts of Flower's interface that a simulation does not use ---

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        """The run."""
        return Run.create_empty(run_id=RUN_ID)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message; deprecated in Flower, whose messages are made by their constructor."""
        return Message(*args, **kwargs)


def set_task_identity() -> None:
    """Tell Flower, whose messages ask for it, which run this process works for."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SERVER_NODE


def assign_message_id(message: Message) -> str:
    """Give a message an id of its own, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message.metadata.message_id


def make_context(node: int, *, num_clients: int, marker: SimulationMarker | None = None) -> Context:
    """What the ClientApp is told of the node it runs on; ``mark`` has more of it than usual."""
    partition = node - SERVER_NODE - 1
    return Context(
        run_id=RUN_ID,
        node_id=node,
        # Flower's type of a value leaves out what no command line can write, which is what the mark is.
        node_config={
            "partition-id": partition,
            "num-partitions": num_clients,
            MARKER_KEY: marker or SimulationMarker(),  # type: ignore[dict-item]
        },
        state=RecordDict(),
        run_config={},
    )


def run_client_app(client_app: ClientApp, message: Message, context: Context) -> Message:
    """The client's reply; a failure is a reply too."""
    try:
        return client_app(message, context)
    except Exception as error:  # a client may fail in any way; the server decides what follows
        log.debug("client of node %d failed", message.metadata.dst_node_id, exc_info=True)
        return error_reply(message, f"{type(error).__name__}: {error}")


def error_reply(message: Message, reason: str) -> Message:
    """The reply of a client that failed."""
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def load_client_app() -> ClientApp:
    """The ClientApp of this project; imported here, because whoever only counts nodes need not wait for torch."""
    from client_app.app import app

    return app


def run_server_app(
    grid: Grid, overrides: Sequence[str], *, terminal: bool = False, client_cores: int | None = None
) -> None:
    """Run the ServerApp to its end in this process; what it raises is raised.

    Parameters
    ----------
    grid : Grid
    overrides : sequence of str
        The words of the command line.
    terminal : bool
        Whether it may draw on standard output, because nobody else writes there.
    client_cores : int or None
        How many cores of this machine clients occupy; None: nobody knows.
    """
    from server_app.app import app as server_app
    from server_app.console import INTERACTIVE_KEY
    from server_app.training_loop import CLIENT_CORES_KEY

    known = {} if client_cores is None else {CLIENT_CORES_KEY: client_cores}
    server_app(
        grid,
        Context(
            run_id=RUN_ID,
            node_id=SERVER_NODE,
            node_config={INTERACTIVE_KEY: terminal, **known},
            state=RecordDict(),
            run_config={"overrides": shlex.join(overrides)},
        ),
    )


class LocalGrid(SimulatedGrid):
    """Nodes whose clients run one after the other in this process.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int
    store : WriteBehind, optional
        Where clients have what they keep; None: in their files alone.
    """

    def __init__(self, client_app: ClientApp, *, num_clients: int, store: WriteBehind | None = None) -> None:
        super().__init__(num_clients=num_clients)
        self._client_app, self._store = client_app, store
        marker = SimulationMarker(store) if store else None
        nodes = self.get_node_ids()
        self._contexts = {node: make_context(node, num_clients=num_clients, marker=marker) for node in nodes}
        self._queue: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages in the place of older ones, which nobody waits for any more; nothing runs yet."""
        self._queue = {assign_message_id(message): message for message in messages}
        return list(self._queue)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the client of the first of these messages that is still queued, and return its reply."""
        for message_id in message_ids:
            message = self._queue.pop(message_id, None)
            if message is not None:
                return [run_client_app(self._client_app, message, self._contexts[message.metadata.dst_node_id])]
        return []

    def settle(self) -> None:
        """Return when what clients keep is in their files; raises what prevented that."""
        if self._store:
            self._store.flush()


def run_local(overrides: Sequence[str], *, num_clients: int, machine: MachineSettings) -> None:
    """Run the app to its end in this process; what it raises is raised.

    ``machine`` are the clients' device and threads.
    """
    on_gpu = select_device(machine.device).type != "cpu"  # which one process had better not ask for two things at once
    with WriteBehind() as store:
        grid = LocalGrid(load_client_app(), num_clients=num_clients, store=store)
        run_server_app(grid, overrides, terminal=True, client_cores=None if on_gpu else machine.threads)
