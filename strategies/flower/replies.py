"""Replies of any ClientApp as updates, or the sentence why one cannot be used."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import Message, RecordDict

from fedssl.arrays import GlobalLayers
from fedssl.errors import InputError
from fedssl.safe_io import sanitize_line
from fedssl.wire.messages import NUM_EXAMPLES, TRAIN_LOSS, ClientUpdate
from strategies.flower.arrays import conform, public_name, read_layers
from strategies.flower.task import HINT, PROBLEM, REPLY

if TYPE_CHECKING:
    from strategies.flower.base import FlowerRule

MAX_WEIGHT = 2.0**53  # sums of larger weights may be infinite


class SetupError(InputError):
    """Error in the app or in an argument of the strategy, which every round would repeat."""


@dataclass(frozen=True)
class Reply:
    """A reply whose arrays fit the model."""

    node: int
    content: RecordDict
    update: ClientUpdate
    has_mod: bool  # whether the client has `client_mod`


def read_reply(message: Message, *, rule: "FlowerRule", names: Collection[str], expected: GlobalLayers) -> Reply:
    """Return the reply to a strategy, with its update.

    ``names`` are those of all layers, ``expected`` are the layers to aggregate. Raise `SetupError` or another
    `InputError` if the reply cannot be used.
    """
    if message.has_error():
        raise InputError(f"error: {message.error.reason}")
    content, node, key = message.content, message.metadata.src_node_id, rule.arrayrecord_key
    records = content.array_records
    if len(records) != 1 and key not in records:
        raise SetupError(f"it has {len(records)} ArrayRecords; reply with one")
    layers = read_layers(records[key] if key in records else next(iter(records.values())), rule.task.statistics)
    unknown = layers.keys() - set(names)
    if unknown:
        raise SetupError(f"array {public_name(min(unknown))} is not in the model; reply with the names received")
    try:
        layers = conform(layers, expected)
    except InputError as problem:
        is_complete = layers.keys() >= expected.layers.keys()
        raise SetupError(f"{problem}{'' if is_complete else HINT}") from problem
    if rule.needs_mod and REPLY not in content:
        raise SetupError(f"{type(rule).__name__} needs ClientApp(mods=[client_mod]), `client_mod` of strategies.flower")
    found = content.config_records[REPLY].get(PROBLEM) if REPLY in content.config_records else None
    if found is not None:
        raise SetupError(sanitize_line(str(found)))
    metrics = {key: value for record in content.metric_records.values() for key, value in record.items()}
    weight = _metric(metrics, rule, "weighted_by_key", NUM_EXAMPLES)
    if weight is not None and (weight <= 0 or weight >= MAX_WEIGHT):
        raise InputError(f"{rule.weighted_by_key}={weight:g} is not between 0 and {MAX_WEIGHT:g}")
    loss = _metric(metrics, rule, "loss_key", TRAIN_LOSS)
    # A weight of Flower may be a fraction, which the sum supports.
    update = ClientUpdate(layers=layers, partition_id=0, num_examples=weight, train_loss=loss)  # type: ignore[arg-type]  # see above
    return Reply(node, content, update, REPLY in content)


def _metric(metrics: dict[str, Any], rule: "FlowerRule", argument: str, name: str) -> float | None:
    """Return the number whose key is an argument of the strategy; None if there is none and it is not needed."""
    key = {"weighted_by_key": rule.weighted_by_key, "loss_key": rule.loss_key}[argument]
    value = metrics.get(key)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise InputError(f"{key} is {value}")
        return value
    if name not in rule.required_metrics:
        return None
    found = "is a list" if key in metrics else f"is none of its metrics ({', '.join(sorted(metrics)) or 'none'})"
    raise SetupError(
        f"{type(rule).__name__} needs the metric {argument}={key!r}, which {found}; send it or set {argument}"
    )
