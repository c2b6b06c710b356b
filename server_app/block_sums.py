"""Sums of blocks of clients, computed in the processes that trained them (engine ``ray``).

Such a process validates an update as the server does, and adds those of consecutive clients of a block
(`strategies.weighted_sum.block_size`). The server receives the sum once instead of one model per client. Additions
have the same order in every engine, so all results are bit-identical.

Only the process of the server creates a `SummedContent`. No message from a network can contain one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from flwr.app import Message, RecordDict

from fedssl.arrays import Cosines, ReferenceLayers
from fedssl.wire.messages import ClientUpdate
from fedssl.wire.records import content_bytes
from server_app.validation import InvalidUpdate, UpdateValidator
from strategies.weighted_sum import PartialSum, WeightedSum


@dataclass(frozen=True)
class BlockClient:
    """A client of a round: its block, the layers that it received, and the round of its newest state, or 0."""

    client: int
    block: int
    downloaded: tuple[str, ...]
    saved_round: int


@dataclass(frozen=True)
class SummedUpdate:
    """An update that is part of a sum: its metrics, cosines and size in bytes, without its layers."""

    update: ClientUpdate
    cosines: Cosines
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class BlockSumTask:
    """Task of another process: sum the updates of its clients in a round. Picklable."""

    round: int
    attempt: int
    validator: UpdateValidator
    expected: ReferenceLayers  # the layers that clients send, as they received them
    aggregator: WeightedSum
    clients: Mapping[int, BlockClient]  # by node

    def add(self, aggregator: WeightedSum, reply: Message) -> SummedUpdate | None:
        """Validate a client's reply and add its update to a sum; None if it is invalid."""
        node = reply.metadata.src_node_id
        one = self.clients[node]
        try:
            update, cosines = self.validator.read(
                reply,
                client=one.client,
                node=node,
                round=self.round,
                downloaded=one.downloaded,
                expected=self.expected,
                saved_round=one.saved_round,
            )
        except InvalidUpdate:  # the server reads it again, and reports the reason
            return None
        aggregator.add(update, cosines)
        return SummedUpdate(replace(update, layers={}), cosines, content_bytes(reply.content))


class LostSumError(Exception):
    """The sum of a block is lost with its process. The message is the reason."""


class BlockSum(Protocol):
    """Sum of the first clients of a block, in another process."""

    def get(self) -> PartialSum:
        """Return the sum after all of its clients have replied; raises `LostSumError`."""
        ...


class SummedContent(RecordDict):
    """Content of the reply of a client whose update is part of ``block_sum``."""

    def __init__(self, summed: SummedUpdate, block_sum: BlockSum) -> None:
        super().__init__()
        self.summed, self.block_sum = summed, block_sum
