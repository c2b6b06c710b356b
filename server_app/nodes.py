"""Discovery of clients: which node of the federation is which client.

In a simulation a client is a partition, and the number of nodes must be ``num_clients``. An edge client has local
images and a name. It gets an id for the whole run.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import InputError, RunError
from fedssl.untrusted import sanitize_line
from fedssl.wire.identity import NodeInfo, read_node_info
from server_app.console import log_while_waiting
from server_app.messaging import MessageExchange

log = logging.getLogger("fedssl")

DISCOVERY_GRACE_SECONDS = 10.0  # seconds without a new node after which a federation is complete
IDENTIFY_TIMEOUT = 60.0  # seconds in which a device that joins later must reply


@dataclass(frozen=True, kw_only=True)
class ClientDirectory:
    """The clients of a run. In a simulation a client id is a partition id."""

    nodes: Mapping[int, int]  # ids of available nodes by client id
    client_ids: Mapping[str, int] = field(default_factory=dict)  # of edge clients by name, also of unavailable ones


@dataclass(frozen=True)
class _Replies:
    """Replies of nodes by node id: their info, errors, and nodes without a reply."""

    info: dict[int, NodeInfo] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    missing: dict[int, None] = field(default_factory=dict)


def discover_clients(
    grid: Grid, num_clients: int, *, timeout: float, known_client_ids: Mapping[str, int] | None = None
) -> ClientDirectory:
    """Request the info of all nodes and return the clients.

    A simulation has ``num_clients`` nodes. With edge clients, discovery waits until there are that many, or no more
    join. Nodes of a simulation reply after their processes have started, which is slow on a busy machine: ``timeout``
    is the time in seconds to wait for the next reply. ``known_client_ids`` are the edge clients of a resumed run.
    """
    nodes = _wait_for_nodes(grid, num_clients, timeout=timeout)
    replies = _Replies(missing=dict.fromkeys(nodes))
    for node, reply in _identify(grid, nodes, timeout=timeout):
        replies.missing.pop(node, None)
        if isinstance(reply, NodeInfo):
            replies.info[node] = reply
        else:
            replies.errors[node] = reply
    devices = {node: info for node, info in replies.info.items() if info.partitions is None}
    if not devices:
        return ClientDirectory(nodes=_partition_directory(nodes, replies, num_clients, timeout=timeout))
    if len(devices) < len(replies.info):
        raise InputError(
            f"{len(devices)} nodes are devices and {len(replies.info) - len(devices)} are simulated clients; "
            "run either with devices or in a simulation"
        )
    for node in replies.missing:
        log.warning("node %d did not reply and does not take part", node)
    for node, reason in replies.errors.items():
        log.warning("node %d does not take part: %s", node, reason)
    return _edge_directory(devices, known_client_ids or {})


def federation_size(grid: Grid, *, timeout: float) -> int | None:
    """Return the number of partitions that the first node reports; None if it is a device."""
    nodes = _wait_for_nodes(grid, 1, timeout=timeout)
    error = ""
    for _, reply in _identify(grid, nodes, timeout=timeout):
        if isinstance(reply, NodeInfo):
            return reply.partitions
        error = error or reply
    if error:
        raise InputError(f"a client cannot start: {error}")
    raise InputError(f"no SuperNode replied within {timeout:.0f} s; check their processes")


class ClientManager:
    """Available clients from round to round: devices join and leave, simulated clients stay.

    ``timeout`` is the time in seconds to wait for a device that is needed.
    """

    def __init__(self, grid: Grid, clients: ClientDirectory, *, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self._requested = set(clients.nodes.values())
        self.clients = clients

    def wait_for(self, min_clients: int) -> ClientDirectory:
        """Wait for ``min_clients`` clients, and return all that are available; raises `RunError` after the timeout."""
        if not self.clients.client_ids:
            return self.clients
        last = time.monotonic() + self._timeout
        with log_while_waiting(f"fewer devices are available than the {min_clients} that a round needs"):
            while True:
                available = list(self._grid.get_node_ids())
                self._register_new_nodes([node for node in available if node not in self._requested])
                nodes = {number: node for number, node in self.clients.nodes.items() if node in available}
                if len(nodes) >= min_clients:
                    return replace(self.clients, nodes=nodes)
                if time.monotonic() > last:
                    raise RunError(
                        f"{len(nodes)} devices are available and {min_clients} are needed (aggregation.min_updates); "
                        "start their SuperNodes, then resume the run"
                    )
                time.sleep(0.2)

    def _register_new_nodes(self, new: Sequence[int]) -> None:
        if not new:
            return
        self._requested.update(new)
        for node, info in _identify(self._grid, new, timeout=min(self._timeout, IDENTIFY_TIMEOUT)):
            if not isinstance(info, NodeInfo) or info.partitions is not None:
                reason = info if isinstance(info, str) else "it is not a device"
                log.warning("node %d does not take part: %s", node, reason)
                continue
            number = self.clients.client_ids.get(info.name, _next_number(self.clients.client_ids))
            former = self.clients.nodes.get(number)
            if former is not None and former in self._grid.get_node_ids():
                log.warning("node %d does not take part: node %d has client-name=%s as well", node, former, info.name)
                continue
            log.info("device %d %s is available", number, info.name)
            self.clients = ClientDirectory(
                nodes={**self.clients.nodes, number: node}, client_ids={**self.clients.client_ids, info.name: number}
            )


def _partition_directory(
    nodes: Sequence[int], replies: _Replies, num_clients: int, *, timeout: float
) -> dict[int, int]:
    """Return node ids by partition id, in order. Node ids differ between runs, partition ids do not."""
    if replies.errors:
        raise InputError(f"a client cannot start: {next(iter(replies.errors.values()))}")
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    if replies.missing:
        raise InputError(
            f"{len(replies.missing)} of {num_clients} SuperNodes, such as {min(replies.missing)}, did not reply within "
            f"{timeout:.0f} s; check their processes, or set a longer reply_timeout"
        )
    held = {int(info.partition or 0): node for node, info in replies.info.items()}
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes have the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return {partition: held[partition] for partition in range(num_clients)}


def _edge_directory(devices: Mapping[int, NodeInfo], known_client_ids: Mapping[str, int]) -> ClientDirectory:
    """Return the devices by id. New devices get the next ids, in order."""
    for key, values in (
        ("client-name", [info.name for info in devices.values()]),
        ("partition-id", [info.partition for info in devices.values() if info.partition is not None]),
    ):
        value, count = Counter(values).most_common(1)[0] if values else (None, 0)
        if count > 1:
            raise InputError(f"{count} devices have {key}={value}; set a different one in each node's configuration")
    named = {info.name: node for node, info in devices.items()}
    order = {info.name: (info.partition is None, info.partition or 0, info.name) for info in devices.values()}
    client_ids = dict(known_client_ids)
    for name in sorted(named.keys() - known_client_ids.keys(), key=order.__getitem__):
        client_ids[name] = _next_number(client_ids)
    return ClientDirectory(nodes={client_ids[name]: node for name, node in named.items()}, client_ids=client_ids)


def _next_number(client_ids: Mapping[str, int]) -> int:
    return max(client_ids.values(), default=-1) + 1


def _identify(grid: Grid, nodes: Sequence[int], *, timeout: float) -> Iterator[tuple[int, NodeInfo | str]]:
    """Yield each node that replies, with its info or an error."""
    messages = [Message(RecordDict(), node, "query.node_info") for node in nodes]
    with log_while_waiting("no reply from clients yet: their processes are still starting"):
        for message, reply in MessageExchange(grid).send_and_receive(messages, timeout=timeout):
            # An error that Flower itself creates has the server's node id, so only the message identifies the node.
            node = message.metadata.dst_node_id
            if reply.has_error():
                yield node, sanitize_line(reply.error.reason)
                continue
            try:
                yield node, read_node_info(reply)
            except Exception as error:  # whatever a peer may have put into a message
                yield node, sanitize_line(f"its reply cannot be read ({type(error).__name__}: {error})")


def _wait_for_nodes(grid: Grid, number: int, *, timeout: float) -> list[int]:
    """Wait for ``number`` nodes and return all. Stop early if no new one joins for a while."""
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    with log_while_waiting("the federation has fewer SuperNodes than clients yet"):
        while len(nodes) < number and time.monotonic() - last_change < (DISCOVERY_GRACE_SECONDS if nodes else timeout):
            time.sleep(0.05)
            current = list(grid.get_node_ids())
            if len(current) != len(nodes):
                last_change = time.monotonic()
            nodes = current
    return nodes
