"""EUC: layers whose clients differ least travel less often (FedLAMA, Lee et al., arXiv 2110.10302; "EUC" in L-DAWA).

After every phi-th round the server measures, for each layer l, how far its clients were from their average,
d_l = mean_k ||avg_l - x_l,k||^2 / (rounds since l was averaged before). Layers are taken in ascending order of
d_l / dim_l until their share of all d exceeds the share of numbers that is left; those taken are averaged every phi
rounds from then on, the others every round. What is not averaged stays with the client, which trains it on alone; the
global model keeps the last average there, so the exported encoder is whole only after a multiple of phi rounds.

Where this differs from the authors' code:

- only weights with two or more dimensions can wait, as there; but the running statistics of normalisations are averaged
  every round, like biases and normalisation weights: the authors' code never averages them;
- the share of d is taken over the layers that can wait, not over all, because the share of numbers is, too;
- the first adjustment is after round phi; the authors' code waits for 5 epochs;
- a client that was not drawn for some rounds receives exactly the layers that were averaged meanwhile.

The squares need one number per layer beside the sum: mean ||avg - x_k||^2 = mean ||x_k - g||^2 - ||avg - g||^2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedssl.errors import InputError
from fedssl.layers import TILE, Alignment, GlobalLayers, Layers, is_weight
from fedssl.messages import ClientUpdate, TrainPlan
from fedssl.methods.base import SSLMethod
from fedssl.model_layers import copies, kept_names, travelling_layers, travelling_names
from strategies.base import FedSSLStrategy, Rule, State, Travels
from strategies.fedavg import WEIGHTINGS
from strategies.weighted_sum import WeightedSum, one_of


def can_wait(name: str, array: np.ndarray) -> bool:
    """Whether a layer may be averaged every phi rounds: a weight, but no bias and no part of a normalisation."""
    return is_weight(name, array) and array.ndim >= 2


def intervals(discrepancy: Mapping[str, float], sizes: Mapping[str, int], *, phi: int) -> dict[str, int]:
    """Rounds between two averages of each layer.

    Parameters
    ----------
    discrepancy : mapping of str to float
        d_l of the layers that can wait: squared distance of the clients from their average, per round; not negative.
    sizes : mapping of str to int
        Numbers in each of these layers.
    phi : int
        The longer interval.

    Returns
    -------
    dict of str to int
        phi for the layers whose waiting saves most for the least discrepancy, 1 for the others; 1 for all of them if no
        client differs from the average.
    """
    result = dict.fromkeys(discrepancy, 1)
    all_d, all_numbers = sum(discrepancy.values()), sum(sizes[name] for name in discrepancy)
    if not all_d:
        return result
    d, numbers = 0.0, 0
    for name in sorted(discrepancy, key=lambda name: discrepancy[name] / sizes[name]):
        d += discrepancy[name]
        numbers += sizes[name]
        result[name] = phi
        if 1 - numbers / all_numbers < d / all_d:  # as in the authors' code the layer that crosses is taken
            break
    return result


class MeasuredSum:
    """A weighted sum that also measures how far the clients are from the average, layer by layer.

    Parameters
    ----------
    total : WeightedSum
        The sum. The mean of the squares has its weights, so that the identity above holds.
    """

    def __init__(self, total: WeightedSum) -> None:
        self._sum = total

    def start(self, global_layers: GlobalLayers) -> None:
        self._global = global_layers
        self._squares = {name: 0.0 for name, array in global_layers.layers.items() if can_wait(name, array)}
        self._weights = 0.0
        self._sum.start(global_layers)

    def add(self, update: ClientUpdate, alignment: Alignment) -> None:
        self._sum.add(update, alignment)
        weight = update.num_examples if self._sum.weighting == "examples" else 1
        assert weight is not None  # the sum has refused updates without it
        for name, distance in self._distances(update.layers).items():
            self._squares[name] += weight * distance
        self._weights += weight

    def finish(self) -> Layers:
        average = self._sum.finish()
        moved = self._distances(average)
        self.discrepancy = {
            name: max(square / self._weights - moved[name], 0.0)  # rounding may leave less than nothing
            for name, square in self._squares.items()
        }
        return average

    def _distances(self, layers: Layers) -> dict[str, float]:
        """||x - g||^2 of every layer that can wait."""
        found = dict.fromkeys(self._squares, 0.0)

        def measure(name: str) -> None:
            if name in found:
                found[name] = square_distance(layers[name], self._global.layers[name])

        self._global.for_each(measure)
        return found


def square_distance(x: np.ndarray, g: np.ndarray) -> float:
    """||x - g||^2, subtracted first and summed in float64."""
    x, g = x.reshape(-1), g.reshape(-1)
    total = 0.0
    for start in range(0, len(x), TILE):
        tile = slice(start, start + TILE)
        difference = np.subtract(x[tile], g[tile], dtype=np.float64)
        total += float(np.square(difference, out=difference).sum())
    return total


class EUC(FedSSLStrategy):
    """Averaging with an interval for each layer; see the module.

    Parameters
    ----------
    interval : int
        phi, at least 1; 1: plain averaging.
    weighting : {"uniform", "examples"}
        Weights of the average and of the discrepancy: 1/K, or n_k / sum n.
    metrics : sequence of str
        What clients report for the log in addition.
    """

    def __init__(self, *, interval: int = 2, weighting: str = "uniform", metrics: Sequence[str] = ()) -> None:
        super().__init__(metrics=metrics)
        if interval < 1:
            raise InputError(f"strategy.interval={interval} is below 1; 1 is plain averaging, the paper uses 2 and 4")
        self.interval = interval
        self._sum = WeightedSum(weighting=one_of("strategy.weighting", weighting, WEIGHTINGS))
        self._measured = MeasuredSum(self._sum)
        self._intervals: dict[str, int] = {}  # of the layers that can wait, from the first adjustment on
        self._averaged: dict[str, int] = {}  # the round in which a layer was averaged last
        self._seen: dict[int, int] = {}  # the round in which a client's update was used last

    # --- server half ---

    def needs(self) -> tuple[str, ...]:
        return self._sum.needs

    def rule(self, round: int) -> Rule:
        return self._measured if self._adjusts(round) else self._sum

    def up(self, round: int, layers: Layers) -> tuple[str, ...]:
        due = tuple(name for name in layers if round % self._intervals.get(name, 1) == 0)
        return () if len(due) == len(layers) else due

    def down(self, round: int, layers: Layers, client: int) -> tuple[str, ...]:
        if client not in self._seen:
            return ()
        # An average of the round in which the client took part was made after the client had left.
        new = tuple(name for name in layers if self._averaged.get(name, math.inf) >= self._seen[client])
        return () if len(new) == len(layers) else new

    def after_aggregate(self, round: int, layers: Layers) -> Layers:
        due = self.up(round, layers) or tuple(layers)
        clients = [row.client for row in self.report.clients]
        down = {client: self.down(round, layers, client) or tuple(layers) for client in clients}
        saved = {
            "up": len(clients) * (_nbytes(layers, layers) - _nbytes(layers, due)),
            "down": sum(_nbytes(layers, layers) - _nbytes(layers, names) for names in down.values()),
        }
        self.report.findings.update(synced_layers=len(due), bytes_saved=saved)
        self._averaged.update(dict.fromkeys(due, round))
        self._seen.update(dict.fromkeys(clients, round))
        for client in self.report.dropped:  # nobody knows what it holds now: it begins anew
            self._seen.pop(client, None)
        if self._adjusts(round):
            self._adjust(layers)
        return layers

    def check(self, method: SSLMethod, *, clients_per_round: int) -> None:
        if self.interval == 1:
            return
        if clients_per_round < 2:
            raise InputError(
                f"strategy=euc compares the clients of a round but clients_per_round={clients_per_round}; "
                "2 or more are needed"
            )
        if all(can_wait(name, array) for name, array in travelling_layers(method).items()):
            raise InputError("strategy=euc needs layers that travel every round, such as biases; the model has none")

    def travels(self, method: SSLMethod) -> Travels:
        usual = super().travels(method)
        if self.interval == 1:
            return usual
        return replace(
            usual,
            down=f"{usual.down}; of these the layers that were averaged since the client's last round",
            up=f"{usual.up}; of these some weights only every {self.interval} rounds",
            stays=", ".join(["layers that are not averaged in the round", *method.kept]),
        )

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "intervals": dict(self._intervals),
            "averaged": dict(self._averaged),
            "seen": dict(self._seen),
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._intervals, self._averaged, self._seen = (dict(state[key]) for key in ("intervals", "averaged", "seen"))

    def _adjusts(self, round: int) -> bool:
        return self.interval > 1 and round % self.interval == 0

    def _adjust(self, layers: Layers) -> None:
        """New intervals, after a round in which all layers were averaged."""
        per_round = {name: d / self._intervals.get(name, 1) for name, d in self._measured.discrepancy.items()}
        new = intervals(per_round, {name: layers[name].size for name in per_round}, phi=self.interval)
        before = {name: self._intervals.get(name, 1) for name in new}
        self._intervals = new
        if new != before:
            self.report.findings["intervals"] = {name: phi for name, phi in new.items() if phi > 1}

    # --- client half ---

    def load_global(self, method: SSLMethod, plan: TrainPlan, state: State | None) -> None:
        own = None if state is None else {name: value for name, value in state.items() if name not in plan.layers}
        super().load_global(method, plan, own)

    def keep(self, method: SSLMethod, plan: TrainPlan) -> State:
        due = set(plan.up or travelling_names(method))
        return copies(method, [*kept_names(method), *(name for name in travelling_names(method) if name not in due)])


def _nbytes(layers: Layers, names: Sequence[str] | Layers) -> int:
    return sum(layers[name].nbytes for name in names)
