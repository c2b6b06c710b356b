"""Robust averages, which a few malicious clients cannot control: median and trimmed mean.

Yin et al., ICML 2018. Deviations from Flower's FedMedian and FedTrimmedAvg:

- layers keep their dtype, and counters are rounded to the nearest integer. Flower makes them fractions;
- running statistics are aggregated like weights. A single client could control their mean.

All updates of a round are needed at once, see `strategies.update_store`. If clients drop out, the rule continues with
the remaining ones and logs a warning if they are too few for its guarantee. Aborting would let a single client end the
run with invalid updates.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial

import numpy as np
import torch

from fedssl.arrays import CACHE_TILE, Cosines, GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.run_context import RunContext
from strategies.update_store import PIECE, CollectingAggregator, UpdateStore


def median(global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
    """Return the elementwise median over the clients; for an even number of clients, the mean of the middle two."""
    return aggregate(global_layers, updates, BatchAggregator(_median), needs_cosines=False)


def num_trimmed(beta: float, clients: int) -> int:
    """Return floor(beta K) of the decimal number ``beta``, since 0.29 * 100 is below 29 in binary."""
    return int(Decimal(str(beta)) * clients)


def trimmed_mean(global_layers: Layers, updates: Sequence[ClientUpdate], *, beta: float = 0.2) -> Layers:
    """Return the elementwise mean over the clients without the largest and the smallest values.

    ``global_layers`` and ``updates`` as in `strategies.fedavg.fedavg`. Of K clients, floor(beta K) are trimmed at each
    end; ``beta`` is in (0, 0.5).
    """
    check_arguments("strategy", beta=beta)
    return aggregate(global_layers, updates, BatchAggregator(partial(_trimmed, beta=beta)), needs_cosines=False)


class BatchAggregator(CollectingAggregator):
    """Aggregator that collects all updates of a round, and applies ``combine`` to the old layers and them."""

    required_metrics: tuple[str, ...] = ()

    def __init__(self, combine: Callable[[GlobalLayers, UpdateStore], Layers]) -> None:
        self._combine = combine

    def start(self, global_layers: GlobalLayers) -> None:
        """Start a round."""
        self._global = global_layers
        self._updates = self.new_store(global_layers)
        self.clients: list[int] = []  # partition ids in the order of `add`

    def working_memory(self, layers: Layers, number: int) -> int:
        widest = max((array.itemsize for array in layers.values()), default=0)
        tile = 4 * max(CACHE_TILE, number) + number * PIECE  # two copies, their order, and what was read
        return torch.get_num_threads() * tile * widest

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Store an update that `GlobalLayers.check` validated."""
        self._updates.add(update.layers)
        self.clients.append(update.partition_id)

    def finish(self) -> Layers:
        """Combine the updates, and release them and the old layers."""
        if not len(self._updates):
            raise InputError("no client sent an update; at least one is needed")
        reference, self._global = self._global, GlobalLayers({})
        result = self._combine(reference, self._updates)
        self._updates.close()
        return result


class Median(FedSSLStrategy):
    r"""Elementwise median of the clients. See `median`.

    $$
    w_j = \operatorname{median}(w_{1,j}, \dots, w_{K,j})
    $$

    for every element j; with an even K the mean of the two in the middle.
    """

    def __init__(self) -> None:
        super().__init__(ServerStrategy(partial(BatchAggregator, _median)))


class TrimmedServer(ServerStrategy):
    """Server side of the trimmed mean. ``beta`` as in `trimmed_mean`."""

    def __init__(self, *, beta: float) -> None:
        check_arguments("strategy", beta=beta)
        self.beta = beta
        super().__init__(partial(BatchAggregator, self._combine))

    def problem(self, context: RunContext) -> Problem:
        per_round = context.settings.clients_per_round
        if not num_trimmed(self.beta, per_round):
            return (
                f"strategy.beta={self.beta:g} of clients_per_round={per_round} is less than one "
                "client, so nobody is trimmed; beta must be at least 1/clients_per_round and below 0.5"
            )
        return None

    def _combine(self, global_layers: GlobalLayers, updates: UpdateStore) -> Layers:
        if not num_trimmed(self.beta, len(updates)):
            log.warning("only %d updates are left, of which beta=%g trims none: a plain mean", len(updates), self.beta)
        return _trimmed(global_layers, updates, beta=self.beta)


class TrimmedMean(FedSSLStrategy):
    r"""Elementwise mean without the extremes. ``beta`` as in `trimmed_mean`.

    $$
    w_j = \frac{1}{K - 2b} \sum_{i=b+1}^{K-b} w_{(i),j} \qquad b = \lfloor \beta K \rfloor
    $$

    with $w_{(i),j}$ the i-th smallest of the clients' elements j.
    """

    def __init__(self, *, beta: float = 0.2) -> None:
        super().__init__(TrimmedServer(beta=beta))


def _trimmed(global_layers: GlobalLayers, updates: UpdateStore, *, beta: float) -> Layers:
    result = {name: np.empty_like(array, order="C") for name, array in global_layers.layers.items()}
    cut = num_trimmed(beta, len(updates))
    last = len(updates) - cut

    def trim(name: str) -> None:
        new = result[name].reshape(-1)
        step = max(CACHE_TILE // len(updates), 1)  # of all clients together as many elements as fit into the cache
        for tile, clients in updates.tiles(name, step):
            partitioned = np.partition(np.stack(clients), (cut, last - 1), axis=0)
            mean = partitioned[cut:last].mean(axis=0)
            new[tile] = mean if new.dtype.kind == "f" else np.rint(mean)

    global_layers.parallel_for(trim)
    return result


# Trimming just less than one half at each end leaves the middle one or two.
_median = partial(_trimmed, beta=0.5 - 1e-9)
