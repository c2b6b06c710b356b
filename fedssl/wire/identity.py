"""Identity of a node: what it replies to a node-info query."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.base_layers import MAX_ADVERTISED, is_digest
from fedssl.safe_io import sanitize_line
from fedssl.wire.device import COMPARED_PACKAGES, check_device_name
from fedssl.wire.messages import METRICS, as_count

NODE_INFO = "node-info"


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Identity of a node."""

    partition: int | None  # of a simulated client; optional position of an edge client
    partitions: int | None = None  # number of partitions; None for an edge client, which has a name
    name: str = ""
    num_images: int | None = None  # of an edge client; None if it participates in secure aggregation only
    free_disk: int | None = None  # MB for the states of an edge client
    versions: Mapping[str, str] = field(default_factory=dict)  # of `COMPARED_PACKAGES` and Python on an edge client
    base_digests: tuple[str, ...] = ()  # of base layers that the edge client has, see `fedssl.base_layers`
    max_rank: int | None = None  # of LoRA's factors that the edge client trains; None: any
    problem: str = ""  # why the edge client cannot participate, a predicate without paths; empty if it can


def node_info_reply(message: Message, info: NodeInfo) -> Message:
    """Return the reply to a node-info query."""
    if info.partitions is None:
        record = ConfigRecord({"name": info.name, "problem": info.problem})
        counts = {
            "partition-id": info.partition,
            "num-images": info.num_images,
            "free-disk": info.free_disk,
            "max-rank": info.max_rank,
        }
        record.update({key: count for key, count in counts.items() if count is not None})
        if info.base_digests:  # Flower cannot size an empty list
            record["base-digests"] = list(info.base_digests)
        for package, installed in info.versions.items():
            record[f"version-{package}"] = installed
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
    name = _text(record["name"])
    check_device_name(name)
    numbers = ("partition-id", "num-images", "free-disk", "max-rank")
    counts = {key: as_count(record[key]) for key in numbers if key in record}
    if counts.get("max-rank") == 0:
        raise ValueError("its max-rank is 0")
    versions = {package: f"version-{package}" for package in ("python", *COMPARED_PACKAGES)}
    return NodeInfo(
        partition=counts.get("partition-id"),
        name=name,
        num_images=counts.get("num-images"),
        free_disk=counts.get("free-disk"),
        versions={package: _text(record[key]) for package, key in versions.items() if key in record},
        base_digests=_digests(record.get("base-digests", [])),
        max_rank=counts.get("max-rank"),
        problem=_text(record.get("problem", "")),
    )


def _digests(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ADVERTISED:
        raise ValueError("its base layers are not a list of digests")
    if not all(isinstance(digest, str) and is_digest(digest) for digest in value):
        raise ValueError("a digest of its base layers is invalid")
    return tuple(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a text")
    return sanitize_line(value, max_chars=200)
