"""Engine ``local``: a Flower ``Grid`` in one process, which runs the unchanged ServerApp and ClientApp.

A client runs when its reply is pulled, so replies stream one by one and a round of any size has one of them in memory.
"""

from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.clientapp import ClientApp

from client_app.simulated import SimulationMarker
from client_app.store import WriteBehind
from fedssl.config.settings import MachineSettings
from fedssl.machine.devices import pick_device
from simulation.grid import (
    SimulatedGrid,
    assign_message_id,
    load_client_app,
    make_context,
    run_client_app,
    run_server_app,
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
    on_gpu = pick_device(machine.device).type != "cpu"  # which one process had better not ask for two things at once
    with WriteBehind() as store:
        grid = LocalGrid(load_client_app(), num_clients=num_clients, store=store)
        run_server_app(grid, overrides, terminal=True, client_cores=None if on_gpu else machine.threads)
