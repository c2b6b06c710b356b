"""Messages of training: the server sends a `TrainPlan`, and a client replies with a `ClientUpdate`.

Only this module and `fedssl.wire.identity` define the keys of Flower's records. Content from a network is untrusted:
`fedssl.wire.records` validates the arrays, and unexpected records or metrics are rejected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedssl.arrays import Layers
from fedssl.base_layers import is_digest
from fedssl.wire.records import EXACT, Codec

ARRAYS, METHOD_BROADCAST, METHOD_UPLOAD, BASE = "arrays", "method-broadcast", "method-upload", "base"
STRATEGY_BROADCAST, STRATEGY_UPLOAD = "strategy-broadcast", "strategy-upload"
CONFIG, METRICS, REPLY_CONFIG, PERSONALIZED = "config", "metrics", "reply-config", "personalized"
LAST_USED_ROUND = "last-used-round"
NUM_EXAMPLES, TRAIN_LOSS, SECONDS = "num-examples", "train-loss", "seconds"
CLIENT_METRICS = (NUM_EXAMPLES, TRAIN_LOSS, SECONDS)

NO_REPLY = "no reply in time"  # why a client without a reply is dropped


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Instructions of the server to a client for one round."""

    round: int  # from 1
    layers: Layers
    # Settings for `fedssl.config.load.parse_client_config` (simulated clients) or
    # `fedssl.config.device_task.compose_task` (edge clients).
    settings: str
    # Metrics that the client reports, a subset of `CLIENT_METRICS`. It sends nothing else besides its layers.
    metrics: tuple[str, ...]
    # Oldest round from which the run may resume; a client deletes states that only earlier rounds need.
    oldest_resumable_round: int
    code_fingerprint: str  # of the server's source code; a client with other code rejects the plan
    # Round of an edge client's last used update, 0 without one: the client removes what it has saved in later rounds.
    last_used_round: int | None = None
    broadcast: Layers = field(default_factory=dict)  # of the server side of the method, see `SSLMethod`
    strategy_arrays: Layers = field(default_factory=dict)  # of the server side of the strategy, sent exactly
    lr_factor: float = 1.0  # factor of the optimizer's learning rate
    upload_names: tuple[str, ...] | None = None  # layers to upload; None uploads all exchanged layers
    num_stages: int | None = None  # active stages of the encoder, see `Phase`; None activates and trains all
    num_frozen_stages: int = 0  # number of these, from the first on, that are frozen
    cache_frozen: bool = False  # whether the client caches the frozen layers, which the server will not send again
    depth_dropout: float = 0.0  # probability that a training step skips a frozen stage
    # Clients that must not use what they saved in earlier rounds (simulations).
    evicted_clients: tuple[int, ...] = ()
    base: Layers = field(default_factory=dict)  # base layers, if the client lacks them (`fedssl.base_layers`)
    base_digest: str = ""  # of the base layers; empty: the model has none
    # Further models. The client selects one of these or ``layers`` and reports its index.
    candidate_arrays: tuple[Layers, ...] = ()

    def to_content(
        self, codec: Codec = EXACT, *, encode: Callable[[Codec, Layers], ArrayRecord] = Codec.encode
    ) -> RecordDict:
        """Return the content of the plan's message. ``codec`` is for models in both directions."""
        plan = ConfigRecord(
            {
                "round": self.round,
                "settings": self.settings,
                "oldest-resumable-round": self.oldest_resumable_round,
                "lr-factor": self.lr_factor,
                "code-fingerprint": self.code_fingerprint,
                "wire-dtype": codec.wire_dtype,
                "metrics": _join_names(self.metrics),
            }
        )
        if self.upload_names is not None:
            plan["upload-names"] = _join_names(self.upload_names)
        if self.num_stages is not None:
            plan["num-stages"] = self.num_stages
            plan["num-frozen-stages"] = self.num_frozen_stages
            plan["cache-frozen"] = self.cache_frozen
            plan["depth-dropout"] = self.depth_dropout
        if self.last_used_round is not None:
            plan[LAST_USED_ROUND] = self.last_used_round
        if self.evicted_clients:
            plan["evicted-clients"] = list(self.evicted_clients)
        if self.base_digest:
            plan["base-digest"] = self.base_digest
        content = RecordDict(
            {ARRAYS: encode(codec, self.layers), METHOD_BROADCAST: EXACT.encode(self.broadcast), CONFIG: plan}
        )
        if self.base:
            content[BASE] = encode(EXACT, self.base)
        if self.strategy_arrays:
            content[STRATEGY_BROADCAST] = encode(EXACT, self.strategy_arrays)
        for number, layers in enumerate(self.candidate_arrays, start=1):
            content[f"{ARRAYS}-{number}"] = encode(codec, layers)
        return content

    @classmethod
    def from_content(cls, content: RecordDict) -> "TrainPlan":
        """Read the plan from a message's content."""
        plan, records, codec = content.config_records[CONFIG], content.array_records, plan_codec(content)
        num_others = len({ARRAYS, METHOD_BROADCAST, STRATEGY_BROADCAST, BASE} & records.keys())
        candidates = [records[f"{ARRAYS}-{number}"] for number in range(1, len(records) - num_others + 1)]
        return cls(
            round=int(_number(plan["round"])),
            layers=codec.decode(records[ARRAYS]),
            candidate_arrays=tuple(codec.decode(record) for record in candidates),
            broadcast=EXACT.decode(records[METHOD_BROADCAST]),
            strategy_arrays=EXACT.decode(records[STRATEGY_BROADCAST]) if STRATEGY_BROADCAST in records else {},
            base=EXACT.decode(records[BASE]) if BASE in records else {},
            base_digest=_digest(plan.get("base-digest", "")),
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
            last_used_round=int(_number(plan[LAST_USED_ROUND])) if LAST_USED_ROUND in plan else None,
            evicted_clients=_integers(plan.get("evicted-clients", [])),
        )


def with_last_used_round(content: RecordDict, round: int) -> RecordDict:
    """Return the content of a plan for an edge client whose last used update is of this round; arrays are shared."""
    return RecordDict({**content, CONFIG: ConfigRecord({**content.config_records[CONFIG], LAST_USED_ROUND: round})})


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """Reply of a client: uploaded layers and the metrics that the strategy declared."""

    layers: Layers
    partition_id: int  # client id, which the server sets; not sent
    uploaded_parts: Layers = field(default_factory=dict)  # for the method's server side, see `SSLMethod`
    strategy_arrays: Layers = field(default_factory=dict)  # for the strategy's server side, sent exactly
    num_examples: int | None = None  # number of images that the client trained on
    train_loss: float | None = None  # mean loss of the last local epoch
    seconds: float | None = None  # duration of the round on the client
    plan_id: tuple[int, str] | None = None  # round and code fingerprint of the plan
    # Rounds after which the client saved the state that it loaded, and the state that it has now; 0 without a state.
    state_rounds: tuple[int, int] = (0, 0)
    # Index of the model that it started from: 0 for ``layers``, otherwise the position in ``candidate_arrays``, from 1.
    model_index: int = 0

    def to_content(self, plan: TrainPlan, codec: Codec = EXACT) -> RecordDict:
        """Return the content of the reply, with only the metrics that the plan requests.

        Layers that the plan contained are sent as differences if the codec compresses them.
        """
        values = {NUM_EXAMPLES: self.num_examples, TRAIN_LOSS: self.train_loss, SECONDS: self.seconds}
        record = MetricRecord({name: value for name in plan.metrics if (value := values[name]) is not None})
        plan_id = ConfigRecord({"round": plan.round, "code-fingerprint": plan.code_fingerprint})
        plan_id["state-rounds"] = list(self.state_rounds)
        if plan.candidate_arrays:
            plan_id["model-index"] = self.model_index
        start = (plan.layers, *plan.candidate_arrays)[self.model_index]
        content = RecordDict(
            {
                ARRAYS: codec.encode(self.layers, start=start),
                METHOD_UPLOAD: EXACT.encode(self.uploaded_parts),
                METRICS: record,
                REPLY_CONFIG: plan_id,
            }
        )
        if self.strategy_arrays:
            content[STRATEGY_UPLOAD] = EXACT.encode(self.strategy_arrays)
        return content

    @classmethod
    def from_content(
        cls, content: RecordDict, partition_id: int, codec: Codec = EXACT, *, start: Layers | None = None
    ) -> "ClientUpdate":
        """Read the update from a reply to a plan of this codec; KeyError or ValueError if the reply is invalid.

        ``start`` are the layers that the client downloaded, as on the server; differences are added to them.
        """
        unknown = content.keys() - {ARRAYS, METHOD_UPLOAD, STRATEGY_UPLOAD, METRICS, REPLY_CONFIG}
        if unknown:
            raise ValueError(f"unexpected record {min(unknown)}")
        values: dict[str, float] = {}
        for name, value in content.metric_records[METRICS].items():
            if name not in CLIENT_METRICS:
                raise ValueError(f"unexpected metric {name}")
            if not isinstance(value, int | float):
                raise ValueError(f"metric {name} is {value} instead of a number")
            values[name] = value
        plan_id, records = content.config_records[REPLY_CONFIG], content.array_records
        examples = values.get(NUM_EXAMPLES)
        if examples is not None and not abs(examples) < 2**53:
            raise ValueError(f"metric {NUM_EXAMPLES} is {examples}, which is not a count")
        return cls(
            layers=codec.decode(records[ARRAYS], start=start),
            uploaded_parts=EXACT.decode(records[METHOD_UPLOAD]),
            strategy_arrays=EXACT.decode(records[STRATEGY_UPLOAD]) if STRATEGY_UPLOAD in records else {},
            partition_id=partition_id,
            num_examples=None if examples is None else int(examples),
            train_loss=values.get(TRAIN_LOSS),
            seconds=values.get(SECONDS),
            plan_id=(int(_number(plan_id["round"])), str(plan_id["code-fingerprint"])),
            state_rounds=_state_rounds(plan_id["state-rounds"]),
        )


@dataclass(frozen=True, kw_only=True)
class PersonalizedModelRequest:
    """Request to a simulated client, with a plan, for its personalized encoder."""

    adaptation_epochs: int = 0  # epochs that an unseen client trains for it; 0 for a participant
    after_adaptation: bool = False  # whether to return the encoder after these epochs or before them

    def attach_to(self, plan: RecordDict) -> RecordDict:
        request = ConfigRecord({"adaptation-epochs": self.adaptation_epochs, "after-adaptation": self.after_adaptation})
        return RecordDict({**plan, PERSONALIZED: request})

    @classmethod
    def from_content(cls, content: RecordDict) -> "PersonalizedModelRequest":
        request = content.config_records[PERSONALIZED]
        return cls(
            adaptation_epochs=as_count(request["adaptation-epochs"]), after_adaptation=bool(request["after-adaptation"])
        )


def plan_codec(content: RecordDict) -> Codec:
    """Return the codec of the models in a plan's message and in the reply to it."""
    return Codec(str(content.config_records[CONFIG]["wire-dtype"]))


def parse_model_index(content: RecordDict, *, num_models: int) -> int:
    """Read the index of the model that a client started from; `KeyError` or `ValueError` if it is invalid."""
    if num_models == 1:
        return 0
    model_index = as_count(content.config_records[REPLY_CONFIG]["model-index"])
    if model_index >= num_models:
        raise ValueError(f"it selected model {model_index} of {num_models}")
    return model_index


def _join_names(names: Sequence[str]) -> str:
    """Join names by newlines after an empty first line, because Flower cannot size an empty list or string."""
    return "\n" + "\n".join(names)


def _split_names(text: object) -> tuple[str, ...]:
    return tuple(str(text).splitlines()[1:])


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value} instead of a number")
    return value


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{value} instead of integers")
    return tuple(value)


def _digest(value: object) -> str:
    if not isinstance(value, str) or (value and not is_digest(value)):
        raise ValueError("the digest of the base layers is invalid")
    return value


def _state_rounds(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"the rounds of its state are {value}")
    return as_count(value[0]), as_count(value[1])


def as_count(value: object) -> int:
    """Return a record value as a count."""
    number = _number(value)
    if not (isinstance(number, int) and 0 <= number < 2**31) or isinstance(number, bool):
        raise ValueError(f"{number} instead of an integer")
    return number
