"""Which node of the federation is which client."""

import logging
import time
from collections.abc import Iterator, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import InputError
from fedssl.messages import read_who
from fedssl.saying import saying
from server_app.replies import receive

log = logging.getLogger("fedssl")

NODE_WAIT = 10.0  # seconds without a new node before a federation that has some counts as complete


def find_nodes(grid: Grid, num_clients: int, *, timeout: float) -> list[int]:
    """Node ids in the order of their partition ids; node ids differ from run to run, partition ids do not.

    Parameters
    ----------
    grid : Grid
    num_clients : int
    timeout : float
        Seconds to wait for the next answer. Nodes of a simulation answer once their processes have started, which takes
        long on a busy machine.

    Raises
    ------
    InputError
        The federation has another number of nodes than ``num_clients``, or one of them does not answer or holds a wrong
        partition.
    """
    nodes = _wait_for_nodes(grid, num_clients, timeout=timeout)
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    held: dict[int, int] = {}
    silent = dict.fromkeys(nodes)
    for node, partition, _ in _who(grid, nodes, timeout=timeout):
        held[partition] = node
        silent.pop(node)
    if silent:
        raise InputError(
            f"{len(silent)} of {num_clients} SuperNodes, such as {min(silent)}, did not say within {timeout:.0f} s "
            "which partition they hold; see to their processes, or set a longer client_timeout"
        )
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes hold the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return [held[partition] for partition in range(num_clients)]


def federation_size(grid: Grid, *, timeout: float) -> int:
    """How many partitions there are, as the first node says; raises `InputError` without an answer."""
    nodes = _wait_for_nodes(grid, 1, timeout=timeout)
    for _, _, size in _who(grid, nodes[:1], timeout=timeout):
        return size
    raise InputError(f"no SuperNode answered within {timeout:.0f} s; see to their processes")


def _who(grid: Grid, nodes: Sequence[int], *, timeout: float) -> Iterator[tuple[int, int, int]]:
    """Node, its partition and how many there are, of each that answers."""
    messages = [Message(RecordDict(), node, "query.who") for node in nodes]
    with saying("clients do not answer yet: their processes are still starting"):
        for reply in receive(grid, messages, timeout=timeout):
            if reply.has_error():
                raise InputError(f"a client cannot start: {reply.error.reason}")
            yield (reply.metadata.src_node_id, *read_who(reply))


def _wait_for_nodes(grid: Grid, number: int, *, timeout: float) -> list[int]:
    """All nodes; without any for ``timeout`` seconds none, and too few once no more have come for a while."""
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    with saying("the federation has fewer SuperNodes than clients yet"):
        while len(nodes) < number and time.monotonic() - last_change < (NODE_WAIT if nodes else timeout):
            time.sleep(0.05)
            found = list(grid.get_node_ids())
            if len(found) != len(nodes):
                last_change = time.monotonic()
            nodes = found
    return nodes
