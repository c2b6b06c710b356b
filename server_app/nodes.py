"""Which node of the federation is which client.

In a simulation a client is a partition, and there must be as many nodes as the settings say. Devices bring their own
images: whoever answers is a client, by its name, under a number that stays its own as long as the run lives.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import InputError, RunError
from fedssl.waiting import log_while_waiting, sanitize_line
from fedssl.wire.messages import NodeInfo, read_node_info
from server_app.messaging import receive

log = logging.getLogger("fedssl")

DISCOVERY_GRACE_SECONDS = 10.0  # seconds without a new node before a federation that has some counts as complete
IDENTIFY_TIMEOUT = 60.0  # seconds in which a device that comes later must say who it is


@dataclass(frozen=True, kw_only=True)
class ClientDirectory:
    """The clients of a run.

    Attributes
    ----------
    nodes : mapping of int to int
        Ids of the nodes that are there, by the numbers of the clients; in a simulation these are partition ids.
    client_ids : mapping of str to int
        Of devices, by name, those that are not there included; empty in a simulation.
    """

    nodes: Mapping[int, int]
    client_ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Replies:
    """What nodes said of themselves, by node id, and what is wrong with the others; and who said nothing."""

    info: dict[int, NodeInfo] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    missing: dict[int, None] = field(default_factory=dict)


def discover_clients(
    grid: Grid, num_clients: int, *, timeout: float, known_client_ids: Mapping[str, int] | None = None
) -> ClientDirectory:
    """Ask all nodes who they are.

    Parameters
    ----------
    grid : Grid
    num_clients : int
        How many nodes a simulation must have; devices are waited for until there are so many, or no more come.
    timeout : float
        Seconds to wait for the next answer. Nodes of a simulation answer once their processes have started, which takes
        long on a busy machine.
    known_client_ids : mapping of str to int, optional
        Numbers that devices of the run have from before.

    Raises
    ------
    InputError
        A simulation has another number of nodes than ``num_clients``, or one of them does not answer or holds a wrong
        partition; nodes are of both kinds; devices cannot be told apart, or none can be used.
    """
    nodes = _wait_for_nodes(grid, num_clients, timeout=timeout)
    replies = _Replies(missing=dict.fromkeys(nodes))
    for node, found in _identify(grid, nodes, timeout=timeout):
        replies.missing.pop(node, None)
        if isinstance(found, NodeInfo):
            replies.info[node] = found
        else:
            replies.errors[node] = found
    devices = {node: info for node, info in replies.info.items() if info.partitions is None}
    if not devices:
        return ClientDirectory(nodes=_partition_directory(nodes, replies, num_clients, timeout=timeout))
    if len(devices) < len(replies.info):
        raise InputError(
            f"{len(devices)} nodes are devices and {len(replies.info) - len(devices)} are simulated clients; "
            "run either with devices or in a simulation"
        )
    for node in replies.missing:
        log.warning("node %d did not say who it is, and takes no part", node)
    for node, reason in replies.errors.items():
        log.warning("node %d takes no part: %s", node, reason)
    return _edge_directory(devices, known_client_ids or {})


def federation_size(grid: Grid, *, timeout: float) -> int | None:
    """How many partitions there are, as the first node says; None: it is a device.

    Raises
    ------
    InputError
        No node answers, or none can start.
    """
    nodes = _wait_for_nodes(grid, 1, timeout=timeout)
    wrong = ""
    for _, found in _identify(grid, nodes, timeout=timeout):
        if isinstance(found, NodeInfo):
            return found.partitions
        wrong = wrong or found
    if wrong:
        raise InputError(f"a client cannot start: {wrong}")
    raise InputError(f"no SuperNode answered within {timeout:.0f} s; see to their processes")


class ClientManager:
    """Who is there, from round to round: devices come and go, simulated clients stay.

    Parameters
    ----------
    grid : Grid
    clients : ClientDirectory
        Those at the start of the run.
    timeout : float
        Seconds to wait for a device that is needed.
    """

    def __init__(self, grid: Grid, clients: ClientDirectory, *, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self._asked = set(clients.nodes.values())
        self.clients = clients

    def wait_for(self, min_clients: int) -> ClientDirectory:
        """The clients that are there; waits until they are at least so many.

        Raises
        ------
        RunError
            They are fewer for longer than the timeout.
        """
        if not self.clients.client_ids:
            return self.clients
        last = time.monotonic() + self._timeout
        with log_while_waiting(f"fewer devices are there than the {min_clients} that a round needs"):
            while True:
                there = list(self._grid.get_node_ids())
                self._register_new_nodes([node for node in there if node not in self._asked])
                nodes = {number: node for number, node in self.clients.nodes.items() if node in there}
                if len(nodes) >= min_clients:
                    return replace(self.clients, nodes=nodes)
                if time.monotonic() > last:
                    raise RunError(
                        f"{len(nodes)} devices are there and {min_clients} are needed "
                        "(aggregation.min_updates); start their "
                        "SuperNodes, then resume the run"
                    )
                time.sleep(0.2)

    def _register_new_nodes(self, new: Sequence[int]) -> None:
        """Ask new nodes who they are, and give them their numbers."""
        if not new:
            return
        self._asked.update(new)
        for node, info in _identify(self._grid, new, timeout=min(self._timeout, IDENTIFY_TIMEOUT)):
            if not isinstance(info, NodeInfo) or info.partitions is not None:
                log.warning("node %d takes no part: %s", node, info if isinstance(info, str) else "it is no device")
                continue
            number = self.clients.client_ids.get(info.name, _next_number(self.clients.client_ids))
            former = self.clients.nodes.get(number)
            if former is not None and former in self._grid.get_node_ids():
                log.warning("node %d takes no part: node %d has client-name=%s as well", node, former, info.name)
                continue
            log.info("device %d %s is there", number, info.name)
            self.clients = ClientDirectory(
                nodes={**self.clients.nodes, number: node}, client_ids={**self.clients.client_ids, info.name: number}
            )


def _partition_directory(
    nodes: Sequence[int], replies: _Replies, num_clients: int, *, timeout: float
) -> dict[int, int]:
    """Node ids by partition id, in order; node ids differ from run to run, partition ids do not."""
    if replies.errors:
        raise InputError(f"a client cannot start: {next(iter(replies.errors.values()))}")
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    if replies.missing:
        raise InputError(
            f"{len(replies.missing)} of {num_clients} SuperNodes, such as {min(replies.missing)}, did not say within "
            f"{timeout:.0f} s which partition they hold; see to their processes, or set a longer reply_timeout"
        )
    held = {int(info.partition or 0): node for node, info in replies.info.items()}
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes hold the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return {partition: held[partition] for partition in range(num_clients)}


def _edge_directory(devices: Mapping[int, NodeInfo], known_client_ids: Mapping[str, int]) -> ClientDirectory:
    """The devices under their numbers; those that the run does not know yet get the next ones, in order."""
    for key, values in (
        ("client-name", [info.name for info in devices.values()]),
        ("partition-id", [info.partition for info in devices.values() if info.partition is not None]),
    ):
        value, count = Counter(values).most_common(1)[0] if values else (None, 0)
        if count > 1:
            raise InputError(f"{count} devices have {key}={value}; give each another one in its node's configuration")
    named = {info.name: node for node, info in devices.items()}
    places = {info.name: (info.partition is None, info.partition or 0, info.name) for info in devices.values()}
    client_ids = dict(known_client_ids)
    for name in sorted(named.keys() - known_client_ids.keys(), key=places.__getitem__):
        client_ids[name] = _next_number(client_ids)
    return ClientDirectory(nodes={client_ids[name]: node for name, node in named.items()}, client_ids=client_ids)


def _next_number(client_ids: Mapping[str, int]) -> int:
    return max(client_ids.values(), default=-1) + 1


def _identify(grid: Grid, nodes: Sequence[int], *, timeout: float) -> Iterator[tuple[int, NodeInfo | str]]:
    """Node and what it is, or what is wrong with it, of each that answers."""
    messages = [Message(RecordDict(), node, "query.node_info") for node in nodes]
    asked: dict[str, int] = {}
    with log_while_waiting("clients do not answer yet: their processes are still starting"):
        for reply in receive(grid, messages, timeout=timeout):
            # An error that Flower itself makes bears the server's node id, so only the message tells the node.
            asked = asked or {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is None:
                continue
            if reply.has_error():
                yield node, sanitize_line(reply.error.reason)
                continue
            try:
                yield node, read_node_info(reply)
            except Exception as error:  # whatever a peer may have put into a message
                yield node, sanitize_line(f"it answered what cannot be read ({type(error).__name__}: {error})")


def _wait_for_nodes(grid: Grid, number: int, *, timeout: float) -> list[int]:
    """All nodes; without any for ``timeout`` seconds none, and too few once no more have come for a while."""
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    with log_while_waiting("the federation has fewer SuperNodes than clients yet"):
        while len(nodes) < number and time.monotonic() - last_change < (DISCOVERY_GRACE_SECONDS if nodes else timeout):
            time.sleep(0.05)
            found = list(grid.get_node_ids())
            if len(found) != len(nodes):
                last_change = time.monotonic()
            nodes = found
    return nodes
