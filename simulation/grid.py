"""Flower's ``Grid`` for simulations: the common part of the engines, and the engine ``local``, in one process."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from client_app.simulated import MARKER_KEY, SimulationMarker
from client_app.state_store import FILE_STORE, StateStore, WriteBehind
from fedssl.flower_internals import RUN_ID, SERVER_NODE, Run, assign_message_id, error_reply, set_task_identity
from fedssl.logs import log
from fedssl.machine.devices import is_gpu
from server_app.nodes import ClientDirectory

if TYPE_CHECKING:  # a slow import, which clients do not need
    from server_app.build import RunComponents


def simulated_clients(num_clients: int) -> ClientDirectory:
    """Return the clients of a simulation, whose ids are fixed: the k-th node has partition k."""
    return ClientDirectory(nodes={client: SERVER_NODE + 1 + client for client in range(num_clients)})


class SimulatedGrid(Grid):
    """A federation of ``num_clients`` nodes. The ids are fixed, and the k-th node has partition k."""

    def __init__(self, *, num_clients: int) -> None:
        self.num_clients = num_clients
        set_task_identity()

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes in the order of their partitions."""
        return list(simulated_clients(self.num_clients).nodes.values())

    def partition_nodes(self) -> Mapping[int, int]:
        """Return the ids of all nodes by partition id."""
        return simulated_clients(self.num_clients).nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Yield replies in order of arrival."""
        pending = dict.fromkeys(self.push_messages(messages))
        while pending:
            for reply in self.pull_messages(pending):
                del pending[reply.metadata.reply_to_message_id]
                yield reply

    def set_run(self, run: Run) -> None:
        """Do nothing: a simulation has one run."""

    @property
    def run(self) -> Run:
        """Return an empty run, which Flower's interface requires."""
        return Run.create_empty(run_id=RUN_ID)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a message. Flower has deprecated this method."""
        return Message(*args, **kwargs)


class NodeContexts(dict[int, Context]):
    """Contexts of nodes by id, created when a node is first used: a round needs those of its participants only.

    Client state is in ``store``.
    """

    def __init__(self, *, num_clients: int, store: StateStore = FILE_STORE) -> None:
        super().__init__()
        self._num_clients, self._store = num_clients, store

    def __missing__(self, node: int) -> Context:
        self[node] = context = Context(
            run_id=RUN_ID,
            node_id=node,
            # Flower's type allows only values of a command line. The marker must not be one.
            node_config={
                "partition-id": node - SERVER_NODE - 1,
                "num-partitions": self._num_clients,
                MARKER_KEY: SimulationMarker(self._store),  # type: ignore[dict-item]  # see above
            },
            state=RecordDict(),
            run_config={},
        )
        return context


def run_client_app(client_app: ClientApp, message: Message, context: Context) -> Message:
    """Return the client's reply, which is an error reply if it failed."""
    try:
        return client_app(message, context)
    except (Exception, SystemExit) as error:  # the server handles a failed client, also after a user's sys.exit()
        log.debug("client of node %d failed", message.metadata.dst_node_id, exc_info=True)
        return error_reply(message, f"{type(error).__name__}: {error}")


def load_client_app() -> ClientApp:
    """Return the ClientApp of this project."""
    import client_app.handlers  # noqa: F401, slow import, which the app leaves to the first message
    from client_app.app import app

    return app


class LocalGrid(SimulatedGrid):
    """Nodes whose clients run one after the other in this process. ``store`` has client state in memory."""

    def __init__(self, client_app: ClientApp, *, num_clients: int, store: WriteBehind | None = None) -> None:
        super().__init__(num_clients=num_clients)
        self._client_app, self._store = client_app, store
        self._contexts = NodeContexts(num_clients=num_clients, store=store or FILE_STORE)
        self._queue: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Replace the queue by these messages. Nothing runs yet."""
        self._queue = {assign_message_id(message): message for message in messages}
        return list(self._queue)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the client of the first of these messages that is queued, and return its reply."""
        for message_id in message_ids:
            message = self._queue.pop(message_id, None)
            if message is not None:
                return [run_client_app(self._client_app, message, self._contexts[message.metadata.dst_node_id])]
        return []

    def flush(self) -> None:
        """Write the clients' state to files, and raise the errors of earlier writes."""
        if self._store:
            self._store.flush()


def run_local(components: "RunComponents", records: Sequence[logging.LogRecord] = ()) -> None:
    """Run server and clients in this process. ``records`` were logged before."""
    from server_app.app import execute  # slow import

    settings = components.settings
    on_gpu = is_gpu(components.context.device)  # a process must not use it for two tasks at once
    with WriteBehind() as store:
        grid = LocalGrid(load_client_app(), num_clients=settings.num_clients, store=store)
        client_cores = None if on_gpu else settings.machine.threads
        execute(grid, components, records=records, terminal=True, client_cores=client_cores)
