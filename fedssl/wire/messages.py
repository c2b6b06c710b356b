"""What travels: `TrainPlan` down, `ClientUpdate` up. The only module that knows the keys of Flower's records.

What comes over a network is bytes until it is proven to be what it should be: `fedssl.wire.records` reads the arrays, and
records or metrics that nobody asked for are refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedssl.arrays import Layers
from fedssl.config.settings import EXACT
from fedssl.errors import InputError
from fedssl.wire.records import from_message, to_message
from fedssl.wire.wire_format import check_transport

ARRAYS, SHARED, GATHERED, PLAN, METRICS = "arrays", "shared", "gathered", "plan", "metrics"
ANSWERS, NODE_INFO, OWN = "answers", "node-info", "own"
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
    shared : Layers
        What the server half of the method made for its clients, see `fedssl.methods.base.SSLMethod`.
    settings : str
        What `fedssl.config.load.read_client` reads, for simulated clients, or `fedssl.config.device_task.compose_task`, for devices.
    metrics : tuple of str
        What the client reports beside its layers, a subset of `CLIENT_METRICS`; nothing else leaves it.
    keep_from : int
        Oldest round that a resumed run may go back to; a client drops what it kept only for earlier ones.
    lr_factor : float
        Factor of the optimiser's learning rate in this round.
    code : str
        Fingerprint of the server's source code; a client that runs other code refuses to train.
    transport : str
        How layers travel, in both directions, see `fedssl.wire.wire_format`.
    upload_names : tuple of str or None
        Names of the layers that the client sends back; None: all that its model exchanges.
    depth : int or None
        Stages of the encoder that run, see `fedssl.schedule.phases`; None: all, and all are trained.
    frozen : int
        How many of these, from the first on, are not trained.
    hold : bool
        Whether the client keeps the frozen layers, because the server will not send them again.
    depth_dropout : float
        Probability that a frozen stage is left out of a training step.
    others : tuple of Layers
        Other models, in whose place the client may take one of these as ``layers``; it says which it took.
    """

    round: int
    layers: Layers
    settings: str
    metrics: tuple[str, ...]
    keep_from: int
    code: str
    transport: str = EXACT
    shared: Layers = field(default_factory=dict)
    lr_factor: float = 1.0
    upload_names: tuple[str, ...] | None = None
    depth: int | None = None
    frozen: int = 0
    hold: bool = False
    depth_dropout: float = 0.0
    others: tuple[Layers, ...] = ()

    def to_content(self, pack: Callable[[Layers, str], ArrayRecord] = to_message) -> RecordDict:
        """The plan as a message's content; ``pack`` makes the records of models."""
        plan = ConfigRecord(
            {
                "round": self.round,
                "settings": self.settings,
                "keep-from": self.keep_from,
                "lr-factor": self.lr_factor,
                "code": self.code,
                "transport": self.transport,
                "metrics": _to_text(self.metrics),
            }
        )
        if self.upload_names is not None:
            plan["upload-names"] = _to_text(self.upload_names)
        if self.depth is not None:
            plan.update({"depth": self.depth, "frozen": self.frozen, "hold": self.hold})
            plan["depth-dropout"] = self.depth_dropout
        content = RecordDict({ARRAYS: pack(self.layers, self.transport), SHARED: to_message(self.shared), PLAN: plan})
        for number, layers in enumerate(self.others, start=1):
            content[f"{ARRAYS}-{number}"] = pack(layers, self.transport)
        return content

    @classmethod
    def from_content(cls, content: RecordDict) -> "TrainPlan":
        """The plan in a message's content."""
        plan = content.config_records[PLAN]
        transport = check_transport(plan["transport"])
        others = [content.array_records[f"{ARRAYS}-{number}"] for number in range(1, len(content.array_records) - 1)]
        return cls(
            round=int(_number(plan["round"])),
            layers=from_message(content.array_records[ARRAYS], transport),
            others=tuple(from_message(layers, transport) for layers in others),
            shared=from_message(content.array_records[SHARED]),
            transport=transport,
            settings=str(plan["settings"]),
            metrics=_from_text(plan["metrics"]),
            keep_from=int(_number(plan["keep-from"])),
            code=str(plan["code"]),
            lr_factor=_number(plan["lr-factor"]),
            upload_names=_from_text(plan["upload-names"]) if "upload-names" in plan else None,
            depth=int(_number(plan["depth"])) if "depth" in plan else None,
            frozen=int(_number(plan.get("frozen", 0))),
            hold=bool(plan.get("hold", False)),
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
    gathered : Layers
        What the server half of the method gathers, see `fedssl.methods.base.SSLMethod`.
    num_examples : int, optional
        Images the client trained on.
    train_loss : float, optional
        Mean loss of the last local epoch.
    seconds : float, optional
        Time the client took for the round.
    answers : tuple of int and str, optional
        Round and code of the plan that it answers.
    chosen : int
        Which of the plan's models it started from: 0 for ``layers``, else the place in ``others``, from 1.
    """

    layers: Layers
    partition_id: int
    gathered: Layers = field(default_factory=dict)
    num_examples: int | None = None
    train_loss: float | None = None
    seconds: float | None = None
    answers: tuple[int, str] | None = None
    chosen: int = 0

    def to_content(self, plan: TrainPlan) -> RecordDict:
        """The reply to a plan, with only the metrics in it that the plan asks for.

        Of layers that the plan brought the difference travels, if transport shortens them.
        """
        values = {NUM_EXAMPLES: self.num_examples, TRAIN_LOSS: self.train_loss, SECONDS: self.seconds}
        record = MetricRecord({name: value for name in plan.metrics if (value := values[name]) is not None})
        answers = ConfigRecord({"round": plan.round, "code": plan.code})
        if plan.others:
            answers["chosen"] = self.chosen
        return RecordDict(
            {
                ARRAYS: to_message(self.layers, plan.transport, start=(plan.layers, *plan.others)[self.chosen]),
                GATHERED: to_message(self.gathered),
                METRICS: record,
                ANSWERS: answers,
            }
        )

    @classmethod
    def from_content(
        cls, content: RecordDict, partition_id: int, *, transport: str = EXACT, start: Layers | None = None
    ) -> "ClientUpdate":
        """The update in a reply's content.

        Parameters
        ----------
        content : RecordDict
        partition_id : int
        transport : str
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
        unknown = content.keys() - {ARRAYS, GATHERED, METRICS, ANSWERS}
        if unknown:
            raise ValueError(f"record {min(unknown)} was not asked for")
        values: dict[str, float] = {}
        for name, value in content.metric_records[METRICS].items():
            if name not in CLIENT_METRICS:
                raise ValueError(f"metric {name} was not asked for")
            if not isinstance(value, int | float):
                raise ValueError(f"metric {name} is {value} instead of a number")
            values[name] = value
        answers = content.config_records[ANSWERS]
        examples = values.get(NUM_EXAMPLES)
        if examples is not None and not abs(examples) < 2**53:
            raise ValueError(f"metric {NUM_EXAMPLES} is {examples}, which is no count")
        return cls(
            layers=from_message(content.array_records[ARRAYS], transport, start=start),
            gathered=from_message(content.array_records[GATHERED]),
            partition_id=partition_id,
            num_examples=None if examples is None else int(examples),
            train_loss=values.get(TRAIN_LOSS),
            seconds=values.get(SECONDS),
            answers=(int(_number(answers["round"])), str(answers["code"])),
        )


@dataclass(frozen=True, kw_only=True)
class Ask:
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
        return RecordDict({**plan, OWN: asked})

    @classmethod
    def from_content(cls, content: RecordDict) -> "Ask":
        """What the content of a message asks."""
        asked = content.config_records[OWN]
        return cls(epochs=_whole(asked["epochs"]), adapted=bool(asked["adapted"]))


def read_choice(content: RecordDict, *, among: int) -> int:
    """Which of so many models a client says in its reply that it started from.

    Raises
    ------
    KeyError, ValueError
        It does not say so, although there are several, or names one that was not sent.
    """
    if among == 1:
        return 0
    chosen = _whole(content.config_records[ANSWERS]["chosen"])
    if chosen >= among:
        raise ValueError(f"it chose model {chosen} of {among}")
    return chosen


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
        return NodeInfo(partition=_whole(record["partition-id"]), partitions=_whole(record["num-partitions"]))
    about = message.content.config_records[NODE_INFO]
    name = about["name"]
    if not isinstance(name, str):
        raise ValueError(f"{type(name).__name__} instead of a name")
    check_device_name(name)
    return NodeInfo(partition=_whole(about["partition-id"]) if "partition-id" in about else None, name=name)


def check_device_name(name: str) -> None:
    """Refuse, by an `InputError`, what cannot be a device's name: it is shown to people and names a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}", name):
        raise InputError(
            f"client-name={name[:60]!r} is no name of a device; use 1 to 40 letters, digits, _, - and ., beginning "
            "with a letter, a digit or _"
        )


def _to_text(names: Sequence[str]) -> str:
    """Names as lines, the first of which is empty: Flower can count the bytes of no empty list and of no empty text."""
    return "\n" + "\n".join(names)


def _from_text(text: object) -> tuple[str, ...]:
    return tuple(str(text).splitlines()[1:])


def _number(value: object) -> float:
    """A value of a record, whose type Flower leaves open, as the number that it must be."""
    if not isinstance(value, int | float):
        raise ValueError(f"{value} instead of a number")
    return value


def _whole(value: object) -> int:
    """A value of a record as the number that counts something."""
    number = _number(value)
    if not (isinstance(number, int) and 0 <= number < 2**31) or isinstance(number, bool):
        raise ValueError(f"{number} instead of a whole number")
    return number
