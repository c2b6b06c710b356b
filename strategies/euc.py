"""EUC: layers with a small Euclidean discrepancy between clients are averaged less often (FedLAMA, arXiv 2110.10302).

L-DAWA calls it "EUC". After every phi-th round the server measures for each layer l how far its clients are from their
average, d_l = mean_k ||avg_l - x_l,k||^2 / (rounds since the previous average of l). Layers are selected in ascending
order of d_l / dim_l until their share of all d exceeds the share of parameters that is left. The selected layers are
averaged every phi rounds from then on, the others every round. A layer that is not averaged stays on the client, which
continues to train it. The global model contains its last average, so the exported encoder is consistent only after a
multiple of phi rounds.

Deviations from the authors' code:

- only weights with two or more dimensions can be deferred, as there. Running statistics of normalizations are averaged
  every round, like biases and normalization weights. The authors' code never averages them;
- the share of d is taken over the deferrable layers, like the share of parameters, not over all layers;
- the first adjustment is after round phi. The authors' code waits for 5 epochs;
- a client that was not sampled for some rounds downloads exactly the layers that were averaged in the meantime.

The squares need one number per layer beside the sum: mean ||avg - x_k||^2 = mean ||x_k - g||^2 - ||avg - g||^2.

LoRA's factors A and B are averaged in the same rounds. Their x is the product, avg the mean of the clients' products.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from fedssl.arrays import CACHE_TILE, Cosines, GlobalLayers, Layers, is_weight
from fedssl.logs import log
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names
from fedssl.rules import Problem
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy, layers_in_state, upload_names_of
from strategies.fedavg import make_weighted_mean
from strategies.run_context import RunContext
from strategies.types import GLOBAL, AggregatedModel, Aggregator, ClientState, CommunicationSummary, GlobalModel
from strategies.weighted_sum import WeightedSum


def is_deferrable(name: str, array: np.ndarray) -> bool:
    """Return whether a layer may be averaged every phi rounds: a weight, but no bias or part of a normalization."""
    return is_weight(name, array) and array.ndim >= 2


class DiscrepancySum(WeightedSum):
    """Weighted sum that also measures the discrepancy between clients, layer by layer.

    After `finish`, ``discrepancy`` has for every deferrable layer or product the mean over clients of the squared
    distance from the average. This mean has the weights of the sum, as the identity in the module docstring requires.
    ``layers_of`` has the names of its layer or factors.
    """

    def start(self, global_layers: GlobalLayers) -> None:
        super().start(global_layers)
        deferrable = [name for name, array in global_layers.layers.items() if is_deferrable(name, array)]
        pairs = {pair.weight: (pair.a, pair.b) for pair in global_layers.products.values()}
        factors = {name for names in pairs.values() for name in names}
        self._squares = {name: 0.0 for name in deferrable if name not in factors}
        self.layers_of = {name: (name,) for name in self._squares} | {
            name: tuple(factor for factor in names if factor in global_layers.layers) for name, names in pairs.items()
        }
        self._factors: list[tuple[float, Layers]] = []  # of each client, with its weight
        self._weights = 0.0

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        super().add(update, cosines)
        weight = update.num_examples if self.weighting == "examples" else 1
        assert weight is not None  # the sum requires it
        for name, distance in self._distances(update.layers).items():
            self._squares[name] += weight * distance
        self._factors.append((weight, {name: update.layers[name] for name in self._global.factors}))
        self._weights += weight

    def finish(self) -> Layers:
        """Return the average and set ``discrepancy``."""
        average = super().finish()
        displacement = self._distances(average)
        self.discrepancy = {
            name: max(square / self._weights - displacement[name], 0.0)  # rounding may make it negative
            for name, square in self._squares.items()
        } | self._product_discrepancies()
        self._factors = []
        return average

    def _product_discrepancies(self) -> dict[str, float]:
        """Return the discrepancy of every product: sum_k c_k ||P_k - g||^2 - ||sum_k c_k (P_k - g)||^2."""
        weights = np.array([weight for weight, _ in self._factors]) / self._weights
        discrepancies: dict[str, float] = {}

        def measure(name: str) -> None:
            if name in self._global.products:
                gram = self._global.deviation_products(name, [factors for _, factors in self._factors])
                spread = float(weights @ gram.diagonal() - weights @ gram @ weights)
                discrepancies[name] = max(spread, 0.0)  # rounding may make it negative

        self._global.parallel_for(measure)
        return {pair.weight: discrepancies[name] for name, pair in self._global.products.items()}

    def _distances(self, layers: Layers) -> dict[str, float]:
        """Return ||x - g||^2 of every deferrable layer."""
        distances = dict.fromkeys(self._squares, 0.0)

        def measure(name: str) -> None:
            if name in distances:
                distances[name] = square_distance(layers[name], self._global.layers[name])

        self._global.parallel_for(measure)
        return distances


def square_distance(x: np.ndarray, g: np.ndarray) -> float:
    """Return ||x - g||^2, subtracted first and summed in float64."""
    x, g = x.reshape(-1), g.reshape(-1)
    total = 0.0
    for start in range(0, len(x), CACHE_TILE):
        tile = slice(start, start + CACHE_TILE)
        difference = np.subtract(x[tile], g[tile], dtype=np.float64)
        total += float(np.square(difference, out=difference).sum())
    return total


def averaging_intervals(discrepancy: Mapping[str, float], sizes: Mapping[str, int], *, phi: int) -> dict[str, int]:
    """Return the number of rounds between two averages of each deferrable layer.

    It is ``phi`` for the layers that save most for the least discrepancy, 1 for the others. All are 1 if no client
    differs from the average. ``discrepancy`` has d_l, the squared distance of the clients from their average, per
    round, and ``sizes`` the number of parameters of each of these layers.
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
        if 1 - numbers / all_numbers < d / all_d:  # as in the authors' code, including the layer that crosses
            break
    return result


class EUCState(TypedDict, total=False):
    """Intervals of deferrable layers, from the first adjustment on, and the round of each layer's last average."""

    intervals: dict[str, int]
    averaged: dict[str, int]


class EUCServer(ServerStrategy):
    """Server with an interval for each layer, see the module docstring; ``interval``, phi, of 1 is plain averaging."""

    model_state_type = EUCState

    def __init__(self, *, interval: int, weighting: str) -> None:
        self.interval, self.weighting, self.exchanges_parts = interval, weighting, interval > 1
        super().__init__(make_weighted_mean(weighting))

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        if self._is_adjustment_round(round):
            return DiscrepancySum(weighting=self.weighting)
        return super().aggregator(round, name)

    def upload_names(self, model: GlobalModel, round: int, layers: Layers) -> tuple[str, ...] | None:
        intervals = self._intervals(model)
        due = tuple(name for name in layers if round % intervals.get(name, 1) == 0)
        return None if len(due) == len(layers) else due

    def download_names(
        self, model: GlobalModel, round: int, layers: Layers, last: int | None
    ) -> tuple[str, ...] | None:
        if last is None:
            return None
        # The average of the client's last round was computed after its upload.
        state: EUCState = model.strategy_state
        averaged = state.get("averaged", {})
        new = tuple(name for name in layers if averaged.get(name, math.inf) >= last)
        return None if len(new) == len(layers) else new

    def after_aggregation(self, done: AggregatedModel) -> tuple[EUCState, dict[str, Any]]:
        model, round, layers, aggregator = done.model, done.round, done.layers, done.aggregator
        due = self.upload_names(model, round, layers)
        names = tuple(layers) if due is None else due
        strategy_metrics: dict[str, Any] = {
            "synced_layers": len(names),
            "bytes_saved": {
                "up": len(done.received) * _bytes_excluded(layers, names),
                "down": sum(_bytes_excluded(layers, some) for some in done.received.values()),
            },
        }
        state: EUCState = model.strategy_state
        intervals_now = self._intervals(model)
        averaged = {**state.get("averaged", {}), **dict.fromkeys(names, round)}
        if self._is_adjustment_round(round):  # all layers were averaged
            assert isinstance(aggregator, DiscrepancySum)
            layers_of = aggregator.layers_of
            per_round = {
                name: d / intervals_now.get(layers_of[name][0], 1) for name, d in aggregator.discrepancy.items()
            }
            sizes = {name: sum(layers[layer].size for layer in layers_of[name]) for name in per_round}
            intervals = averaging_intervals(per_round, sizes, phi=self.interval)
            new = {layer: phi for name, phi in intervals.items() for layer in layers_of[name]}
            if new != {name: intervals_now.get(name, 1) for name in new}:
                strategy_metrics["intervals"] = {name: phi for name, phi in new.items() if phi > 1}
            intervals_now = new
        return {"intervals": intervals_now, "averaged": averaged}, strategy_metrics

    def problem(self, context: RunContext) -> Problem:
        settings = context.settings
        if self.interval > 1 and settings.clients_per_round < 2:
            return (
                "strategy=euc compares the clients of a round but "
                f"clients_per_round={settings.clients_per_round}; 2 or more are needed"
            )
        if self.interval > 1 and settings.calibration is not None:
            return (
                "calibration=auxiliary trains all layers on the server, but with strategy=euc clients keep some and "
                "never receive its changes of these; set calibration=none, or strategy.interval=1"
            )
        return None

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        if 1 < self.interval >= context.settings.rounds:
            log.warning(
                "strategy.interval=%d has no effect in rounds=%d, in which all layers are averaged; set more rounds",
                *(self.interval, context.settings.rounds),
            )

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        usual = super().describe_communication(usual)
        if self.interval == 1:
            return usual
        return replace(
            usual,
            download=f"{usual.download}; of these the layers that were averaged since the client's last round",
            upload=f"{usual.upload}; of these some weights only every {self.interval} rounds",
        )

    def _intervals(self, model: GlobalModel) -> dict[str, int]:
        """Return the intervals of deferrable layers, which a checkpoint may have made 0."""
        state: EUCState = model.strategy_state
        return {name: max(interval, 1) for name, interval in state.get("intervals", {}).items()}

    def _is_adjustment_round(self, round: int) -> bool:
        return self.interval > 1 and round % self.interval == 0


class EUCClient(ClientStrategy):
    """Client that trains its own weights for layers that it does not download, and saves those not uploaded."""

    mixes_own_layers = True
    keeps = "layers that are not averaged in the round"

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        return load_and_start_round(method, layers_in_state(state or {}, method) | plan.layers)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        sent = upload_names_of(method, plan)
        return clone_tensors(
            method, [*local_names(method), *(name for name in exchanged_names(method) if name not in sent)]
        )


class EUC(FedSSLStrategy):
    r"""Averaging with an interval for each layer. ``interval`` and ``weighting`` as in `EUCServer`.

    $$
    u_l = \sum_k \beta_k x_{k,l} \qquad
    d_l = \frac{1}{\tau_l} \sum_k \beta_k \lVert u_l - x_{k,l} \rVert^2 \qquad
    \tau_l = \begin{cases} \varphi & \text{position of } l \le m \\ 1 & \text{else} \end{cases}
    $$

    $$
    m = \min \left\{ i : \frac{\sum_{j \le i} d_j}{\sum_j d_j} >
    1 - \frac{\sum_{j \le i} \dim_j}{\sum_j \dim_j} \right\}
    $$

    with $x_{k,l}$ layer l after the training of client k, $\tau_l$ the rounds between two averages of it, $\varphi$ the
    ``interval``, and positions in ascending order of $d_l / \dim_l$. A layer is averaged if $\tau_l$ divides the round.
    """

    def __init__(self, *, interval: int = 2, weighting: str = "uniform") -> None:
        super().__init__(
            EUCServer(interval=interval, weighting=weighting), EUCClient() if interval > 1 else ClientStrategy()
        )


def _bytes_excluded(layers: Layers, names: Sequence[str]) -> int:
    return sum(array.nbytes for name, array in layers.items() if name not in names)
