"""A round at its start: the models that clients start from, the clients, and one attempt as a whole."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedssl.arrays import GlobalLayers, Layers
from fedssl.wire.identity import NodeInfo
from strategies.run_context import RunContext
from strategies.types import GlobalModel, ServerState


@dataclass(frozen=True)
class StartingModel:
    """A model at the start of a round."""

    model: GlobalModel
    trainable: Layers
    frozen: Layers  # clients only use them
    upload_names: tuple[str, ...] | None  # None means all trainable layers
    expected_upload: GlobalLayers  # these layers, to validate updates against
    # Of the strategy's server side: arrays that clients download, and those like the ones that they upload.
    strategy_arrays: Layers = field(default_factory=dict)
    expected_arrays: GlobalLayers = field(default_factory=lambda: GlobalLayers({}))


@dataclass(frozen=True, kw_only=True)
class UntrainedLayers:
    """Layers that a client receives besides those that it trains."""

    frozen: tuple[str, ...]  # names of layers of the model
    broadcast: Layers  # of the method's server side
    base: Layers = field(default_factory=dict)  # which nothing changes


@dataclass
class ClientAssignment:
    """One client in a round. ``start`` and ``destinations`` are set when its reply is read."""

    client: int
    candidates: tuple[str, ...]  # names of the models from which it selects its start; usually there is one
    start: str  # name of the model that it starts from; at first the first candidate
    downloaded: tuple[str, ...]  # names of the trained layers that it receives
    bytes_down: int = 0
    destinations: tuple[str, ...] = ()  # names of the models that its update goes into
    features: Tensor | None = None  # of the server's images under its model, if the strategy compares models
    base_bytes: int = 0  # bytes of base layers among ``bytes_down``
    variants: tuple[Hashable, ...] = ()  # of each mod, see `strategies.mods.base.Mod.variant`


@dataclass(frozen=True, kw_only=True)
class RoundStart:
    """One attempt at the round that follows a state, and the clients that are available."""

    context: RunContext
    state: ServerState
    nodes: Mapping[int, int]  # node ids by client id
    info: Mapping[int, NodeInfo]  # what the nodes of edge clients reported, by node id
    attempt: int = 0  # number of earlier attempts at this round

    @property
    def round(self) -> int:
        return self.state.round + 1

    def info_of(self, client: int) -> NodeInfo | None:
        """Return what an edge client reported; None in a simulation."""
        return self.info.get(self.nodes[client])
