"""Identity of a node: what it replies to a node-info query."""

import re
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.errors import InputError
from fedssl.wire.messages import METRICS, as_count

NODE_INFO = "node-info"


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Identity of a node.

    Attributes
    ----------
    partition : int or None
        Partition of a simulated client; optional position of an edge client.
    partitions : int or None
        Number of partitions; None for an edge client, which has a name.
    """

    partition: int | None
    partitions: int | None = None
    name: str = ""


def node_info_reply(message: Message, info: NodeInfo) -> Message:
    """Return the reply to a node-info query."""
    if info.partitions is None:
        record = ConfigRecord({"name": info.name})
        if info.partition is not None:
            record["partition-id"] = info.partition
        return Message(RecordDict({NODE_INFO: record}), reply_to=message)
    assert info.partition is not None
    metrics = MetricRecord({"partition-id": info.partition, "num-partitions": info.partitions})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def read_node_info(message: Message) -> NodeInfo:
    """Read the reply to a node-info query; `KeyError` or `ValueError` if it is invalid."""
    if NODE_INFO not in message.content.config_records:
        metrics = message.content.metric_records[METRICS]
        return NodeInfo(partition=as_count(metrics["partition-id"]), partitions=as_count(metrics["num-partitions"]))
    record = message.content.config_records[NODE_INFO]
    name = record["name"]
    if not isinstance(name, str):
        raise ValueError(f"{type(name).__name__} instead of a name")
    check_device_name(name)
    return NodeInfo(partition=as_count(record["partition-id"]) if "partition-id" in record else None, name=name)


def check_device_name(name: str) -> None:
    """Raise `InputError` if the name of an edge client cannot name a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is not a valid client name; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )
