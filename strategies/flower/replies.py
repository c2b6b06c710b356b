"""Replies of any ClientApp as updates, or the sentence why one cannot be used."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict

from fedssl.arrays import GlobalLayers
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, TRAIN_LOSS, ClientUpdate
from strategies.flower.arrays import conform, public_name, read_layers
from strategies.flower.task import REPLY, ClientTask


class SetupError(InputError):
    """Error in the app or in an argument of the strategy, which every round would repeat."""


@dataclass(frozen=True)
class Reply:
    """A reply whose arrays fit the model."""

    node: int
    content: RecordDict
    update: ClientUpdate
    has_mod: bool  # whether the client has `client_mod`


@dataclass(frozen=True, kw_only=True)
class ReplyReader:
    """Reader of the replies of a round to a strategy, whose arguments ``.._key`` it has."""

    strategy: str  # name of its class
    task: ClientTask
    names: Collection[str]  # of all layers
    expected: GlobalLayers  # those to aggregate
    arrayrecord_key: str
    weighted_by_key: str
    loss_key: str
    required_metrics: Collection[str]
    needs_mod: bool

    def read(self, reply: Message) -> Reply:
        """Return the reply with its update. Raise `SetupError` or another `InputError` if it cannot be used."""
        if reply.has_error():
            raise InputError(f"error: {reply.error.reason}")
        content, node = reply.content, reply.metadata.src_node_id
        records = content.array_records
        if len(records) != 1 and self.arrayrecord_key not in records:
            raise SetupError(f"it has {len(records)} ArrayRecords; reply with one")
        record = records[self.arrayrecord_key] if self.arrayrecord_key in records else next(iter(records.values()))
        layers = read_layers(record, self.task.statistics)
        unknown = layers.keys() - set(self.names)
        if unknown:
            raise SetupError(f"array {public_name(min(unknown))} is not in the model; reply with the names received")
        try:
            layers = conform(layers, self.expected)
        except InputError as problem:
            hint = "; name arrays that stay on the clients in local=" if "missing" in str(problem) else ""
            raise SetupError(f"{problem}{hint}") from problem
        if self.needs_mod and REPLY not in content:
            raise SetupError(f"{self.strategy} needs ClientApp(mods=[client_mod]), `client_mod` of strategies.flower")
        metrics = {key: value for record in content.metric_records.values() for key, value in record.items()}
        weight = self._metric(metrics, "weighted_by_key", self.weighted_by_key, NUM_EXAMPLES)
        if weight is not None and weight <= 0:
            raise InputError(f"{self.weighted_by_key}={weight:g} is not positive")
        loss = self._metric(metrics, "loss_key", self.loss_key, TRAIN_LOSS)
        # A weight of Flower may be a fraction, which the sum supports.
        update = ClientUpdate(layers=layers, partition_id=0, num_examples=weight, train_loss=loss)  # type: ignore[arg-type]
        return Reply(node, content, update, REPLY in content)

    def _metric(self, metrics: dict[str, Any], argument: str, key: str, name: str) -> float | None:
        """Return the number of a key; None if there is none and the strategy does not need it."""
        value = metrics.get(key)
        if isinstance(value, int | float):
            if not math.isfinite(value):
                raise InputError(f"{key} is {value}")
            return value
        if name not in self.required_metrics:
            return None
        found = "is a list" if key in metrics else f"is none of its metrics ({', '.join(sorted(metrics)) or 'none'})"
        raise SetupError(
            f"{self.strategy} needs the metric {argument}={key!r}, which {found}; send it or set {argument}"
        )
