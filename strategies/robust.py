"""Robust averages, which a few clients cannot move wherever they like: median, trimmed mean, Krum and Multi-Krum.

Yin et al., ICML 2018 (median, trimmed mean) and Blanchard et al., NeurIPS 2017 (Krum), by the functions behind Flower's
FedMedian, FedTrimmedAvg and MultiKrum. Around them, and unlike Flower's strategies:

- layers keep their dtype; counters are rounded to the nearest integer, where Flower's make them fractions;
- running statistics go the way of the weights: in their mean a single client could still do as it likes;
- Krum measures distances over weights alone, not over counters and statistics, which may be thousands of times larger,
  and between deviations from the global model: Flower expands ||x - y||^2 in float32, and between models that are alike
  but for one part in a thousand nothing is left of it;
- Krum's choice is averaged uniformly, so that no client reports a number of pictures.

All updates of a round are needed at once, i.e. the memory of as many models; Krum takes about four times that. If
clients drop out, the rule goes on with those that are left and warns when they are too few for what it promises: ending
the run instead would let a single client end it by sending garbage.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedssl.errors import InputError
from fedssl.layers import TILE, Cosines, GlobalLayers, Layers, is_weight
from fedssl.messages import ARRAYS, METRICS, ClientUpdate, to_record
from strategies.base import Circumstances, FedSSLStrategy, Rule, ServerHalf
from strategies.state import Model
from strategies.weighted_sum import WeightedSum, check_all, weighted_sum

log = logging.getLogger("fedssl")

_NEARLY_HALF = 0.5 - 1e-9
_POSITION = "position"


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


def krum(global_layers: Layers, updates: Sequence[ClientUpdate], *, malicious: int = 1, select: int = 1) -> Layers:
    """Mean of the clients that are `closest` to the others.

    Parameters
    ----------
    global_layers, updates
        As in `median`.
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
    return weighted_sum(global_layers, chosen, rule=WeightedSum())


def closest(
    global_layers: Layers, updates: Sequence[ClientUpdate], *, malicious: int = 1, select: int = 1
) -> list[ClientUpdate]:
    """The clients with the least sums of squared distances to their K - f - 2 nearest neighbours.

    Parameters
    ----------
    global_layers, updates
        As in `median`.
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
    updates = _checked(global_layers, updates)
    contents = []
    for position, update in enumerate(updates):
        deviations = {
            name: np.subtract(update.layers[name], array, dtype=np.result_type(array, np.float32))
            for name, array in global_layers.items()
            if is_weight(name, array)
        }
        contents.append(RecordDict({ARRAYS: to_record(deviations), METRICS: MetricRecord({_POSITION: position})}))
    best = select_multikrum(contents, num_malicious_nodes=malicious, num_nodes_to_select=select)
    return [updates[k] for k in sorted(int(content.metric_records[METRICS][_POSITION]) for content in best)]  # type: ignore[arg-type]  # Flower's values are a union


class Collected:
    """A rule that waits for all updates of a round.

    Parameters
    ----------
    combine : callable
        Makes the new global layers of the old ones and the updates.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, combine: Callable[[Layers, Sequence[ClientUpdate]], Layers]) -> None:
        self._combine = combine

    def start(self, global_layers: GlobalLayers) -> None:
        self._global = global_layers
        self._updates: list[ClientUpdate] = []

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        self._updates.append(update)

    def finish(self) -> Layers:
        updates, self._updates = self._updates, []
        return self._combine(self._global.layers, updates)


class KrumRule(Collected):
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
    def enough(self) -> int:
        """How many updates make it safe."""
        return max(2 * self.malicious + 3, self.select + self.malicious)

    def _closest(self, global_layers: Layers, updates: Sequence[ClientUpdate]) -> Layers:
        if len(updates) < self.enough:
            log.warning(
                "only %d updates are left, but Krum with malicious=%d and select=%d needs %d to be safe",
                *(len(updates), self.malicious, self.select, self.enough),
            )
        chosen = closest(global_layers, updates, malicious=self.malicious, select=self.select)
        self.chosen = [update.partition_id for update in chosen]
        return weighted_sum(global_layers, chosen, rule=WeightedSum())


class Median(FedSSLStrategy):
    """Median of the clients, number by number; see `median`."""

    def __init__(self) -> None:
        super().__init__(ServerHalf(partial(Collected, median)))


class TrimmedServer(ServerHalf):
    """The server half of the trimmed mean; ``beta`` as in `trimmed_mean`."""

    def __init__(self, *, beta: float) -> None:
        self.beta = _share(beta)
        super().__init__(partial(Collected, self._combine))

    def check(self, circumstances: Circumstances) -> None:
        if not int(self.beta * circumstances.clients_per_round):
            raise InputError(
                f"strategy.beta={self.beta:g} of clients_per_round={circumstances.clients_per_round} is less than one "
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


class KrumServer(ServerHalf):
    """The server half of Krum, which records whom it chose."""

    def check(self, circumstances: Circumstances) -> None:
        rule = self._make_rule()
        assert isinstance(rule, KrumRule)
        if circumstances.clients_per_round < rule.enough:
            raise InputError(
                f"strategy=krum with malicious={rule.malicious} and select={rule.select} needs clients_per_round of "
                f"{rule.enough} or more (2 malicious + 3, and select + malicious) but it is "
                f"{circumstances.clients_per_round}; raise it or lower these"
            )

    def remember(
        self, model: Model, round: int, layers: Layers, *, rule: Rule, received: Mapping[int, tuple[str, ...]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        assert isinstance(rule, KrumRule)
        return model.memory, {"selected": rule.chosen}


class Krum(FedSSLStrategy):
    """Krum and Multi-Krum; ``malicious`` and ``select`` as in `krum`. The chosen clients are recorded."""

    def __init__(self, *, malicious: int = 1, select: int = 1) -> None:
        super().__init__(KrumServer(partial(KrumRule, malicious=malicious, select=select)))


def _trimmed(global_layers: Layers, updates: Sequence[ClientUpdate], *, beta: float) -> Layers:
    updates = _checked(global_layers, updates)
    result = {name: np.empty_like(array, order="C") for name, array in global_layers.items()}

    def trim(name: str) -> None:
        new = result[name].reshape(-1)
        clients = [update.layers[name].reshape(-1) for update in updates]
        step = max(TILE // len(clients), 1)  # of all clients together as many numbers as fit into the cache
        for start in range(0, len(new), step):
            tile = slice(start, start + step)
            mean = trim_mean(np.stack([values[tile] for values in clients]), beta)
            new[tile] = mean if new.dtype.kind == "f" else np.rint(mean)

    GlobalLayers(global_layers).for_each(trim)
    return result


def _checked(global_layers: Layers, updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    """The updates in order of partition id, if they fit the global layers."""
    if not updates:
        raise InputError("no client sent an update; at least one is needed")
    check_all(GlobalLayers(global_layers), updates)
    return sorted(updates, key=lambda update: update.partition_id)


def _share(beta: float) -> float:
    if not 0 < beta < 0.5:
        raise InputError(f"strategy.beta={beta} must be above 0 and below 0.5; strategy=fedavg trims nobody")
    return beta


def _check_krum(malicious: int, select: int) -> None:
    if malicious < 0:
        raise InputError(f"strategy.malicious={malicious} is negative; it is the number of clients to be safe from")
    if select < 1:
        raise InputError(f"strategy.select={select} is below 1; 1 is Krum, more is Multi-Krum")
