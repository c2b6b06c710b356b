"""Gossip: every client has its own model and mixes it with those of its neighbors. There is no shared model.

Decentralized averaging as in Dec-SSL's fully decentralized case (Wang et al., ICLR 2023, arXiv 2210.10947, section
6.1). In a round client i trains its model to y_i, and then uses x_i = sum_j W_ij y_j over itself and its neighbors in
a connected graph over the clients that train, with Metropolis-Hastings weights (`strategies.topology`). The server
only relays: it stores the models and mixes them on behalf of the clients, so that a client downloads only its own
mixture.

The edges of a client that is missing in a round (not sampled, failed, late) are ignored. Its weight goes to its
neighbors' own models, so that the weights of the present clients stay symmetric and sum to 1. Its own model stays
unchanged.

``topology="star"`` is a star with the server as its hub, which computes the plain mean over all: federated averaging
with equal weights, with one model. The paper does not define its weights; these are our choice.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.arrays import Cosines, GlobalLayers, Layers, is_weight
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.local_only import shared_training_problem
from strategies.low_rank_aggregation import CHANGING_WEIGHTS, low_rank_aggregation
from strategies.run_context import RunContext
from strategies.topology import MAX_CLIENTS, make_graph, metropolis_weights, plot_topology
from strategies.types import GLOBAL, Aggregator, CommunicationSummary, RoundOutcome, ServerState
from strategies.weighted_sum import WeightedSum

if TYPE_CHECKING:
    import networkx as nx


class NeighborAverage(WeightedSum):
    """New model of the client ``own``: the weighted sum over itself and its present neighbors.

    ``weights`` are W_ij of its neighbors. The weights of missing ones go to the client's own model.
    """

    def __init__(self, own: int, weights: Mapping[int, float]) -> None:
        super().__init__()
        self._own, self._weights = own, weights

    def start(self, global_layers: GlobalLayers) -> None:
        super().start(global_layers)
        self._self_weight = 1.0
        self._own_update: ClientUpdate | None = None

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add a neighbor's update. The client's own update is added in `finish`."""
        if update.partition_id == self._own:
            self._own_update = update
            return
        weight = self._weights[update.partition_id]
        self._self_weight -= weight
        self.add_weighted(update, weight)

    def finish(self) -> Layers:
        """Return the mixture. The client's own update must have been added."""
        assert self._own_update is not None
        self.add_weighted(self._own_update, self._self_weight)
        return super().finish()


class GossipServer(ServerStrategy):
    """Server side: a model for each client, and a graph of ``make_graph``.

    This function receives the number of clients, those that never train, and the seed. ``star``: whether the server is
    the hub, with one model.
    """

    def __init__(self, make_graph: Callable[..., "nx.Graph"], *, star: bool) -> None:
        self._make_graph, self._star = make_graph, star
        self.models_per_client = not star
        self._graph: nx.Graph | None = None
        self._weights: Mapping[int, Mapping[int, float]] = {}

    def starting_model(self, state: ServerState, round: int, client: int) -> str:
        return GLOBAL if self._star else str(client)

    def destination_models(self, state: ServerState, round: int, client: int, start: str) -> tuple[str, ...]:
        return (start,) if self._star else (start, *(str(other) for other in self._neighbor_weights(client)))

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        return WeightedSum() if name == GLOBAL else NeighborAverage(int(name), self._neighbor_weights(int(name)))

    def keeps_model(self, name: str, clients: Collection[int]) -> bool:
        return name != GLOBAL and int(name) not in clients

    def on_round_end(self, state: ServerState, outcome: RoundOutcome) -> tuple[Any, dict[str, Any]]:
        if self._star:
            return state.strategy_state, {}
        bytes_up = outcome.bytes_up
        pairs = ((client, other) for client in bytes_up for other in self._neighbor_weights(client))
        used = [(client, other) for client, other in pairs if client < other and other in bytes_up]
        moved = sum(bytes_up[client] + bytes_up[other] for client, other in used)  # one model in each direction
        return state.strategy_state, {
            "edges": len(used),
            "bytes_over_edges": moved,
            "consensus_distance": consensus_distance(
                [self._global_layers(state.models[str(client)].layers) for client in bytes_up]
            ),
        }

    def plot(self, folder: Path) -> None:
        assert self._graph is not None
        if len(self._graph) > MAX_CLIENTS:
            log.info("the topology is not drawn: it has more than %d clients", MAX_CLIENTS)
            return
        plot_topology(self._graph, folder / "topology.png")

    def problem(self, context: RunContext) -> Problem:
        if problem := shared_training_problem(context, strategy="gossip"):
            return problem
        if context.is_deployment and not self._star:
            return (
                "strategy=gossip is for simulations: the graph is over all clients, and which devices there will be is "
                "not known; set another strategy, or strategy.topology=star"
            )
        aggregation = low_rank_aggregation(context.settings)
        if aggregation in CHANGING_WEIGHTS and not self._star:
            return (
                f"tuning.aggregation={aggregation} adds products to a weight that clients share, and with "
                "strategy=gossip each client has its own; set tuning.aggregation=svd, factors or freeze_a"
            )
        return None

    def prepare(self, context: RunContext) -> None:
        self._global_layers = context.global_layers
        settings = context.settings
        self._graph = self._make_graph(
            num_clients=settings.num_clients, untrained=context.untrained_clients, seed=settings.seed
        )
        self._weights = {} if self._star else metropolis_weights(self._graph)

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        usual = super().describe_communication(usual)
        return usual if self._star else replace(usual, download=f"{usual.download}, mixed with those of its neighbors")

    def _neighbor_weights(self, client: int) -> Mapping[int, float]:
        """Return the client's neighbors and their weights. Clients that never train or joined later have none."""
        return {other: weight for other, weight in self._weights.get(client, {}).items() if other != client}


def consensus_distance(models: Sequence[GlobalLayers]) -> float:
    """Return the root mean squared distance of models from their mean, relative to the length of the mean.

    Over all weights and products as one vector, without running statistics and counters. 0 if the mean has length 0.
    """
    squared, length = 0.0, 0.0
    first, layers = models[0], [model.layers for model in models]
    for name in first.products:
        gram = first.deviation_products(name, layers)  # mean ||P_k - mean||^2 = tr(G) / K - 1^T G 1 / K^2
        squared += max(float(np.trace(gram) - gram.sum() / len(models)), 0.0)
        length += first.mean_square(name, layers)
    for name, array in first.layers.items():
        if is_weight(name, array) and name not in first.factors:
            mean = np.mean([model[name] for model in layers], axis=0, dtype=np.float64)
            squared += sum(float(np.square(model[name] - mean).sum()) for model in layers)
            length += float(np.square(mean).sum())
    return math.sqrt(squared / len(models) / length) if length else 0.0


class Gossip(FedSSLStrategy):
    r"""Averaging among neighbors. ``topology`` and its options as in `strategies.topology.make_graph`.

    $$
    x_i = \sum_j W_{ij} y_j \qquad
    W_{ij} = \begin{cases} 1 / (1 + \max(d_i, d_j)) & j \text{ is a neighbor of } i \\
    1 - \sum_{l \ne i} W_{il} & j = i \\ 0 & \text{else} \end{cases} \qquad
    c = \frac{1}{\lVert \bar{x} \rVert} \sqrt{\frac{1}{n} \sum_i \lVert x_i - \bar{x} \rVert^2}
    $$

    with $y_i$ the model of client i after its training, $x_i$ that of its next round, $d_i$ its number of neighbors,
    and c the ``consensus_distance``. The weight of a missing neighbor is added to $W_{ii}$.
    """

    def __init__(
        self,
        *,
        topology: str = "ring",
        degree: int | None = None,
        probability: float | None = None,
        file: str | None = None,
    ) -> None:
        make = partial(make_graph, topology, degree=degree, probability=probability, file=file)
        super().__init__(GossipServer(make, star=topology == "star"))
