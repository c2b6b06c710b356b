"""Krum and Multi-Krum: the clients that are closest to the others (Blanchard et al., NeurIPS 2017).

The selection is that of Flower's MultiKrum. Deviations from it:

- distances are computed over weights only, not over counters and statistics, which may be thousands of times larger;
- they are computed in float64 from deviations from the global model. Flower expands ||x - y||^2 in the dtype of the
  models, which loses the difference of models that differ by one part in a thousand;
- the selected clients are averaged uniformly, so that no client reports a number of images. Counters are rounded to
  the nearest integer.

All updates of a round are needed at once, see `strategies.update_store`. If clients drop out, the rule continues with
the remaining ones and logs a warning if they are too few for its guarantee, as in `strategies.robust`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fedssl.arrays import NO_COSINES, GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.gram_matrix import deviation_gram, gram_memory
from strategies.robust import BatchAggregator
from strategies.run_context import RunContext
from strategies.types import AggregatedModel, Combination
from strategies.update_store import UpdateStore
from strategies.weighted_sum import WeightedSum


def krum(
    global_layers: Layers | GlobalLayers, updates: Sequence[ClientUpdate], *, malicious: int = 1, select: int = 1
) -> Layers:
    """Return the mean of the clients with the smallest sums of squared distances to their K - f - 2 nearest neighbors.

    ``global_layers`` and ``updates`` as in `strategies.fedavg.fedavg`. f, ``malicious``, is the number of malicious
    clients, at least 0. ``select`` is that of selected clients, at most all; 1 is Krum, more is Multi-Krum.
    """
    return aggregate(global_layers, updates, KrumAggregator(malicious=malicious, select=select), needs_cosines=False)


def scores(gram: np.ndarray, *, malicious: int) -> np.ndarray:
    """Return the sums (K,) of squared distances to the K - f - 2 nearest others, at least one.

    ``gram`` (K, K) has the inner products of the clients' deviations from any point. A single client scores 0.
    """
    squares = np.diag(gram)
    distances = np.maximum(squares[:, None] + squares - 2 * gram, 0)  # rounding may make it negative
    np.fill_diagonal(distances, np.inf)  # a client is not its own neighbor
    neighbors = min(max(len(gram) - malicious - 2, 1), len(gram) - 1)
    return np.asarray(np.sort(distances, axis=1)[:, :neighbors].sum(axis=1))


class KrumAggregator(BatchAggregator):
    """Krum for one round, with the options of `krum`. ``chosen`` are the clients that the last `finish` selected."""

    def __init__(self, *, malicious: int, select: int) -> None:
        super().__init__(self._mean_of_closest)
        check_arguments("strategy", malicious=malicious, select=select)
        self.malicious, self.select = malicious, select
        self.chosen: list[int] = []

    @property
    def min_safe_updates(self) -> int:
        """Return the number of updates for which the guarantee holds."""
        return max(2 * self.malicious + 3, self.select + self.malicious)

    def working_memory(self, layers: Layers, number: int) -> int:
        read = 3 * sum(array.nbytes for array in layers.values())  # a chosen update and its sum
        return gram_memory(layers, number, exact=True) + read

    def combination(self, name: str) -> Combination:
        """Return 1 / K for each of the K selected clients."""
        return Combination(0.0, dict.fromkeys(self.chosen, 1 / len(self.chosen)))

    def _mean_of_closest(self, global_layers: GlobalLayers, updates: UpdateStore) -> Layers:
        if len(updates) < self.min_safe_updates:
            log.warning(
                "only %d updates are left, but Krum with malicious=%d and select=%d needs %d to be safe",
                *(len(updates), self.malicious, self.select, self.min_safe_updates),
            )
        gram = deviation_gram(global_layers.weights(), updates, exact=True)
        nearest = np.argsort(scores(gram, malicious=self.malicious), kind="stable")[: self.select]
        indices = sorted(nearest.tolist())
        self.chosen = [self.clients[index] for index in indices]
        total = WeightedSum()
        total.set_clients(indices)
        total.start(global_layers)
        for index in indices:  # read one by one
            total.add(ClientUpdate(layers=updates.layers(index), partition_id=index), NO_COSINES)
        return total.finish()


class KrumServer(ServerStrategy):
    """Server side of Krum, which logs the selected clients."""

    def problem(self, context: RunContext) -> Problem:
        aggregator = self._make_aggregator()
        assert isinstance(aggregator, KrumAggregator)
        if context.settings.clients_per_round < aggregator.min_safe_updates:
            return (
                f"strategy=krum with malicious={aggregator.malicious} and select={aggregator.select} needs "
                f"clients_per_round of {aggregator.min_safe_updates} or more (2 malicious + 3, and select + malicious) "
                f"but it is {context.settings.clients_per_round}; raise it or lower these"
            )
        return None

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        assert isinstance(done.aggregator, KrumAggregator)
        return done.model.strategy_state, {"selected": done.aggregator.chosen}


class Krum(FedSSLStrategy):
    r"""Krum and Multi-Krum. ``malicious`` and ``select`` as in `krum`. The selected clients are logged.

    $$
    s_k = \sum_{j \in N_k} \lVert w_k - w_j \rVert^2 \qquad w = \frac{1}{m} \sum_{k \in M} w_k
    $$

    with $N_k$ the K - f - 2 nearest neighbors of client k (f is ``malicious``), at least one, and M the m clients with
    the smallest scores (m is ``select``).
    """

    def __init__(self, *, malicious: int = 1, select: int = 1) -> None:
        super().__init__(KrumServer(partial(KrumAggregator, malicious=malicious, select=select)))
