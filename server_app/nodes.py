"""Which node of the federation is which client.

In a simulation a client is a partition, and there must be as many nodes as the settings say. Devices bring their own
pictures: whoever answers is a client, by its name, under a number that stays its own as long as the run lives.
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
from fedssl.wire.messages import Who, read_who
from server_app.replies import receive

log = logging.getLogger("fedssl")

NODE_WAIT = 10.0  # seconds without a new node before a federation that has some counts as complete
ANSWER = 60.0  # seconds in which a device that comes later must say who it is


@dataclass(frozen=True, kw_only=True)
class Clients:
    """The clients of a run.

    Attributes
    ----------
    nodes : mapping of int to int
        Ids of the nodes that are there, by the numbers of the clients; in a simulation these are partition ids.
    numbers : mapping of str to int
        Of devices, by name, those that are not there included; empty in a simulation.
    """

    nodes: Mapping[int, int]
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Answers:
    """What nodes said of themselves, by node id, and what is wrong with the others; and who said nothing."""

    who: dict[int, Who] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    silent: dict[int, None] = field(default_factory=dict)


def find_clients(grid: Grid, num_clients: int, *, timeout: float, known: Mapping[str, int] | None = None) -> Clients:
    """Ask all nodes who they are.

    Parameters
    ----------
    grid : Grid
    num_clients : int
        How many nodes a simulation must have; devices are waited for until there are so many, or no more come.
    timeout : float
        Seconds to wait for the next answer. Nodes of a simulation answer once their processes have started, which takes
        long on a busy machine.
    known : mapping of str to int, optional
        Numbers that devices of the run have from before.

    Raises
    ------
    InputError
        A simulation has another number of nodes than ``num_clients``, or one of them does not answer or holds a wrong
        partition; nodes are of both kinds; devices cannot be told apart, or none can be used.
    """
    nodes = _wait_for_nodes(grid, num_clients, timeout=timeout)
    answers = _Answers(silent=dict.fromkeys(nodes))
    for node, found in _who(grid, nodes, timeout=timeout):
        answers.silent.pop(node, None)
        if isinstance(found, Who):
            answers.who[node] = found
        else:
            answers.wrong[node] = found
    devices = {node: who for node, who in answers.who.items() if who.partitions is None}
    if not devices:
        return Clients(nodes=_partitions(nodes, answers, num_clients, timeout=timeout))
    if len(devices) < len(answers.who):
        raise InputError(
            f"{len(devices)} nodes are devices and {len(answers.who) - len(devices)} are simulated clients; "
            "run either with devices or in a simulation"
        )
    for node in answers.silent:
        log.warning("node %d did not say who it is, and takes no part", node)
    for node, reason in answers.wrong.items():
        log.warning("node %d takes no part: %s", node, reason)
    return _devices(devices, known or {})


def federation_size(grid: Grid, *, timeout: float) -> int | None:
    """How many partitions there are, as the first node says; None: it is a device.

    Raises
    ------
    InputError
        No node answers, or none can start.
    """
    nodes = _wait_for_nodes(grid, 1, timeout=timeout)
    wrong = ""
    for _, found in _who(grid, nodes, timeout=timeout):
        if isinstance(found, Who):
            return found.partitions
        wrong = wrong or found
    if wrong:
        raise InputError(f"a client cannot start: {wrong}")
    raise InputError(f"no SuperNode answered within {timeout:.0f} s; see to their processes")


class Roll:
    """Who is there, from round to round: devices come and go, simulated clients stay.

    Parameters
    ----------
    grid : Grid
    clients : Clients
        Those at the start of the run.
    timeout : float
        Seconds to wait for a device that is needed.
    """

    def __init__(self, grid: Grid, clients: Clients, *, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self._asked = set(clients.nodes.values())
        self.clients = clients

    def call(self, least: int) -> Clients:
        """The clients that are there; waits until they are at least so many.

        Raises
        ------
        RunError
            They are fewer for longer than the timeout.
        """
        if not self.clients.numbers:
            return self.clients
        last = time.monotonic() + self._timeout
        with log_while_waiting(f"fewer devices are there than the {least} that a round needs"):
            while True:
                there = list(self._grid.get_node_ids())
                self._welcome([node for node in there if node not in self._asked])
                nodes = {number: node for number, node in self.clients.nodes.items() if node in there}
                if len(nodes) >= least:
                    return replace(self.clients, nodes=nodes)
                if time.monotonic() > last:
                    raise RunError(
                        f"{len(nodes)} devices are there and {least} are needed (updates.min_updates); start their "
                        "SuperNodes, then resume the run"
                    )
                time.sleep(0.2)

    def _welcome(self, new: Sequence[int]) -> None:
        """Ask new nodes who they are, and give them their numbers."""
        if not new:
            return
        self._asked.update(new)
        for node, who in _who(self._grid, new, timeout=min(self._timeout, ANSWER)):
            if not isinstance(who, Who) or who.partitions is not None:
                log.warning("node %d takes no part: %s", node, who if isinstance(who, str) else "it is no device")
                continue
            number = self.clients.numbers.get(who.name, _next(self.clients.numbers))
            former = self.clients.nodes.get(number)
            if former is not None and former in self._grid.get_node_ids():
                log.warning("node %d takes no part: node %d has client-name=%s as well", node, former, who.name)
                continue
            log.info("device %d %s is there", number, who.name)
            self.clients = Clients(
                nodes={**self.clients.nodes, number: node}, numbers={**self.clients.numbers, who.name: number}
            )


def _partitions(nodes: Sequence[int], answers: _Answers, num_clients: int, *, timeout: float) -> dict[int, int]:
    """Node ids by partition id, in order; node ids differ from run to run, partition ids do not."""
    if answers.wrong:
        raise InputError(f"a client cannot start: {next(iter(answers.wrong.values()))}")
    if len(nodes) != num_clients:
        raise InputError(
            f"num_clients={num_clients} but the federation has {len(nodes)} SuperNodes; "
            f"add --federation-config 'num-supernodes={num_clients}' or set num_clients={len(nodes)}"
        )
    if answers.silent:
        raise InputError(
            f"{len(answers.silent)} of {num_clients} SuperNodes, such as {min(answers.silent)}, did not say within "
            f"{timeout:.0f} s which partition they hold; see to their processes, or set a longer client_timeout"
        )
    held = {int(who.partition or 0): node for node, who in answers.who.items()}
    if sorted(held) != list(range(num_clients)):
        raise InputError(
            f"the nodes hold the partitions {sorted(held)} but 0 to {num_clients - 1} are needed, each once; "
            "set partition-id and num-partitions in the nodes' configuration"
        )
    return {partition: held[partition] for partition in range(num_clients)}


def _devices(devices: Mapping[int, Who], known: Mapping[str, int]) -> Clients:
    """The devices under their numbers; those that the run does not know yet get the next ones, in order."""
    for key, values in (
        ("client-name", [who.name for who in devices.values()]),
        ("partition-id", [who.partition for who in devices.values() if who.partition is not None]),
    ):
        value, count = Counter(values).most_common(1)[0] if values else (None, 0)
        if count > 1:
            raise InputError(f"{count} devices have {key}={value}; give each another one in its node's configuration")
    named = {who.name: node for node, who in devices.items()}
    places = {who.name: (who.partition is None, who.partition or 0, who.name) for who in devices.values()}
    numbers = dict(known)
    for name in sorted(named.keys() - known.keys(), key=places.__getitem__):
        numbers[name] = _next(numbers)
    return Clients(nodes={numbers[name]: node for name, node in named.items()}, numbers=numbers)


def _next(numbers: Mapping[str, int]) -> int:
    return max(numbers.values(), default=-1) + 1


def _who(grid: Grid, nodes: Sequence[int], *, timeout: float) -> Iterator[tuple[int, Who | str]]:
    """Node and what it is, or what is wrong with it, of each that answers."""
    messages = [Message(RecordDict(), node, "query.who") for node in nodes]
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
                yield node, read_who(reply)
            except Exception as error:  # whatever a peer may have put into a message
                yield node, sanitize_line(f"it answered what cannot be read ({type(error).__name__}: {error})")


def _wait_for_nodes(grid: Grid, number: int, *, timeout: float) -> list[int]:
    """All nodes; without any for ``timeout`` seconds none, and too few once no more have come for a while."""
    nodes = list(grid.get_node_ids())
    last_change = time.monotonic()
    with log_while_waiting("the federation has fewer SuperNodes than clients yet"):
        while len(nodes) < number and time.monotonic() - last_change < (NODE_WAIT if nodes else timeout):
            time.sleep(0.05)
            found = list(grid.get_node_ids())
            if len(found) != len(nodes):
                last_change = time.monotonic()
            nodes = found
    return nodes
