"""Streaming weighted sum of FedAvg, loss-weighted averaging, L-DAWA and M-DAWA.

All of them compute ``sum_k beta_k s_k w_k / sum_k beta_k`` for every layer. The weights beta are 1, the numbers of
examples (Eq. 1 of L-DAWA, Rehman et al., ICCV 2023) or exp(-loss) (its Eq. 6). The scale s is 1 (FedAvg), the cosine of
the client's layer (Eqs. 4-6) or that of its whole model (Eqs. 2-3) with the global one. With ``normalize`` the divisor
is ``sum_k beta_k |s_k|``, so that scales weight the clients against each other and no layer shrinks. Updates are added
one by one, so a round needs the memory of one model beside the global one for any number of clients.

Running statistics are averaged with s = 1 (``buffers="average"``), or scaled like weights as in the authors' code
(``buffers="scale"``). Counters are averaged with s = 1 and rounded to the nearest integer.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedssl.arrays import TILE, Cosines, Layers, ReferenceLayers, is_weight
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.wire.messages import NUM_EXAMPLES, TRAIN_LOSS, ClientUpdate

# Layers in shared memory are read-only, and are only read here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

SCALES = ("none", "layer", "model")
REQUIRED_METRICS = {"uniform": (), "examples": (NUM_EXAMPLES,), "loss": (TRAIN_LOSS,)}

NO_COSINES = Cosines(weights={}, statistics={}, model=1.0, first_invalid=None)


@dataclass(frozen=True)
class _Term:
    """One client's part of the sum: multiply the sum by ``rescale``, then add ``weight * s * layers``."""

    layers: Layers
    cosines: Cosines
    rescale: float
    weight: float


class WeightedSum:
    """Weighted average of client models, optionally scaled by their cosines with the global model.

    Call `start`, then `add` for each client in order of partition id (or `add_all`, faster and bit-identical), then
    `finish`. `start` starts a new round.

    Parameters
    ----------
    weighting : {"uniform", "examples", "loss"}
        beta: 1, the number of examples, or exp(-loss).
    scale : {"none", "layer", "model"}
        s: 1, the cosine of each layer, or one cosine over all weights.
    buffers : {"average", "scale"}
        Average running statistics, or scale them like weights.
    normalize : bool
        Divide the sum by that of beta |s| instead of that of beta.
    """

    def __init__(
        self, *, weighting: str = "uniform", scale: str = "none", buffers: str = "average", normalize: bool = False
    ) -> None:
        check_arguments("strategy", owner="LDAWA", weighting=weighting, buffers=buffers)
        if scale not in SCALES:
            raise InputError(f"scale={scale} must be {' or '.join(SCALES)}")
        self.weighting, self.scale, self.buffers = weighting, scale, buffers
        self.normalize = normalize

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that every client must report."""
        return REQUIRED_METRICS[self.weighting]

    def start(self, global_layers: ReferenceLayers) -> None:
        """Start a round."""
        self._global = global_layers
        self._sums = {name: np.empty(array.shape, _sum_dtype(array)) for name, array in global_layers.layers.items()}
        self._total = 0.0
        self._scaled_totals = dict.fromkeys(global_layers.layers, 0.0)
        self._empty = True
        self._min_loss = math.inf

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        """Add an update that `ReferenceLayers.check` validated."""
        self._fold([self._term(update, cosines)])

    def add_weighted(self, update: ClientUpdate, weight: float) -> None:
        """Add an update with an explicit weight and without scaling. The options do not apply."""
        self._total += weight
        self._fold([_Term(update.layers, NO_COSINES, 1.0, weight)])

    def add_all(self, updates: Sequence[ClientUpdate]) -> None:
        """Validate, compare and add several updates, each read in tiles that stay in the cache."""
        check_updates(self._global, updates)
        if self.scale == "none":
            all_cosines = [NO_COSINES] * len(updates)
        else:
            all_cosines = self._global.cosines_of_all([update.layers for update in updates])
        for update, cosines in zip(updates, all_cosines, strict=True):
            if not cosines.finite:
                raise InputError(
                    f"client {update.partition_id}: layer {cosines.first_invalid} has NaN or infinite values"
                )
        self._fold([self._term(update, cosines) for update, cosines in zip(updates, all_cosines, strict=True)])

    def finish(self) -> Layers:
        """Return the new global layers. Raises `InputError` without any update."""
        if self._empty:
            raise InputError("no client sent an update; at least one is needed")
        result = dict(self._sums)

        def divide(name: str) -> None:
            total, dtype = self._sums[name], self._global.layers[name].dtype
            divisor = self._scaled_totals[name] or self._total if self.normalize else self._total
            np.divide(total, total.dtype.type(divisor), out=total)
            if dtype.kind != "f":
                np.rint(total, out=total)
            result[name] = total.astype(dtype, copy=False)

        self._global.parallel_for(divide)
        self._sums = {}
        return result

    def _term(self, update: ClientUpdate, cosines: Cosines) -> _Term:
        rescale, weight = 1.0, 1.0
        if self.weighting == "examples":
            weight = _metric(update, NUM_EXAMPLES, update.num_examples)
            if weight <= 0:
                raise InputError(f"client {update.partition_id}: {NUM_EXAMPLES}={weight:g} is not positive")
        elif self.weighting == "loss":
            loss = _metric(update, TRAIN_LOSS, update.train_loss)
            # Weights are relative to the smallest loss so far: exp(-1000) would be 0 for every client.
            if loss < self._min_loss:
                rescale = math.exp(loss - self._min_loss)
                self._min_loss = loss
            weight = math.exp(self._min_loss - loss)  # Eq. 6
        self._total = rescale * self._total + weight
        return _Term(update.layers, cosines, rescale, weight)

    def _fold(self, terms: Sequence[_Term]) -> None:
        if terms:
            self._global.parallel_for(lambda name: self._fold_layer(name, terms))
            self._empty = False

    def _fold_layer(self, name: str, terms: Sequence[_Term]) -> None:
        total = self._sums[name].reshape(-1)
        clients = [term.layers[name].reshape(-1) for term in terms]
        coefficients = self._coefficients(name, terms)
        for term, coefficient in zip(terms, coefficients, strict=True):
            self._scaled_totals[name] = term.rescale * self._scaled_totals[name] + abs(coefficient)
        for start in range(0, len(total), TILE):
            tile = slice(start, start + TILE)
            sums = torch.from_numpy(total[tile])
            empty = self._empty
            for term, coefficient, values in zip(terms, coefficients, clients, strict=True):
                addend = torch.from_numpy(values[tile])
                if empty:
                    torch.mul(addend.to(sums.dtype), coefficient, out=sums)
                    empty = False
                    continue
                if term.rescale != 1:
                    sums.mul_(term.rescale)
                # One operation that multiplies and adds; NumPy needs two and a buffer.
                sums.add_(addend, alpha=coefficient)

    def _coefficients(self, name: str, terms: Sequence[_Term]) -> list[float]:
        """Return beta_k s_k of every client for a layer."""
        array = self._global.layers[name]
        weight = is_weight(name, array)
        if self.scale == "none" or array.dtype.kind != "f" or not (weight or self.buffers == "scale"):
            return [term.weight for term in terms]
        if self.scale == "model":
            return [term.weight * term.cosines.model for term in terms]  # Eq. 3
        if weight:
            return [term.weight * term.cosines.weights[name] for term in terms]  # Eqs. 4-6
        return [term.weight * term.cosines.statistics[name] for term in terms]


def is_uniform_sum(aggregator: object) -> bool:
    """Return whether an aggregator adds clients with equal weights."""
    return isinstance(aggregator, WeightedSum) and (aggregator.weighting, aggregator.scale) == ("uniform", "none")


def check_updates(global_layers: ReferenceLayers, updates: Sequence[ClientUpdate]) -> None:
    """Call `ReferenceLayers.check` for every update. The `InputError` names the client."""
    for update in updates:
        try:
            global_layers.check(update.layers)
        except InputError as problem:
            raise InputError(f"client {update.partition_id}: {problem}") from problem


def weighted_sum(global_layers: Layers, updates: Sequence[ClientUpdate], *, aggregator: WeightedSum) -> Layers:
    """Aggregate a list of updates in order of partition id."""
    aggregator.start(ReferenceLayers(global_layers))
    aggregator.add_all(sorted(updates, key=lambda update: update.partition_id))
    return aggregator.finish()


def _sum_dtype(array: np.ndarray) -> np.dtype:
    # float16 is summed in float32. Counters need all digits of an integer.
    return np.result_type(array.dtype, np.float32) if array.dtype.kind == "f" else np.dtype(np.float64)


def _metric(update: ClientUpdate, name: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise InputError(f"client {update.partition_id}: {name} is {value}, but the weighting needs a number")
    return float(value)
