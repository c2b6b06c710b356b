"""What travels: `TrainPlan` down, `ClientUpdate` up. The only module that knows the keys of Flower's records.

What comes over a network is bytes until it is proven to be what it should be: `fedssl.wire.records` reads the arrays,
and records or metrics that nobody asked for are refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.arrays import Layers
from fedssl.config.settings import LOSSLESS
from fedssl.errors import InputError
from fedssl.wire.records import decode_arrays, encode_arrays
from fedssl.wire.wire_format import check_wire_dtype

ARRAYS, METHOD_BROADCAST, METHOD_UPLOAD, CONFIG, METRICS = (
    "arrays",
    "method-broadcast",
    "method-upload",
    "config",
    "metrics",
)
REPLY_CONFIG, NODE_INFO, PERSONALIZED = "reply-config", "node-info", "personalized"
NUM_EXAMPLES, TRAIN_LOSS, SECONDS = "num-examples", "train-loss", "seconds"
CLIENT_METRICS = (NUM_EXAMPLES, TRAIN_LOSS, SECONDS)


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What the server tells a client for one round.

    Attributes
    ----------
    round : int
        Number of the round, from 1.
    layers : Layers
        The layers that travel down.
    broadcast : Layers
        What the server side of the method made for its clients, see `fedssl.methods.base.SSLMethod`.
    settings : str
        What `fedssl.config.load.parse_client_config` reads, for simulated clients, or
        `fedssl.config.device_task.compose_task`, for devices.
    metrics : tuple of str
        What the client reports beside its layers, a subset of `CLIENT_METRICS`; nothing else leaves it.
    oldest_resumable_round : int
        Oldest round that a resumed run may go back to; a client drops what it kept only for earlier ones.
    lr_factor : float
        Factor of the optimiser's learning rate in this round.
    code_fingerprint : str
        Fingerprint of the server's source code; a client that runs other code refuses to train.
    wire_dtype : str
        How layers travel, in both directions, see `fedssl.wire.wire_format`.
    upload_names : tuple of str or None
        Names of the layers that the client sends back; None: all that its model exchanges.
    num_stages : int or None
        Stages of the encoder that run, see `fedssl.schedule.phases`; None: all, and all are trained.
    num_frozen_stages : int
        How many of these, from the first on, are not trained.
    cache_frozen : bool
        Whether the client keeps the frozen layers, because the server will not send them again.
    depth_dropout : float
        Probability that a frozen stage is left out of a training step.
    candidate_arrays : tuple of Layers
        Other models, in whose place the client may take one of these as ``layers``; it says which it took.
    """

    round: int
    layers: Layers
    settings: str
    metrics: tuple[str, ...]
    oldest_resumable_round: int
    code_fingerprint: str
    wire_dtype: str = LOSSLESS
    broadcast: Layers = field(default_factory=dict)
    lr_factor: float = 1.0
    upload_names: tuple[str, ...] | None = None
    num_stages: int | None = None
    num_frozen_stages: int = 0
    cache_frozen: bool = False
    depth_dropout: float = 0.0
    candidate_arrays: tuple[Layers, ...] = ()

    def to_content(self, pack: Callable[[Layers, str], ArrayRecord] = encode_arrays) -> RecordDict:
        """The plan as a message's content; ``pack`` makes the records of models."""
        plan = ConfigRecord(
            {
                "round": self.round,
                "settings": self.settings,
                "oldest-resumable-round": self.oldest_resumable_round,
                "lr-factor": self.lr_factor,
                "code-fingerprint": self.code_fingerprint,
                "wire-dtype": self.wire_dtype,
                "metrics": _join_names(self.metrics),
            }
        )
        if self.upload_names is not None:
            plan["upload-names"] = _join_names(self.upload_names)
        if self.num_stages is not None:
            plan.update(
                {
                    "num-stages": self.num_stages,
                    "num-frozen-stages": self.num_frozen_stages,
                    "cache-frozen": self.cache_frozen,
                }
            )
            plan["depth-dropout"] = self.depth_dropout
        content = RecordDict(
            {ARRAYS: pack(self.layers, self.wire_dtype), METHOD_BROADCAST: encode_arrays(self.broadcast), CONFIG: plan}
        )
        for number, layers in enumerate(self.candidate_arrays, start=1):
            content[f"{ARRAYS}-{number}"] = pack(layers, self.wire_dtype)
        return content

    @classmethod
    def from_content(cls, content: RecordDict) -> "TrainPlan":
        """The plan in a message's content."""
        plan = content.config_records[CONFIG]
        wire_dtype = check_wire_dtype(plan["wire-dtype"])
        candidate_arrays = [
            content.array_records[f"{ARRAYS}-{number}"] for number in range(1, len(content.array_records) - 1)
        ]
        return cls(
            round=int(_number(plan["round"])),
            layers=decode_arrays(content.array_records[ARRAYS], wire_dtype),
            candidate_arrays=tuple(decode_arrays(layers, wire_dtype) for layers in candidate_arrays),
            broadcast=decode_arrays(content.array_records[METHOD_BROADCAST]),
            wire_dtype=wire_dtype,
            settings=str(plan["settings"]),
            metrics=_split_names(plan["metrics"]),
            oldest_resumable_round=int(_number(plan["oldest-resumable-round"])),
            code_fingerprint=str(plan["code-fingerprint"]),
            lr_factor=_number(plan["lr-factor"]),
            upload_names=_split_names(plan["upload-names"]) if "upload-names" in plan else None,
            num_stages=int(_number(plan["num-stages"])) if "num-stages" in plan else None,
            num_frozen_stages=int(_number(plan.get("num-frozen-stages", 0))),
            cache_frozen=bool(plan.get("cache-frozen", False)),
            depth_dropout=_number(plan.get("depth-dropout", 0.0)),
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
    uploaded_parts : Layers
        What the server side of the method gathers, see `fedssl.methods.base.SSLMethod`.
    num_examples : int, optional
        Images the client trained on.
    train_loss : float, optional
        Mean loss of the last local epoch.
    seconds : float, optional
        Time the client took for the round.
    plan_id : tuple of int and str, optional
        Round and code of the plan that it answers.
    model_index : int
        Which of the plan's models it started from: 0 for ``layers``, else the place in ``candidate_arrays``, from 1.
    """

    layers: Layers
    partition_id: int
    uploaded_parts: Layers = field(default_factory=dict)
    num_examples: int | None = None
    train_loss: float | None = None
    seconds: float | None = None
    plan_id: tuple[int, str] | None = None
    model_index: int = 0

    def to_content(self, plan: TrainPlan) -> RecordDict:
        """The reply to a plan, with only the metrics in it that the plan asks for.

        Of layers that the plan brought the difference travels, if wire_dtype shortens them.
        """
        values = {NUM_EXAMPLES: self.num_examples, TRAIN_LOSS: self.train_loss, SECONDS: self.seconds}
        record = MetricRecord({name: value for name in plan.metrics if (value := values[name]) is not None})
        plan_id = ConfigRecord({"round": plan.round, "code-fingerprint": plan.code_fingerprint})
        if plan.candidate_arrays:
            plan_id["model-index"] = self.model_index
        return RecordDict(
            {
                ARRAYS: encode_arrays(
                    self.layers, plan.wire_dtype, start=(plan.layers, *plan.candidate_arrays)[self.model_index]
                ),
                METHOD_UPLOAD: encode_arrays(self.uploaded_parts),
                METRICS: record,
                REPLY_CONFIG: plan_id,
            }
        )

    @classmethod
    def from_content(
        cls, content: RecordDict, partition_id: int, *, wire_dtype: str = LOSSLESS, start: Layers | None = None
    ) -> "ClientUpdate":
        """The update in a reply's content.

        Parameters
        ----------
        content : RecordDict
        partition_id : int
        wire_dtype : str
            That of the plan.
        start : Layers, optional
            The layers that the client had received, as the server has them: what differences are added to.

        Raises
        ------
        KeyError
            A record is missing.
        ValueError
            There is a record or a metric that no update has, an array is damaged, a metric is no number, or a count is
            none.
        """
        unknown = content.keys() - {ARRAYS, METHOD_UPLOAD, METRICS, REPLY_CONFIG}
        if unknown:
            raise ValueError(f"record {min(unknown)} was not asked for")
        values: dict[str, float] = {}
        for name, value in content.metric_records[METRICS].items():
            if name not in CLIENT_METRICS:
                raise ValueError(f"metric {name} was not asked for")
            if not isinstance(value, int | float):
                raise ValueError(f"metric {name} is {value} instead of a number")
            values[name] = value
        plan_id = content.config_records[REPLY_CONFIG]
        examples = values.get(NUM_EXAMPLES)
        if examples is not None and not abs(examples) < 2**53:
            raise ValueError(f"metric {NUM_EXAMPLES} is {examples}, which is no count")
        return cls(
            layers=decode_arrays(content.array_records[ARRAYS], wire_dtype, start=start),
            uploaded_parts=decode_arrays(content.array_records[METHOD_UPLOAD]),
            partition_id=partition_id,
            num_examples=None if examples is None else int(examples),
            train_loss=values.get(TRAIN_LOSS),
            seconds=values.get(SECONDS),
            plan_id=(int(_number(plan_id["round"])), str(plan_id["code-fingerprint"])),
        )


@dataclass(frozen=True, kw_only=True)
class PersonalizedModelRequest:
    """What a client of a simulation is asked to show beside a plan: the encoder that it would use itself.

    Attributes
    ----------
    epochs : int
        How long it trains for that, if it never trained before; 0: it took part.
    adapted : bool
        Whether it shows what it has after these epochs, or what it would have begun with.
    """

    epochs: int = 0
    adapted: bool = False

    def beside(self, plan: RecordDict) -> RecordDict:
        """The content of a message that has both."""
        asked = ConfigRecord({"epochs": self.epochs, "adapted": self.adapted})
        return RecordDict({**plan, PERSONALIZED: asked})

    @classmethod
    def from_content(cls, content: RecordDict) -> "PersonalizedModelRequest":
        """What the content of a message asks."""
        asked = content.config_records[PERSONALIZED]
        return cls(epochs=_as_count(asked["epochs"]), adapted=bool(asked["adapted"]))


def parse_model_index(content: RecordDict, *, among: int) -> int:
    """Which of so many models a client says in its reply that it started from.

    Raises
    ------
    KeyError, ValueError
        It does not say so, although there are several, or names one that was not sent.
    """
    if among == 1:
        return 0
    model_index = _as_count(content.config_records[REPLY_CONFIG]["model-index"])
    if model_index >= among:
        raise ValueError(f"it chose model {model_index} of {among}")
    return model_index


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What a node says it is.

    Attributes
    ----------
    partition : int or None
        The partition that it holds; of a device its place in the order of the clients, None: it has none.
    partitions : int or None
        How many there are; None: it is a device.
    name : str
        Of a device.
    """

    partition: int | None
    partitions: int | None = None
    name: str = ""


def node_info_reply(message: Message, info: NodeInfo) -> Message:
    """A client's answer to the query what it is."""
    if info.partitions is None:
        record = ConfigRecord({"name": info.name})
        if info.partition is not None:
            record["partition-id"] = info.partition
        return Message(RecordDict({NODE_INFO: record}), reply_to=message)
    assert info.partition is not None
    metrics = MetricRecord({"partition-id": info.partition, "num-partitions": info.partitions})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def read_node_info(message: Message) -> NodeInfo:
    """What a node answered.

    Raises
    ------
    KeyError, ValueError
        It answered something else.
    """
    if NODE_INFO not in message.content.config_records:
        record = message.content.metric_records[METRICS]
        return NodeInfo(partition=_as_count(record["partition-id"]), partitions=_as_count(record["num-partitions"]))
    about = message.content.config_records[NODE_INFO]
    name = about["name"]
    if not isinstance(name, str):
        raise ValueError(f"{type(name).__name__} instead of a name")
    check_device_name(name)
    return NodeInfo(partition=_as_count(about["partition-id"]) if "partition-id" in about else None, name=name)


def check_device_name(name: str) -> None:
    """Refuse, by an `InputError`, what cannot be a device's name: it is shown to people and names a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is no name of a device; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )


def _join_names(names: Sequence[str]) -> str:
    """Names as lines, the first of which is empty: Flower can count the bytes of no empty list and of no empty text."""
    return "\n" + "\n".join(names)


def _split_names(text: object) -> tuple[str, ...]:
    return tuple(str(text).splitlines()[1:])


def _number(value: object) -> float:
    """A value of a record, whose type Flower leaves open, as the number that it must be."""
    if not isinstance(value, int | float):
        raise ValueError(f"{value} instead of a number")
    return value


def _as_count(value: object) -> int:
    """A value of a record as the number that counts something."""
    number = _number(value)
    if not (isinstance(number, int) and 0 <= number < 2**31) or isinstance(number, bool):
        raise ValueError(f"{number} instead of a whole number")
    return number
