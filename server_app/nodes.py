"""Discovery of clients: which node of the federation is which client.

In a simulation a client is a partition, and the number of nodes must be ``num_clients``. An edge client has local
images and a name: the one under which its key was registered, or else the one in its node configuration. It gets an id
for the whole run.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedssl.errors import InputError, RunError
from fedssl.logs import log
from fedssl.safe_io import sanitize_line
from fedssl.wire.device import differences, incompatibility
from fedssl.wire.identity import NodeInfo, read_node_info
from server_app.console import log_while_waiting
from server_app.messaging import ClientMessenger

DISCOVERY_GRACE_SECONDS = 10.0  # seconds without a new node after which a federation is complete
IDENTIFY_TIMEOUT = 60.0  # seconds in which a device that joins later must reply
# Predicates of nodes that cannot participate.
NO_REPLY, FAILED, NO_DEVICE = "did not reply", "failed: ", "is not a device"
REJECTED_INTERVAL = 300.0  # seconds after which a device that cannot participate is retried

NodeNames = Callable[[], Mapping[int, str]]  # returns the names under which keys were registered, by node id


@dataclass(frozen=True, kw_only=True)
class ClientDirectory:
    """The clients of a run. In a simulation a client id is a partition id."""

    nodes: Mapping[int, int]  # ids of available nodes by client id
    client_ids: Mapping[str, int] = field(default_factory=dict)  # of edge clients by name, also of unavailable ones
    info: Mapping[int, NodeInfo] = field(default_factory=dict)  # of the nodes of edge clients
    rejected: Mapping[int, str] = field(default_factory=dict)  # reasons of nodes that cannot participate


def no_registered_names() -> Mapping[int, str]:
    """Return no names: of nodes without keys."""
    return {}


@runtime_checkable
class PartitionedGrid(Protocol):
    """Grid of a simulation that knows which node has which partition, so that no node has to be asked."""

    def partition_nodes(self) -> Mapping[int, int]:
        """Return the ids of all nodes by partition id."""
        ...


def discover_clients(
    grid: Grid,
    num_clients: int,
    *,
    timeout: float,
    known_client_ids: Mapping[str, int] | None = None,
    node_names: NodeNames = no_registered_names,
) -> ClientDirectory:
    """Request the info of all nodes, unless the grid has it, and return the clients.

    A simulation has ``num_clients`` nodes. With edge clients, discovery waits until there are that many, or no more
    join. Nodes of a simulation reply after their processes have started, which is slow on a busy machine: ``timeout``
    is the time in seconds to wait for the next reply. ``known_client_ids`` are the edge clients of a resumed run.
    """
    if isinstance(grid, PartitionedGrid):
        return ClientDirectory(nodes=grid.partition_nodes())
    info, errors = _info_of(grid, _wait_for_nodes(grid, num_clients, timeout=timeout), timeout=timeout)
    num_devices = sum(each.partitions is None for each in info.values())
    if not num_devices:
        return ClientDirectory(nodes=_partition_directory(info, errors, num_clients, timeout=timeout))
    simulated = [node for node, each in info.items() if each.partitions is not None]
    if len(simulated) >= num_devices:
        raise InputError(
            f"{num_devices} nodes are devices and {len(simulated)} are simulated clients, such as node {simulated[0]}; "
            "run either with devices or in a simulation"
        )
    errors |= dict.fromkeys(simulated, NO_DEVICE)
    info = {node: each for node, each in info.items() if each.partitions is None}
    directory = ClientDirectory(nodes={}, client_ids=known_client_ids or {})
    directory = add_devices(directory, info, errors, names=node_names())
    if not directory.nodes:
        reasons = "; ".join(f"node {node} {reason}" for node, reason in directory.rejected.items())
        raise InputError(f"no device can participate: {reasons}")
    return directory


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
    raise _no_reply(len(nodes), timeout=timeout)


class ClientManager:
    """Available clients from round to round: devices join and leave, simulated clients stay.

    A device that returns is retried, because it may have been upgraded. ``timeout`` is the time in seconds to wait
    for a device that is needed.
    """

    def __init__(
        self,
        grid: Grid,
        clients: ClientDirectory,
        *,
        timeout: float,
        node_names: NodeNames = no_registered_names,
    ) -> None:
        self._grid, self._timeout, self._node_names = grid, timeout, node_names
        self._retry_at = time.monotonic() + REJECTED_INTERVAL
        self.clients = clients
        self._available = {*clients.nodes.values(), *clients.rejected}  # when they were last listed

    def wait_for(self, min_clients: int) -> ClientDirectory:
        """Wait for ``min_clients`` clients, and return all that are available; raises `RunError` after the timeout."""
        if not self.clients.client_ids:
            return self.clients
        last = time.monotonic() + self._timeout
        with log_while_waiting(f"a round needs {min_clients} available devices"):
            while True:
                available = list(self._grid.get_node_ids())
                self._add_new_nodes(available)
                nodes = {number: node for number, node in self.clients.nodes.items() if node in available}
                if len(nodes) >= min_clients:
                    return replace(self.clients, nodes=nodes)
                if time.monotonic() > last:
                    raise RunError(
                        f"{len(nodes)} devices are available and {min_clients} are needed (aggregation.min_updates); "
                        "start their SuperNodes, then resume the run"
                    )
                time.sleep(0.2)

    def _add_new_nodes(self, available: Sequence[int]) -> None:
        known_info, rejected = self.clients.info, dict(self.clients.rejected)
        # A restarted device without a key is another node, whose name is free when its earlier session has ended.
        ended = {known_info[node].name for node in self._available.difference(available) if node in known_info}
        for node in rejected.keys() & known_info.keys():
            if known_info[node].name in ended:
                del rejected[node]
        if time.monotonic() > self._retry_at:
            self._retry_at = time.monotonic() + REJECTED_INTERVAL
            rejected = {}
        self.clients = replace(self.clients, rejected=rejected)
        known = {*self.clients.nodes.values(), *self.clients.rejected} & self._available
        self._available = set(available)
        new = [node for node in available if node not in known]
        if not new:
            return
        found, errors = _info_of(self._grid, new, timeout=min(self._timeout, IDENTIFY_TIMEOUT))
        info = {node: each for node, each in found.items() if each.partitions is None}
        errors |= dict.fromkeys(found.keys() - info.keys(), NO_DEVICE)
        accepted = set(self.clients.nodes.values())
        errors = {node: why for node, why in errors.items() if why != NO_REPLY or node not in accepted}
        offline = {number: node for number, node in self.clients.nodes.items() if node not in available}
        before = replace(
            self.clients,
            nodes={
                number: node
                for number, node in self.clients.nodes.items()
                if node in available and node not in info and node not in errors
            },
            rejected={node: reason for node, reason in self.clients.rejected.items() if node not in new},
        )
        clients = add_devices(before, info, errors, names=self._node_names())
        for name, number in clients.client_ids.items():
            if number in clients.nodes and number not in before.nodes:
                log.info("device %d %s is available", number, name)
        self.clients = replace(clients, nodes={**offline, **clients.nodes})


def _no_reply(num_nodes: int, *, timeout: float) -> InputError:
    """Make the error for a federation without a reply, of which nobody knows whether its nodes are devices."""
    status = "fedssl-fleet list shows the status of devices"
    if not num_nodes:
        return InputError(f"no SuperNode has connected within {timeout:.0f} s; start the SuperNodes ({status})")
    return InputError(
        f"none of {num_nodes} SuperNodes replied within {timeout:.0f} s; check their processes ({status}), or set a "
        "longer reply_timeout"
    )


def _partition_directory(
    info: Mapping[int, NodeInfo], errors: Mapping[int, str], num_clients: int, *, timeout: float
) -> dict[int, int]:
    missing = [node for node, error in errors.items() if error == NO_REPLY]
    if failed := [error for error in errors.values() if error != NO_REPLY]:
        raise InputError(f"a client cannot start: {failed[0].removeprefix(FAILED)}")
    if not info:
        raise _no_reply(len(missing), timeout=timeout)
    if (size := len(info) + len(errors)) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {size} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={size}"
        )
    if missing:
        raise InputError(
            f"{len(missing)} of {num_clients} SuperNodes, such as {min(missing)}, did not reply within "
            f"{timeout:.0f} s; check their processes, or set a longer reply_timeout"
        )
    held = {int(each.partition or 0): node for node, each in info.items()}
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes have the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return {partition: held[partition] for partition in range(num_clients)}


def add_devices(
    directory: ClientDirectory,
    info: Mapping[int, NodeInfo],
    errors: Mapping[int, str],
    *,
    names: Mapping[int, str],
) -> ClientDirectory:
    """Return the directory with the nodes that replied. New devices get the next ids, in order.

    ``names`` are the registered names by node id, which replace those that nodes report. A node is rejected if it
    cannot participate, if its name is registered for the key of another node, or if another node has its name or
    partition as well. ``errors`` are predicates of nodes without info, such as "did not reply".
    """
    found = {node: replace(device, name=names.get(node, device.name)) for node, device in info.items()}
    others = [
        device for node, device in directory.info.items() if node in directory.nodes.values() and node not in found
    ]
    num_named = Counter(device.name for device in (*others, *found.values()))
    partitions = Counter(device.partition for device in (*others, *found.values()))
    owners = {name: node for node, name in names.items()}
    rejected = dict(errors)
    for node, device in found.items():
        if owners.get(device.name, node) != node:
            rejected[node] = (
                f"has the name {device.name}, under which the key of node {owners[device.name]} is registered"
            )
        elif num_named[device.name] > 1 and node not in names:
            rejected[node] = (
                f"has client-name={device.name} like another node; set a different one in each, or, if it was "
                "restarted, wait a minute until its old session ends"
            )
        elif partitions[device.partition] > 1 and device.partition is not None:
            rejected[node] = f"has partition-id={device.partition} like another node; set a different one in each"
        elif reason := device.problem or incompatibility(device.versions):
            rejected[node] = reason
    for node, reason in rejected.items():
        name = names.get(node) or (found[node].name if node in found else "")
        log.warning("node %d%s does not take part: it %s", node, f" {name}".rstrip(), reason)
    accepted = {device.name: node for node, device in found.items() if node not in rejected}
    for name, node in accepted.items():
        _log_properties(name, found[node])
    order = {name: (found[node].partition is None, found[node].partition or 0, name) for name, node in accepted.items()}
    client_ids = dict(directory.client_ids)
    for name in sorted(accepted.keys() - client_ids.keys(), key=order.__getitem__):
        client_ids[name] = max(client_ids.values(), default=-1) + 1
    return ClientDirectory(
        nodes={**directory.nodes, **{client_ids[name]: node for name, node in accepted.items()}},
        client_ids=client_ids,
        info={**directory.info, **found},
        rejected={**directory.rejected, **rejected},
    )


def _log_properties(name: str, info: NodeInfo) -> None:
    if other := differences(info.versions):
        log.info("device %s has other versions than the server: %s", name, other)
    if info.max_rank is not None:
        log.info("device %s trains low-rank factors of a rank up to %d (max-rank)", name, info.max_rank)


def _info_of(grid: Grid, nodes: Sequence[int], *, timeout: float) -> tuple[dict[int, NodeInfo], dict[int, str]]:
    """Return the info of nodes, and predicates of those without info, such as `NO_REPLY`."""
    info, errors = {}, dict.fromkeys(nodes, NO_REPLY)
    for node, reply in _identify(grid, nodes, timeout=timeout):
        if isinstance(reply, NodeInfo):
            info[node] = reply
            errors.pop(node, None)
        else:
            errors[node] = f"{FAILED}{reply}"
    return info, errors


def _identify(grid: Grid, nodes: Sequence[int], *, timeout: float) -> Iterator[tuple[int, NodeInfo | str]]:
    messages = [Message(RecordDict(), node, "query.node_info") for node in nodes]
    with log_while_waiting("no reply from clients yet: their processes are still starting"):
        for message, reply in ClientMessenger(grid).send_and_receive(messages, timeout=timeout):
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
