"""Robust averages, which a few clients cannot move wherever they like: median and trimmed mean.

Yin et al., ICML 2018, by the function behind Flower's FedMedian and FedTrimmedAvg. Unlike in Flower's strategies:

- layers keep their dtype; counters are rounded to the nearest integer, where Flower's make them fractions;
- running statistics go the way of the weights: in their mean a single client could still do as it likes.

All updates of a round are needed at once, i.e. the memory of as many models. If clients drop out, the rule goes on with
those that are left and warns when they are too few for what it promises: ending the run instead would let a single
client end it by sending garbage.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

from fedssl.arrays import TILE, Cosines, Layers, ReferenceLayers
from fedssl.errors import InputError
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.interfaces import StrategyContext
from strategies.weighted_sum import check_updates

log = logging.getLogger("fedssl")

_NEARLY_HALF = 0.5 - 1e-9


def median(global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
    """Median of every number over the clients; of an even number of clients, the mean of the middle two.

    Parameters
    ----------
    global_layers : Layers
        The layers the clients started from; they give names, order, shapes and dtypes.
    updates : sequence of ClientUpdate
        One per client, in any order.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        No updates, or a layer that does not fit.
    """
    # Cutting off just less than one half at each end leaves the middle one or two.
    return _trimmed(global_layers, updates, beta=_NEARLY_HALF)


def trimmed_mean(global_layers: Layers, updates: Sequence[ClientUpdate], *, beta: float = 0.2) -> Layers:
    """Mean of every number over the clients without the largest and the smallest ones.

    Parameters
    ----------
    global_layers, updates
        As in `median`.
    beta : float
        In (0, 0.5): of K clients, beta K, rounded down, are cut off at each end.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        beta is out of range, no updates, or a layer that does not fit.
    """
    return _trimmed(global_layers, updates, beta=_share(beta))


class BatchAggregator:
    """A rule that waits for all updates of a round.

    Parameters
    ----------
    combine : callable
        Makes the new global layers of the old ones and the updates.
    """

    required_metrics: tuple[str, ...] = ()

    def __init__(self, combine: Callable[[Layers, Sequence[ClientUpdate]], Layers]) -> None:
        self._combine = combine

    def start(self, global_layers: ReferenceLayers) -> None:
        """Begin a round."""
        self._global = global_layers
        self._updates: list[ClientUpdate] = []

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Keep an update that passed `ReferenceLayers.check`."""
        self._updates.append(update)

    def finish(self) -> Layers:
        """Combine the updates, and let go of them and of the old layers."""
        updates, layers = self._updates, self._global.layers
        self._updates, self._global = [], ReferenceLayers({})
        return self._combine(layers, updates)


class Median(FedSSLStrategy):
    """Median of the clients, number by number; see `median`."""

    def __init__(self) -> None:
        super().__init__(ServerStrategy(partial(BatchAggregator, median)))


class TrimmedServer(ServerStrategy):
    """The server side of the trimmed mean; ``beta`` as in `trimmed_mean`."""

    def __init__(self, *, beta: float) -> None:
        self.beta = _share(beta)
        super().__init__(partial(BatchAggregator, self._combine))

    def validate(self, context: StrategyContext) -> None:
        if not int(self.beta * context.clients_per_round):
            raise InputError(
                f"strategy.beta={self.beta:g} of clients_per_round={context.clients_per_round} is less than one "
                "client, so nobody is trimmed; beta must be at least 1/clients_per_round and below 0.5"
            )

    def _combine(self, global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
        if not int(self.beta * len(updates)):
            log.warning("only %d updates are left, of which beta=%g trims none: a plain mean", len(updates), self.beta)
        return trimmed_mean(global_layers, updates, beta=self.beta)


class TrimmedMean(FedSSLStrategy):
    """Mean without the extremes, number by number; ``beta`` as in `trimmed_mean`."""

    def __init__(self, *, beta: float = 0.2) -> None:
        super().__init__(TrimmedServer(beta=beta))


def _trimmed(global_layers: Layers, updates: Sequence[ClientUpdate], *, beta: float) -> Layers:
    updates = validated(global_layers, updates)
    result = {name: np.empty_like(array, order="C") for name, array in global_layers.items()}

    def trim(name: str) -> None:
        new = result[name].reshape(-1)
        clients = [update.layers[name].reshape(-1) for update in updates]
        step = max(TILE // len(clients), 1)  # of all clients together as many numbers as fit into the cache
        for start in range(0, len(new), step):
            tile = slice(start, start + step)
            mean = trim_mean(np.stack([values[tile] for values in clients]), beta)
            new[tile] = mean if new.dtype.kind == "f" else np.rint(mean)

    ReferenceLayers(global_layers).parallel_for(trim)
    return result


def validated(global_layers: Layers, updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    """The updates in order of partition id, if they fit the global layers."""
    if not updates:
        raise InputError("no client sent an update; at least one is needed")
    check_updates(ReferenceLayers(global_layers), updates)
    return sorted(updates, key=lambda update: update.partition_id)


def _share(beta: float) -> float:
    if not 0 < beta < 0.5:
        raise InputError(f"strategy.beta={beta} must be above 0 and below 0.5; strategy=fedavg trims nobody")
    return beta
