"""Which node of the federation is which client."""

import time

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import InputError
from fedssl.messages import read_who
from server_app.replies import receive

NODE_WAIT = 10.0
"""Seconds without a new node before the federation counts as complete."""


def find_nodes(grid: Grid, num_clients: int) -> list[int]:
    """Node ids in the order of their partition ids; node ids differ from run to run, partition ids do not.

    Raises
    ------
    InputError
        The federation has another number of nodes than ``num_clients``.
    """
    nodes = _wait_for_nodes(grid, num_clients)
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    messages = [Message(RecordDict(), node, "query.who") for node in nodes]
    held = {}
    for reply in receive(grid, messages, timeout=60):
        if reply.has_error():
            raise InputError(f"a client cannot start: {reply.error.reason}")
        held[read_who(reply)[0]] = reply.metadata.src_node_id
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes hold the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return [held[partition] for partition in range(num_clients)]


def _wait_for_nodes(grid: Grid, num_clients: int) -> list[int]:
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    while len(nodes) < num_clients and time.monotonic() - last_change < NODE_WAIT:
        time.sleep(0.05)
        found = list(grid.get_node_ids())
        if len(found) != len(nodes):
            last_change = time.monotonic()
        nodes = found
    return nodes
