"""What strategies exchange with the server and the clients: models, server state, aggregators, contexts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedssl.arrays import Cosines, Layers, ReferenceLayers
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer
from fedssl.wire.messages import ClientUpdate

ClientState = dict[str, torch.Tensor]
TrainAgain = Callable[[Regularizer], object]  # trains the method as it is, like before, with one term more in its loss

GLOBAL = "global"  # name of the model where there is only one


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """One global model.

    Attributes
    ----------
    layers : Layers
        All that clients exchange.
    broadcast : Layers
        What the method's server side made for clients of this model; see `fedssl.methods.base.SSLMethod`.
    strategy_state : dict
        What the algorithm remembers: numbers, words, arrays and dictionaries of them.
    server_optimizer_state : dict of str to Layers
        What the server optimiser remembers.
    phase : int
        The phase of the schedule that its layers have come to, from 1.
    num_updates : int
        Rounds in which clients' updates went into it.
    """

    layers: Layers
    broadcast: Layers = field(default_factory=dict)
    strategy_state: dict[str, Any] = field(default_factory=dict)
    server_optimizer_state: dict[str, Layers] = field(default_factory=dict)
    phase: int = 1
    num_updates: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server after a round.

    Attributes
    ----------
    round : int
        The round; 0 before the first.
    models : mapping of str to GlobalModel
        By name. A model comes into being with the first update that goes into it.
    last_participation : mapping of int to (int, str)
        For a client whose last update was used: the round of that update, and the model it had started from.
    strategy_state : dict
        What the algorithm remembers beside what it remembers of each model: numbers, words, arrays and dictionaries
        of them.
    """

    round: int = 0
    models: Mapping[str, GlobalModel] = field(default_factory=dict)
    last_participation: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    strategy_state: dict[str, Any] = field(default_factory=dict)

    def model_names(self) -> list[str]:
        """Names of the models, client 2 before client 10."""
        return sorted(self.models, key=lambda name: (len(name), name))

    def with_models(self, names: Sequence[str]) -> "ServerState":
        """The state in which all these models exist: as copies of the first of them, if it does."""
        first = self.models.get(names[0]) if names else None
        return self if first is None else replace(self, models={**dict.fromkeys(names, first), **self.models})

    def last_round(self, client: int, model: str) -> int | None:
        """The round of the client's last update, if that was used and had started from this model."""
        round, start = self.last_participation.get(client, (None, None))
        return round if start == model else None


def model_suffix(name: str) -> str:
    """What stands behind a word that is said of this model: nothing if it is the only one."""
    return "" if name == GLOBAL else f"-{name}"


class Aggregator(Protocol):
    """A streaming aggregation of one round: `start`, `add` for each client in order of partition id, `finish`."""

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Metrics that every client must report."""
        ...

    def start(self, global_layers: ReferenceLayers) -> None:
        """Begin a round; clients send these layers."""
        ...

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Fold in one update that passed `ReferenceLayers.check`, and its cosines with what its client started from."""
        ...

    def finish(self) -> Layers:
        """New layers, with names, order, shapes and dtypes of the old ones."""
        ...


@dataclass(frozen=True)
class CommunicationSummary:
    """What an algorithm exchanges, in words for people.

    Attributes
    ----------
    download, upload : str
        Layers that a client receives, and sends back.
    required_metrics : tuple of str
        Metrics that a client must report.
    local_state : str
        What a client keeps between rounds.
    """

    download: str
    upload: str
    required_metrics: tuple[str, ...]
    local_state: str


@dataclass(frozen=True, kw_only=True)
class StrategyContext:
    """What an algorithm may refuse to work with.

    Attributes
    ----------
    method : SSLMethod
    clients_per_round, num_clients : int
    num_unseen_clients : int
        Clients that never train.
    rounds : int
    seed : int
    has_calibration : bool
        Whether the server trains models as well.
    server_optimizer : bool
        Whether the server takes steps of its own with what is aggregated.
    is_deployment : bool
        Whether clients are devices.
    server_has_images : bool
        Whether the server has images of its own.
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
    """A round that is done, as `ServerStrategy.on_round_end` sees it.

    Attributes
    ----------
    round : int
    destinations : mapping of int to tuple of str
        For each client whose update was used, the models that it went into.
    bytes_up : mapping of int to int
        Bytes of each of these updates.
    client_features : mapping of int to Tensor
        For each of these clients what its model makes of the server's images, ``(images, dim)``; empty unless
        the server side asks for it by ``num_comparison_images``.
    extract_features : callable
        What a model with these layers makes of the same images.
    """

    round: int
    destinations: Mapping[int, tuple[str, ...]]
    bytes_up: Mapping[int, int]
    client_features: Mapping[int, torch.Tensor]
    extract_features: Callable[[Layers], torch.Tensor]


class LocalData(Protocol):
    """A client's own images, for `ClientStrategy.select_model`; what is drawn of them is the same at every call."""

    def features(self, method: SSLMethod, max_images: int) -> torch.Tensor:
        """What the encoder makes of at most so many, float32 ``(n, feature_dim)``, on the CPU."""
        ...

    def loss(self, method: SSLMethod, max_images: int) -> float:
        """The mean training loss of at most so many; nothing is learned."""
        ...
