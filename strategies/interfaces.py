"""What strategies exchange with the server and the clients: models, server state, aggregators, contexts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict

import torch

from fedssl.arrays import Cosines, Layers, ReferenceLayers
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.wire.messages import ClientUpdate

ClientState = dict[str, torch.Tensor]
TrainAgain = Callable[[Regularizer], object]  # trains the method again with a further term in the loss

GLOBAL = "global"  # name of the model where there is only one


class NoState(TypedDict):
    """State of an algorithm that has none."""


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """One global model.

    Attributes
    ----------
    layers : Layers
        All exchanged layers.
    broadcast : Layers
        Parts that the method's server side computed for clients; see `fedssl.methods.base.SSLMethod`.
    strategy_state : dict
        State of the algorithm, a `ServerStrategy.model_state_type`. Empty before the first round.
    server_optimizer_state : dict of str to Layers
        Moments of the server optimizer.
    phase : int
        Phase of the schedule that its layers have reached, from 1.
    num_updates : int
        Number of rounds in which it received updates.
    """

    layers: Layers
    broadcast: Layers = field(default_factory=dict)
    strategy_state: Any = field(default_factory=dict)
    server_optimizer_state: dict[str, Layers] = field(default_factory=dict)
    phase: int = 1
    num_updates: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of the server after a round.

    Attributes
    ----------
    round : int
        Number of the round; 0 before the first.
    models : mapping of str to GlobalModel
        Models by name. A model exists from its first update on.
    last_participation : mapping of int to (int, str)
        Round of the client's last used update, and the model that it started from.
    state_rounds : mapping of int to int
        Round after which the client saved its newest state; without clients that have none.
    strategy_state : dict
        State of the algorithm across models, a `ServerStrategy.strategy_state_type`. Empty before the first round.
    in_flight : dict
        Messages to clients that train for an earlier round, of buffered aggregation in simulations.
    """

    round: int = 0
    models: Mapping[str, GlobalModel] = field(default_factory=dict)
    last_participation: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    state_rounds: Mapping[int, int] = field(default_factory=dict)
    strategy_state: Any = field(default_factory=dict)
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


def model_suffix(name: str) -> str:
    """Return the suffix of file names and log keys of this model; empty if it is the only model."""
    return "" if name == GLOBAL else f"-{name}"


class Aggregator(Protocol):
    """Streaming aggregation of one round: `start`, then `add` for each client in order of its id, then `finish`."""

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Return the metrics that every client must report."""
        ...

    def start(self, global_layers: ReferenceLayers) -> None:
        """Start a round with the global layers, which have the names and shapes of the uploads."""
        ...

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add a validated update, with the cosines between it and the layers that its client started from."""
        ...

    def finish(self) -> Layers:
        """Return the new layers, with the names, order, shapes and dtypes of the old ones."""
        ...


@dataclass(frozen=True)
class CommunicationSummary:
    """Description of what an algorithm exchanges, for logs and tables.

    Attributes
    ----------
    download, upload : str
        Layers that a client downloads and uploads.
    required_metrics : tuple of str
        Metrics that a client must report.
    local_state : str
        State that stays on the client between rounds.
    """

    download: str
    upload: str
    required_metrics: tuple[str, ...]
    local_state: str


@dataclass(frozen=True, kw_only=True)
class StrategyContext:
    """Properties of a run that an algorithm validates.

    Attributes
    ----------
    num_unseen_clients : int
        Clients that never train.
    has_calibration : bool
        Whether the server calibrates models by training.
    server_optimizer : bool
        Whether a server optimizer applies the aggregate.
    is_deployment : bool
        Whether clients are edge clients.
    server_has_images : bool
        Whether the server has images.
    """

    method: SSLMethod
    clients_per_round: int
    num_clients: int
    num_unseen_clients: int = 0
    rounds: int = 2**31
    seed: int = 0
    has_calibration: bool = False
    server_optimizer: bool = False
    is_deployment: bool = False
    server_has_images: bool = True


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """Result of a round, for `ServerStrategy.on_round_end`.

    Attributes
    ----------
    destinations : mapping of int to tuple of str
        Models that each used update went into, by client.
    bytes_up : mapping of int to int
        Bytes of each of these updates, by client.
    client_features : mapping of int to Tensor
        Features of the server's images under each of these clients' models, ``(images, dim)``. Empty if
        ``num_comparison_images`` is 0.
    extract_features : callable
        Return the features of the same images under a model with the given layers.
    """

    round: int
    destinations: Mapping[int, tuple[str, ...]]
    bytes_up: Mapping[int, int]
    client_features: Mapping[int, torch.Tensor]
    extract_features: Callable[[Layers], torch.Tensor]


class LocalData(Protocol):
    """Local images of a client, for `ClientStrategy.select_model`. Every call uses the same sample of them."""

    def features(self, method: SSLMethod, max_images: int) -> torch.Tensor:
        """Return the features of at most ``max_images`` images, float32 ``(n, feature_dim)``, on the CPU."""
        ...

    def loss(self, method: SSLMethod, max_images: int) -> float:
        """Return the mean training loss of at most ``max_images`` images, without training."""
        ...
