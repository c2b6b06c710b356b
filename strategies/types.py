"""Data types and interfaces between strategies, server and clients: models, server state, aggregators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.wire.messages import ClientUpdate

ClientState = dict[str, torch.Tensor]
TrainAgain = Callable[[Regularizer], object]  # trains the method again with a further term in the loss

EVALUATED = "evaluated"  # key of a mod's state: layers that are evaluated and exported instead of the trained ones
GLOBAL = "global"  # name of the model where there is only one


class NoState(TypedDict):
    """State of an algorithm that has none."""


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """One global model."""

    layers: Layers  # all exchanged layers
    broadcast: Layers = field(default_factory=dict)  # of the method's server side, see `SSLMethod`
    strategy_state: Any = field(default_factory=dict)  # `ServerStrategy.model_state_type`; empty before the first round
    mod_states: dict[str, dict[str, Layers]] = field(default_factory=dict)  # see `strategies.mods.base.Mod.finish`
    phase: int = 1  # phase of the schedule that its layers have reached, from 1
    num_updates: int = 0  # number of rounds in which it received updates

    @property
    def evaluated(self) -> Layers:
        """Return the layers to evaluate and export: the model, or what a mod has put in `EVALUATED` of its state."""
        layers = dict(self.layers)
        for state in self.mod_states.values():
            layers |= state.get(EVALUATED, {})
        return layers


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of the server after a round."""

    round: int = 0  # 0 before the first
    models: Mapping[str, GlobalModel] = field(default_factory=dict)  # each from its first update on
    # Round of the client's last used update, and the model that it started from.
    last_participation: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    # Clients that were dropped after their last used update, and its round; 0 if there is none.
    dropped: Mapping[int, int] = field(default_factory=dict)
    # Round after which the client saved its newest state; without clients that have none.
    state_rounds: Mapping[int, int] = field(default_factory=dict)
    # Round after which a client's state was evicted. The client starts without a state until it saves another one.
    evicted: Mapping[int, int] = field(default_factory=dict)
    strategy_state: Any = field(default_factory=dict)  # `ServerStrategy.strategy_state_type`; empty before round 1
    # The clock of virtual time, and messages to clients that train for an earlier round (buffered aggregation).
    in_flight: Mapping[str, Any] = field(default_factory=dict)

    def model_names(self) -> list[str]:
        """Return the names of the models, client 2 before client 10."""
        return sorted(self.models, key=lambda name: (len(name), name))

    def with_models(self, names: Sequence[str]) -> "ServerState":
        """Return a state with all these models. New models are copies of the first, if it exists."""
        first = self.models.get(names[0]) if names else None
        return self if first is None else replace(self, models={**dict.fromkeys(names, first), **self.models})

    def last_round(self, client: int, model: str) -> int | None:
        """Return the round of the client's last used update if it started from this model, else None."""
        round, start = self.last_participation.get(client, (None, None))
        return round if start == model else None

    def last_used_round(self, client: int) -> int:
        """Return the round of the client's last used update; 0 if there is none."""
        round, _ = self.last_participation.get(client, (0, GLOBAL))
        return self.dropped.get(client, round)


def model_suffix(name: str) -> str:
    """Return the suffix of file names and log keys of this model; empty if it is the only model."""
    return "" if name == GLOBAL else f"-{name}"


class Aggregator(Protocol):
    """Streaming aggregation of one round: `start`, then `add` for each client in order of its id, then `finish`."""

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Return the metrics that every client must report."""

    def start(self, global_layers: GlobalLayers) -> None:
        """Start a round with the global layers, which have the names and shapes of the uploads."""

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add a validated update, with the cosines between it and the layers that its client started from."""

    def finish(self) -> Layers:
        """Return the new layers, with the names, order, shapes and dtypes of the old ones."""


@runtime_checkable
class Mergeable(Aggregator, Protocol):
    """Aggregator that adds blocks of consecutive clients. Other processes may compute the sums of their first clients.

    Such a process calls `start` and `add` of a copy, and sends what `take_block` returns. An aggregator without these
    methods receives every update.
    """

    @property
    def can_merge(self) -> bool:
        """Return whether `merge` of a sum is the same as `add` of its clients."""

    def set_clients(self, clients: list[int]) -> None:
        """Set the ids of the clients of the round, ascending. They alone decide the blocks. Called before `start`."""

    def block_of(self, client: int) -> int:
        """Return the number of the block of a client."""

    def take_block(self) -> Any:
        """Return and remove the sum of the current block, picklable."""

    def merge(self, block: Any) -> None:
        """Add the sum of the first clients of a block, before the other ones of that block."""


@dataclass(frozen=True)
class Combination:
    """A new layer as a linear combination of the old one and those of the clients."""

    initial: float  # coefficient of the old layer
    clients: Mapping[int, float]  # coefficients by client id


@runtime_checkable
class LinearAggregator(Aggregator, Protocol):
    """Aggregator whose new weights are linear combinations, with coefficients that may depend on all updates."""

    def combination(self, name: str) -> Combination:
        """Return the combination of the last `finish` for a product, named by its factor B, or for a weight."""


@dataclass(frozen=True)
class CommunicationSummary:
    """Description of what an algorithm exchanges, for logs and tables."""

    download: str  # layers that a client downloads
    upload: str  # layers that it uploads
    required_metrics: tuple[str, ...]  # that a client must report
    local_state: str  # that stays on the client between rounds


@dataclass(frozen=True, kw_only=True)
class AggregatedModel:
    """A model that received updates in a round, for `ServerStrategy.after_aggregation`."""

    model: GlobalModel  # before the round
    round: int
    layers: Layers  # trained layers after it, which ``aggregator`` computed
    aggregator: Aggregator
    received: Mapping[int, tuple[str, ...]]  # names of the trained layers that each client of the model had downloaded
    num_clients: int  # that may train in some round, with devices that have joined, or left for now


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """Result of a round, for `ServerStrategy.on_round_end`."""

    round: int
    destinations: Mapping[int, tuple[str, ...]]  # models that each used update went into, by client
    bytes_up: Mapping[int, int]  # of each of these updates, by client
    # Features of the server's images under each of these clients' models, ``(images, dim)``. Empty if
    # ``num_comparison_images`` is 0.
    client_features: Mapping[int, torch.Tensor]
    extract_features: Callable[[Layers], torch.Tensor]  # features of the same images under given layers


class LocalData(Protocol):
    """Local images of a client, for `ClientStrategy.select_model`. Every call uses the same sample of them."""

    def features(self, method: SSLMethod, max_images: int) -> torch.Tensor:
        """Return the features of at most ``max_images`` images, float32 ``(n, feature_dim)``, on the CPU."""

    def loss(self, method: SSLMethod, max_images: int) -> float:
        """Return the mean training loss of at most ``max_images`` images, without training."""
