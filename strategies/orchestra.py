"""Orchestra's server (Lubana et al., ICML 2022, arXiv 2205.11506): averages networks, clusters the clients' centroids.

Every client sends the centroids of the clusters it found among its own projections, see `fedssl.methods.orchestra`.
These are not averaged, because their order means nothing: the server clusters those of all clients of the round, with
equal sizes again, and what it finds are the clusters of the next round. All else is averaged.

With a method that has no centroids it is plain averaging, and says so.

Where this differs from the authors' code:

- they fit the global centroids by 500 steps of gradient descent to the assignment of Sinkhorn-Knopp, from those of the
  round before; here they come from the same k-means with Sinkhorn-Knopp as the local ones, which has no random numbers
  and takes milliseconds;
- they weigh clients by numbers of batches, here it is by pictures;
- global centroids only come down and do not travel back up, and no client's memory or target networks travel.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedssl.layers import Alignment, GlobalLayers, Layers
from fedssl.messages import ClientUpdate
from fedssl.methods.base import SSLMethod
from fedssl.methods.clustering import global_centroids
from strategies.base import FedSSLStrategy, Travels
from strategies.fedavg import WEIGHTINGS
from strategies.weighted_sum import WeightedSum, one_of

log = logging.getLogger("fedssl")

LOCAL, GLOBAL = "local_centroids", "centroids"


class SumAndLocalCentroids:
    """The weighted sum of all layers but the local centroids, which are gathered.

    Attributes
    ----------
    gathered : list of ndarray
        The local centroids of the round, in order of partition ids.
    """

    def __init__(self, total: WeightedSum) -> None:
        self._sum = total
        self.gathered: list[np.ndarray] = []

    def start(self, global_layers: GlobalLayers) -> None:
        layers = dict(global_layers.layers)
        self._unused = {name: layers.pop(name) for name in (LOCAL,) if name in layers}
        self.gathered = []
        self._sum.start(GlobalLayers(layers))

    def add(self, update: ClientUpdate, alignment: Alignment) -> None:
        self._sum.add(update, alignment)
        self.gathered += [update.layers[name] for name in self._unused]

    def finish(self) -> Layers:
        return {**self._sum.finish(), **self._unused}


class Orchestra(FedSSLStrategy):
    """Averages the networks and clusters the centroids of ``method=orchestra``.

    The global layers have a place for local centroids, because clients do; it stays as it was at first, zero.

    Parameters
    ----------
    weighting : {"examples", "uniform"}
        Of the average: n_k / sum n, or 1 / K for the K updates received.
    metrics : sequence of str
        What clients report for the log in addition.
    """

    def __init__(self, *, weighting: str = "examples", metrics: Sequence[str] = ()) -> None:
        super().__init__(metrics=metrics)
        total = WeightedSum(weighting=one_of("strategy.weighting", weighting, WEIGHTINGS))
        self._needs = total.needs
        self._sum = SumAndLocalCentroids(total)

    def needs(self) -> tuple[str, ...]:
        return self._needs

    def rule(self, round: int) -> SumAndLocalCentroids:
        return self._sum

    def up(self, round: int, layers: Layers) -> tuple[str, ...]:
        return tuple(name for name in layers if name != GLOBAL)

    def after_aggregate(self, round: int, layers: Layers) -> Layers:
        if GLOBAL not in layers:
            return layers
        local = torch.from_numpy(np.concatenate(self._sum.gathered))
        return {**layers, GLOBAL: global_centroids(local, old=torch.from_numpy(layers[GLOBAL])).numpy()}

    def check(self, method: SSLMethod, *, clients_per_round: int) -> None:
        if GLOBAL not in method.tensors:
            log.warning("strategy=orchestra with %s, which has no centroids, is plain averaging", type(method).__name__)

    def travels(self, method: SSLMethod) -> Travels:
        usual = super().travels(method)
        return replace(usual, up=", ".join(part for part in usual.up.split(", ") if part != GLOBAL))
