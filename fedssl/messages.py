"""What travels: `TrainPlan` down, `ClientUpdate` up. The only module that knows Flower's records and their keys.

An `Array` here is a view of a live NumPy array. In one process it is handed over as it is; Ray pickles it out-of-band,
i.e. through shared memory; only a network deployment asks for its ``data`` and so pays for the ``.npy`` bytes that a
stock Flower peer reads.
"""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.layers import Layers

ARRAYS, PLAN, METRICS = "arrays", "plan", "metrics"
NUM_EXAMPLES, TRAIN_LOSS, SECONDS = "num-examples", "train-loss", "seconds"
CLIENT_METRICS = (NUM_EXAMPLES, TRAIN_LOSS, SECONDS)


_name = functools.cache(str)
"""Name of a dtype; NumPy makes it anew at each call."""


class Array(FlowerArray):
    """A Flower ``Array`` over a NumPy array, without a copy.

    The class bears Flower's name because Flower writes the name of the class into what it sends over a network and
    looks it up among its own at the other end.
    """

    def __init__(self, array: np.ndarray) -> None:
        # Flower's own constructor would serialise at once.
        self.__dict__.update(dtype=_name(array.dtype), shape=array.shape, stype="numpy.ndarray", _array=array)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a field in Flower's class; here it is made when asked for
        """The array as ``.npy`` bytes."""
        buffer = io.BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """The array itself; read-only where it came through shared memory."""
        array: np.ndarray = self.__dict__["_array"]
        return array

    def __reduce__(self) -> tuple[type["Array"], tuple[np.ndarray]]:
        # Protocol 5 takes the memory of a contiguous array out of band.
        return Array, (self.numpy(),)


def to_record(layers: Layers) -> ArrayRecord:
    """Layers as a Flower record that shares their memory."""
    record = ArrayRecord()
    for name, array in layers.items():
        record[name] = Array(array)
    return record


def from_record(record: ArrayRecord) -> Layers:
    """Layers of a Flower record; shares memory with records made by `to_record`."""
    return {name: array.numpy() for name, array in record.items()}


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What the server tells a client for one round.

    Attributes
    ----------
    round : int
        Number of the round, from 1.
    layers : Layers
        The global layers that travel down.
    settings : str
        The resolved settings of the run as YAML.
    metrics : tuple of str
        What the client reports beside its layers, a subset of `CLIENT_METRICS`; nothing else leaves it.
    keep_from : int
        Oldest round that a resumed run may go back to; a client drops what it kept only for earlier ones.
    lr_factor : float
        What the optimiser's learning rate is multiplied by in this round.
    code : str
        Fingerprint of the server's source code; a client that runs other code refuses to train.
    up : tuple of str
        Names of the layers that the client sends back; empty: all that its model exchanges.
    depth : int or None
        Stages of the encoder that run, see `fedssl.schedule.phases`; None: all, and all are trained.
    frozen : int
        Of these the first ones, which are not trained.
    hold : bool
        Whether the client keeps the frozen layers, because the server will not send them again.
    depth_dropout : float
        Probability that a frozen stage is left out of a training step.
    transfer : bool
        Whether the newest stage began with the weights of the one before.
    """

    round: int
    layers: Layers
    settings: str
    metrics: tuple[str, ...]
    keep_from: int
    code: str
    lr_factor: float = 1.0
    up: tuple[str, ...] = ()
    depth: int | None = None
    frozen: int = 0
    hold: bool = False
    depth_dropout: float = 0.0
    transfer: bool = False

    def to_content(self) -> RecordDict:
        plan = ConfigRecord(
            {
                "round": self.round,
                "settings": self.settings,
                "keep-from": self.keep_from,
                "lr-factor": self.lr_factor,
                "code": self.code,
            }
        )
        if self.metrics:  # Flower cannot count the bytes of an empty list
            plan["metrics"] = list(self.metrics)
        if self.up:
            plan["up"] = list(self.up)
        if self.depth is not None:
            plan.update({"depth": self.depth, "frozen": self.frozen, "hold": self.hold})
            plan.update({"depth-dropout": self.depth_dropout, "transfer": self.transfer})
        return RecordDict({ARRAYS: to_record(self.layers), PLAN: plan})

    @classmethod
    def from_content(cls, content: RecordDict) -> "TrainPlan":
        plan = content.config_records[PLAN]
        return cls(
            round=int(plan["round"]),  # type: ignore[arg-type]  # Flower's values are a union
            layers=from_record(content.array_records[ARRAYS]),
            settings=str(plan["settings"]),
            metrics=tuple(str(name) for name in plan.get("metrics", [])),  # type: ignore[union-attr]  # Flower's values are a union
            keep_from=int(plan["keep-from"]),  # type: ignore[arg-type]  # Flower's values are a union
            code=str(plan["code"]),
            lr_factor=float(plan["lr-factor"]),  # type: ignore[arg-type]  # Flower's values are a union
            up=tuple(str(name) for name in plan.get("up", [])),  # type: ignore[union-attr]  # Flower's values are a union
            depth=int(plan["depth"]) if "depth" in plan else None,  # type: ignore[arg-type]  # Flower's values are a union
            frozen=int(plan.get("frozen", 0)),  # type: ignore[arg-type]  # Flower's values are a union
            hold=bool(plan.get("hold", False)),
            depth_dropout=float(plan.get("depth-dropout", 0.0)),  # type: ignore[arg-type]  # Flower's values are a union
            transfer=bool(plan.get("transfer", False)),
        )


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """What a client sends back: the layers that travel up and the metrics that the strategy declared.

    Attributes
    ----------
    layers : Layers
        The client's layers after local training.
    partition_id : int
        The client; known to the server, not sent.
    num_examples : int, optional
        Pictures the client trained on.
    train_loss : float, optional
        Mean loss of the last local epoch.
    seconds : float, optional
        Time the client took for the round.
    """

    layers: Layers
    partition_id: int
    num_examples: int | None = None
    train_loss: float | None = None
    seconds: float | None = None

    def to_content(self, metrics: Sequence[str]) -> RecordDict:
        """The reply, with only the named metrics in it."""
        values = {NUM_EXAMPLES: self.num_examples, TRAIN_LOSS: self.train_loss, SECONDS: self.seconds}
        record = MetricRecord({name: value for name in metrics if (value := values[name]) is not None})
        return RecordDict({ARRAYS: to_record(self.layers), METRICS: record})

    @classmethod
    def from_content(cls, content: RecordDict, partition_id: int) -> "ClientUpdate":
        values: dict[str, float] = {}
        for name, value in content.metric_records[METRICS].items():
            if name in CLIENT_METRICS:
                if not isinstance(value, int | float):
                    raise ValueError(f"metric {name} is {value} instead of a number")
                values[name] = value
        examples = values.get(NUM_EXAMPLES)
        if examples is not None and not abs(examples) < 2**53:
            raise ValueError(f"metric {NUM_EXAMPLES} is {examples}, which is no count")
        return cls(
            layers=from_record(content.array_records[ARRAYS]),
            partition_id=partition_id,
            num_examples=None if examples is None else int(examples),
            train_loss=values.get(TRAIN_LOSS),
            seconds=values.get(SECONDS),
        )


def content_bytes(content: RecordDict, layers: Layers) -> int:
    """Bytes of a message's content: the memory of its ``layers`` plus Flower's count for the other records.

    The layers are handed in as arrays, because reading them out of a record that came over a network takes a copy.
    """
    arrays = sum(array.nbytes for array in layers.values())
    metrics = sum(record.count_bytes() for record in content.metric_records.values())
    return arrays + metrics + sum(record.count_bytes() for record in content.config_records.values())


def who_reply(message: Message, partition_id: int, num_partitions: int) -> Message:
    """A client's answer to the query which partition it holds."""
    record = MetricRecord({"partition-id": partition_id, "num-partitions": num_partitions})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def read_who(message: Message) -> tuple[int, int]:
    """Partition id and number of partitions from a client's answer."""
    record = message.content.metric_records[METRICS]
    return int(record["partition-id"]), int(record["num-partitions"])  # type: ignore[arg-type]  # Flower's values are a union
