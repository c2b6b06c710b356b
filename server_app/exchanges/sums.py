"""Sums of updates, computed in the processes that trained the clients (engine ``ray``).

Such a process validates an update as the server does, and adds those of the first clients of a block
(`strategies.types.Mergeable`). The server receives the sum once instead of one model per client. Additions
have the same order in every engine, so all results are bit-identical.

Only the process of the server creates a `SummedContent`. No message from a network can contain one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flwr.app import Message, RecordDict

from fedssl.arrays import Cosines, GlobalLayers
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.records import content_bytes
from server_app.validation import InvalidUpdate, UpdateValidator, read_model_index
from strategies.types import Mergeable


@dataclass(frozen=True)
class SumClient:
    """A client of a round: the layers that it received, and the round of its newest state, or 0."""

    client: int
    downloaded: tuple[str, ...]
    saved_round: int


@dataclass(frozen=True)
class SummedUpdate:
    """An update that is part of a sum: its metrics, cosines and size in bytes, without its layers."""

    update: ClientUpdate
    cosines: Cosines
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class SumTask:
    """Task of another process: sum the updates of its clients in a round. Picklable."""

    round: int
    attempt: int
    validator: UpdateValidator
    expected: GlobalLayers  # the layers that clients send, as they received them
    aggregator: Mergeable
    clients: Mapping[int, SumClient]  # by node

    def block_of(self, node: int) -> int:
        return self.aggregator.block_of(self.clients[node].client)

    def add(self, aggregator: Mergeable, reply: Message) -> SummedUpdate | str:
        """Validate a client's reply and add its update to a sum, or return why it is invalid."""
        node = reply.metadata.src_node_id
        client = self.clients[node]
        try:
            read_model_index(reply, num_models=1)
            update, cosines = self.validator.read(
                reply,
                client=client.client,
                node=node,
                round=self.round,
                downloaded=client.downloaded,
                expected=self.expected,
                saved_round=client.saved_round,
            )
        except InvalidUpdate as reason:
            return str(reason)
        aggregator.add(update, cosines)
        return SummedUpdate(replace(update, layers={}), cosines, content_bytes(reply.content))


class LostSumError(Exception):
    """A sum is lost with its process. The message is the reason."""


class RemoteSum(Protocol):
    """Sum of the first clients of a block, in another process."""

    def get(self) -> Any:
        """Return the sum for `Mergeable.merge` after all of its clients have replied; raises `LostSumError`."""
        ...


class SummedContent(RecordDict):
    """Content of the reply of a client whose update is part of the sum ``total``, or the reason why it is not."""

    def __init__(self, summed: SummedUpdate | str, total: RemoteSum) -> None:
        super().__init__()
        self.summed, self.total = summed, total
