"""Identity of a node: what it replies to a node-info query."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.errors import InputError
from fedssl.untrusted import sanitize_line
from fedssl.wire.messages import METRICS, as_count

NODE_INFO = "node-info"

COMPARED_PACKAGES = ("flwr", "torch", "torchvision")


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Identity of a node."""

    partition: int | None  # of a simulated client; optional position of an edge client
    partitions: int | None = None  # number of partitions; None for an edge client, which has a name
    name: str = ""
    num_images: int | None = None  # of an edge client; None if it participates in secure aggregation only
    versions: Mapping[str, str] = field(default_factory=dict)  # of `COMPARED_PACKAGES` and Python on an edge client
    problem: str = ""  # why the edge client cannot participate, a predicate without paths; empty if it can


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of `COMPARED_PACKAGES` here."""
    return {"python": platform.python_version(), **{name: version(name) for name in COMPARED_PACKAGES}}


def incompatibility(versions: Mapping[str, str]) -> str:
    """Return why another machine with these versions cannot work with this one; empty if it can.

    Flower's protocol changes with its minor versions. The server sends this project's code with the run. Another torch
    or Python may change the last bits of an update.
    """
    here = version("flwr")
    there = versions.get("flwr", here)
    if here.split(".")[:2] != there.split(".")[:2]:
        return f"has flwr {there} and flwr {here} is installed here; install the same minor version"
    return ""


def node_info_reply(message: Message, info: NodeInfo) -> Message:
    """Return the reply to a node-info query."""
    if info.partitions is None:
        record = ConfigRecord({"name": info.name, "problem": info.problem})
        if info.partition is not None:
            record["partition-id"] = info.partition
        if info.num_images is not None:
            record["num-images"] = info.num_images
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
    counts = {key: as_count(record[key]) for key in ("partition-id", "num-images") if key in record}
    versions = {package: f"version-{package}" for package in ("python", *COMPARED_PACKAGES)}
    return NodeInfo(
        partition=counts.get("partition-id"),
        name=name,
        num_images=counts.get("num-images"),
        versions={package: _text(record[key]) for package, key in versions.items() if key in record},
        problem=_text(record.get("problem", "")),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a text")
    return sanitize_line(value, max_chars=200)


def check_device_name(name: str) -> None:
    """Raise `InputError` if the name of an edge client cannot name a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is not a valid client name; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )
