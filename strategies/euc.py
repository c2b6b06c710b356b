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
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedssl.arrays import TILE, Cosines, Layers, ReferenceLayers, is_weight
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy, layers_in_state, upload_names_of
from strategies.fedavg import mean
from strategies.interfaces import GLOBAL, Aggregator, ClientState, CommunicationSummary, GlobalModel, StrategyContext
from strategies.weighted_sum import WeightedSum


def is_deferrable(name: str, array: np.ndarray) -> bool:
    """Whether a layer may be averaged every phi rounds: a weight, but no bias and no part of a normalisation."""
    return is_weight(name, array) and array.ndim >= 2


class DiscrepancySum:
    """A weighted sum that also measures how far the clients are from the average, layer by layer.

    Parameters
    ----------
    inner : WeightedSum
        The sum. The mean of the squares has its weights, as the identity of the module asks for.

    Attributes
    ----------
    discrepancy : dict of str to float
        For every layer that can wait, the mean over clients of the squared distance from the average.
    """

    def __init__(self, inner: WeightedSum) -> None:
        self._sum = inner

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Metrics that every client must report."""
        return self._sum.required_metrics

    def start(self, global_layers: ReferenceLayers) -> None:
        """Begin a round."""
        self._global = global_layers
        self._squares = {name: 0.0 for name, array in global_layers.layers.items() if is_deferrable(name, array)}
        self._weights = 0.0
        self._sum.start(global_layers)

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Fold in one update that passed `ReferenceLayers.check`."""
        self._sum.add(update, cosines)
        weight = update.num_examples if self._sum.weighting == "examples" else 1
        assert weight is not None  # the sum has refused updates without it
        for name, distance in self._distances(update.layers).items():
            self._squares[name] += weight * distance
        self._weights += weight

    def finish(self) -> Layers:
        """Return the average; ``discrepancy`` is that of the round from now on."""
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

        self._global.parallel_for(measure)
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


def averaging_intervals(discrepancy: Mapping[str, float], sizes: Mapping[str, int], *, phi: int) -> dict[str, int]:
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


class EUCServer(ServerStrategy):
    """A server with an interval for each layer, see the module.

    A model's memory has the ``intervals`` of layers that wait, from the first adjustment on, and the round in which
    each layer was ``averaged`` last.

    Parameters
    ----------
    interval : int
        phi, at least 1; 1: plain averaging.
    weighting : {"examples", "uniform"}
        Weights of the average and of the discrepancy: n_k / sum n, or 1/K.

    Raises
    ------
    InputError
        ``interval`` is below 1, or ``weighting`` another word.
    """

    def __init__(self, *, interval: int, weighting: str) -> None:
        if interval < 1:
            raise InputError(f"strategy.interval={interval} is below 1; 1 is plain averaging, the paper uses 2 and 4")
        self.interval = interval
        super().__init__(mean(weighting))

    def aggregator(self, round: int, name: str = GLOBAL) -> WeightedSum | DiscrepancySum:
        total = self._make_aggregator()
        assert isinstance(total, WeightedSum)
        return DiscrepancySum(total) if self._is_adjustment_round(round) else total

    def upload_names(self, model: GlobalModel, round: int, layers: Layers) -> tuple[str, ...] | None:
        waits = model.strategy_state.get("intervals", {})
        due = tuple(name for name in layers if round % waits.get(name, 1) == 0)
        return None if len(due) == len(layers) else due

    def download_names(
        self, model: GlobalModel, round: int, layers: Layers, last: int | None
    ) -> tuple[str, ...] | None:
        if last is None:
            return None
        # An average of the round in which the client took part was made after the client had left.
        averaged = model.strategy_state.get("averaged", {})
        new = tuple(name for name in layers if averaged.get(name, math.inf) >= last)
        return None if len(new) == len(layers) else new

    def after_aggregation(
        self,
        model: GlobalModel,
        round: int,
        layers: Layers,
        *,
        aggregator: Aggregator,
        received: Mapping[int, tuple[str, ...]],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        due = self.upload_names(model, round, layers)
        names = tuple(layers) if due is None else due
        strategy_metrics: dict[str, Any] = {
            "synced_layers": len(names),
            "bytes_saved": {
                "up": len(received) * _bytes_excluded(layers, names),
                "down": sum(_bytes_excluded(layers, some) for some in received.values()),
            },
        }
        intervals_now = dict(model.strategy_state.get("intervals", {}))
        averaged = {**model.strategy_state.get("averaged", {}), **dict.fromkeys(names, round)}
        if self._is_adjustment_round(round):  # all layers were averaged
            assert isinstance(aggregator, DiscrepancySum)
            per_round = {name: d / intervals_now.get(name, 1) for name, d in aggregator.discrepancy.items()}
            new = averaging_intervals(per_round, {name: layers[name].size for name in per_round}, phi=self.interval)
            if new != {name: intervals_now.get(name, 1) for name in new}:
                strategy_metrics["intervals"] = {name: phi for name, phi in new.items() if phi > 1}
            intervals_now = new
        return {"intervals": intervals_now, "averaged": averaged}, strategy_metrics

    def is_valid_model_state(self, strategy_state: Mapping[str, Any]) -> bool:
        return strategy_state.keys() <= {"intervals", "averaged"} and all(
            isinstance(numbers, dict) and all(isinstance(number, int) and number >= 1 for number in numbers.values())
            for numbers in strategy_state.values()
        )

    def validate(self, context: StrategyContext) -> None:
        if self.interval > 1 and context.clients_per_round < 2:
            raise InputError(
                "strategy=euc compares the clients of a round but "
                f"clients_per_round={context.clients_per_round}; 2 or more are needed"
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

    def _is_adjustment_round(self, round: int) -> bool:
        return self.interval > 1 and round % self.interval == 0


class EUCClient(ClientStrategy):
    """A client that goes on with its own weights where it receives none, and keeps those that it does not send."""

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join(["layers that are not averaged in the round", *method.local_parts]))

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
    """Averaging with an interval for each layer; ``interval`` and ``weighting`` as in `EUCServer`."""

    def __init__(self, *, interval: int = 2, weighting: str = "uniform") -> None:
        super().__init__(
            EUCServer(interval=interval, weighting=weighting), EUCClient() if interval > 1 else ClientStrategy()
        )


def _bytes_excluded(layers: Layers, names: Sequence[str]) -> int:
    """Bytes of the layers that are not named."""
    return sum(array.nbytes for name, array in layers.items() if name not in names)
