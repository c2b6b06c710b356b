"""Krum and Multi-Krum: the clients that are closest to the others (Blanchard et al., NeurIPS 2017).

The choice is that of Flower's MultiKrum. Unlike there:

- distances are taken over weights alone, not over counters and statistics, which may be thousands of times larger;
- they are computed in float64 from deviations from the global model: Flower expands ||x - y||^2 in the dtype of the
  models, and between models that are alike but for one part in a thousand nothing is left of it;
- the chosen clients are averaged uniformly, so that no client reports a number of images; counters are rounded to the
  nearest integer.

All updates of a round are needed at once, i.e. the memory of as many models, and little beside it. If clients drop out,
the rule goes on with those that are left and warns when they are too few for what it promises, as in
`strategies.robust`.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedssl.arrays import Layers, ReferenceLayers, is_weight
from fedssl.errors import InputError
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.interfaces import Aggregator, GlobalModel, StrategyContext
from strategies.robust import BatchAggregator, validated
from strategies.update_geometry import deviation_gram
from strategies.weighted_sum import WeightedSum, weighted_sum

log = logging.getLogger("fedssl")


def krum(global_layers: Layers, updates: Sequence[ClientUpdate], *, malicious: int = 1, select: int = 1) -> Layers:
    """Mean of the clients that are `closest` to the others.

    Parameters
    ----------
    global_layers, updates
        As in `strategies.robust.median`.
    malicious, select : int
        As in `closest`.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        A setting is out of range, no updates, or a layer that does not fit.
    """
    chosen = closest(global_layers, updates, malicious=malicious, select=select)
    return weighted_sum(global_layers, chosen, aggregator=WeightedSum())


def closest(
    global_layers: Layers, updates: Sequence[ClientUpdate], *, malicious: int = 1, select: int = 1
) -> list[ClientUpdate]:
    """The clients with the least sums of squared distances to their K - f - 2 nearest neighbours.

    Parameters
    ----------
    global_layers, updates
        As in `strategies.robust.median`.
    malicious : int
        f, the number of clients that may send anything; 0 or more.
    select : int
        How many clients are chosen, at most all; 1: Krum, more: Multi-Krum.

    Returns
    -------
    list of ClientUpdate
        The chosen ones in order of partition id.

    Raises
    ------
    InputError
        A setting is out of range, no updates, or a layer that does not fit.
    """
    _check_krum(malicious, select)
    updates = validated(global_layers, updates)
    weights = ReferenceLayers({name: array for name, array in global_layers.items() if is_weight(name, array)})
    gram = deviation_gram(weights, [update.layers for update in updates], exact=True)
    best = np.argsort(scores(gram, malicious=malicious), kind="stable")[:select]
    return [updates[k] for k in sorted(best)]


def scores(gram: np.ndarray, *, malicious: int) -> np.ndarray:
    """Sums of squared distances to the K - f - 2 nearest others, at least one; a client alone has the score 0.

    Parameters
    ----------
    gram : ndarray
        (K, K), inner products of the clients' deviations from any one point.
    malicious : int
        f.

    Returns
    -------
    ndarray
        (K,), not negative.
    """
    squares = np.diag(gram)
    distances = np.maximum(squares[:, None] + squares - 2 * gram, 0)  # rounding may leave less than nothing
    np.fill_diagonal(distances, np.inf)  # nobody is his own neighbour
    neighbours = min(max(len(gram) - malicious - 2, 1), len(gram) - 1)
    return np.asarray(np.sort(distances, axis=1)[:, :neighbours].sum(axis=1))


class KrumAggregator(BatchAggregator):
    """Krum for one round; ``malicious`` and ``select`` as in `krum`.

    Attributes
    ----------
    chosen : list of int
        Partition ids of the clients that the last `finish` took.
    """

    def __init__(self, *, malicious: int, select: int) -> None:
        super().__init__(self._closest)
        _check_krum(malicious, select)
        self.malicious, self.select = malicious, select
        self.chosen: list[int] = []

    @property
    def min_safe_updates(self) -> int:
        """How many updates make it safe."""
        return max(2 * self.malicious + 3, self.select + self.malicious)

    def _closest(self, global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
        if len(updates) < self.min_safe_updates:
            log.warning(
                "only %d updates are left, but Krum with malicious=%d and select=%d needs %d to be safe",
                *(len(updates), self.malicious, self.select, self.min_safe_updates),
            )
        chosen = closest(global_layers, updates, malicious=self.malicious, select=self.select)
        self.chosen = [update.partition_id for update in chosen]
        return weighted_sum(global_layers, chosen, aggregator=WeightedSum())


class KrumServer(ServerStrategy):
    """The server side of Krum, which records whom it chose."""

    def validate(self, context: StrategyContext) -> None:
        aggregator = self._make_aggregator()
        assert isinstance(aggregator, KrumAggregator)
        if context.clients_per_round < aggregator.min_safe_updates:
            raise InputError(
                f"strategy=krum with malicious={aggregator.malicious} and select={aggregator.select} needs "
                "clients_per_round of "
                f"{aggregator.min_safe_updates} or more (2 malicious + 3, and select + malicious) but it is "
                f"{context.clients_per_round}; raise it or lower these"
            )

    def after_aggregation(
        self,
        model: GlobalModel,
        round: int,
        layers: Layers,
        *,
        aggregator: Aggregator,
        received: Mapping[int, tuple[str, ...]],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        assert isinstance(aggregator, KrumAggregator)
        return model.strategy_state, {"selected": aggregator.chosen}


class Krum(FedSSLStrategy):
    """Krum and Multi-Krum; ``malicious`` and ``select`` as in `krum`. The chosen clients are recorded."""

    def __init__(self, *, malicious: int = 1, select: int = 1) -> None:
        super().__init__(KrumServer(partial(KrumAggregator, malicious=malicious, select=select)))


def _check_krum(malicious: int, select: int) -> None:
    if malicious < 0:
        raise InputError(f"strategy.malicious={malicious} is negative; it is the number of clients to be safe from")
    if select < 1:
        raise InputError(f"strategy.select={select} is below 1; 1 is Krum, more is Multi-Krum")
