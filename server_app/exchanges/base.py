"""The interface of exchanges, which send the messages of a round and return the replies, and its data types."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flwr.app import Message

from fedssl.availability import Workload
from fedssl.errors import RunError
from fedssl.logs import log
from fedssl.wire.messages import NO_REPLY
from server_app.exchanges.sums import RemoteSum, SummedContent, SummedUpdate, SumTask
from server_app.policies import LoopPolicy
from server_app.updates import RoundResult
from strategies.round_start import StartingModel
from strategies.types import Aggregator


class TooFewUpdatesError(RunError):
    """A round has fewer usable updates than it needs; ``dropped`` are reasons by client."""

    def __init__(self, message: str, *, dropped: Mapping[int, str]) -> None:
        super().__init__(message)
        self.dropped = dropped


@dataclass(frozen=True)
class Reply:
    """The reply of a client to this round's plan."""

    client: int
    message: Message


@dataclass(frozen=True)
class Lost:
    """A client without a usable reply."""

    client: int
    reason: str


@dataclass(frozen=True)
class Sum:
    """The sum of several clients' updates. They count as lost if it is."""

    total: RemoteSum
    updates: dict[int, SummedUpdate] = field(default_factory=dict)  # by client


@dataclass(frozen=True)
class Late:
    """A plan of an earlier round and the reply to it."""

    plan: Message
    message: Message

    def order(self) -> tuple[int, int]:
        return int(self.plan.metadata.group_id), self.plan.metadata.dst_node_id


Received = Reply | Lost | Sum | Late


@dataclass(frozen=True, kw_only=True)
class SentRound:
    """A round that is to be sent, and what exchanges need of it. The two callables are for those that use them."""

    round: int
    messages: Sequence[Message]
    nodes: Mapping[int, int]  # client ids by node, of these messages
    clients: Mapping[int, int]  # client ids by node, of all available clients
    starts: Mapping[str, StartingModel]
    aggregators: Mapping[str, Aggregator]
    policy: LoopPolicy
    timeout: float  # seconds without a reply after which missing clients are lost
    sum_task: Callable[[], SumTask | None]  # None: the server needs each update
    workloads: Callable[[], Mapping[int, Workload]]  # of the clients by node


class Exchange:
    """Exchange of all rounds of a run, by default with clients that are always online and a run that saves nothing.

    ``without`` is the setting that replaces it by an exchange of one message per client and round, in wall-clock time.
    """

    without: ClassVar[str] = ""

    def in_flight(self, *, timeout: float) -> set[int]:
        """Return the nodes whose reply to an earlier plan is still awaited, for at most ``timeout`` seconds."""
        return set()

    def offline(self, clients: Callable[[], Collection[int]], *, needed: int, wanted: int) -> frozenset[int]:
        """Return the clients that cannot be sampled, after waiting until ``needed`` others are online.

        ``clients`` returns those that are not in flight, and ``wanted`` is the number that a round samples.
        """
        return frozenset()

    def replies(self, sent: SentRound) -> Iterator[Received]:
        """Send the messages and yield what is received, replies and sums in order of the clients.

        Raises `TooFewUpdatesError`. An item is a whole model: release it before the next one is requested.
        """
        raise NotImplementedError

    def record(self, result: RoundResult) -> RoundResult:
        """Return the result of the last round with what this exchange has measured."""
        return result

    def flush(self) -> None:
        """Wait until the states of clients of this process are in their files. Other clients wait themselves."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves of the exchange. Messages to devices are not known to a new process."""
        return {}

    def restore(self, saved: Mapping[str, Any], *, settings: str) -> None:
        """Restore a `snapshot` of a run that now sends these settings, see `TrainPlan`; its folder may have moved."""


def in_client_order(
    replies: Iterable[Message], sent: SentRound, *, is_lost: Callable[[int], bool] = lambda client: True
) -> Iterator[Reply | Lost | Sum]:
    """Yield replies to the messages of a round in order of the clients. Failed clients are lost, in any order.

    Clients without a reply are lost if ``is_lost``, which is called after the last reply.
    """
    return _joined(_ordered(replies, sent, is_lost=is_lost))


def _ordered(replies: Iterable[Message], sent: SentRound, *, is_lost: Callable[[int], bool]) -> Iterator[Reply | Lost]:
    clients = deque(sorted(sent.nodes.values()))
    expected = set(clients)
    waiting: dict[int, Message] = {}
    client_of: dict[str, int] = {}
    for reply in replies:
        if reply.metadata.reply_to_message_id not in client_of:  # messages have an id once they are sent
            client_of = {
                message.metadata.message_id: sent.nodes[message.metadata.dst_node_id] for message in sent.messages
            }
        # An error reply that Flower itself creates has the server's node id, so only the message identifies the client.
        client = client_of.get(reply.metadata.reply_to_message_id, -1)
        if client not in expected or client in waiting:
            log.warning("an unexpected reply of node %d is ignored", reply.metadata.src_node_id)
        elif reply.has_error():
            expected.remove(client)
            yield Lost(client, f"it failed: {reply.error.reason}")
        else:
            waiting[client] = reply
        del reply  # a streamed reply is a whole model: free it before the next one is created
        while clients and (clients[0] in waiting or clients[0] not in expected):
            client = clients.popleft()
            if client in waiting:
                expected.remove(client)
                yield Reply(client, waiting.pop(client))
    for client in clients:
        if client in waiting:
            yield Reply(client, waiting.pop(client))
        elif client in expected and is_lost(client):
            yield Lost(client, NO_REPLY)


def _joined(items: Iterable[Reply | Lost]) -> Iterator[Reply | Lost | Sum]:
    """Join consecutive replies whose updates are in the same sum. Its process has rejected invalid ones."""
    current: Sum | None = None
    for item in items:
        content = item.message.content if isinstance(item, Reply) and not item.message.has_error() else None
        if isinstance(content, SummedContent):
            if isinstance(content.summed, str):
                yield Lost(item.client, content.summed)
                continue
            if current is not None and current.total is not content.total:
                yield current
                current = None
            current = current or Sum(content.total)
            current.updates[item.client] = content.summed
            continue
        if current is not None and isinstance(item, Reply):
            yield current
            current = None
        held = [item]
        del item, content
        yield held.pop()  # a reply is a whole model: hold no reference to it
    if current is not None:
        yield current
