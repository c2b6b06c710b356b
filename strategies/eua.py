"""EUA, the server side of FedU2: weights that leave no client behind (Liao et al., CVPR 2024, Sec. 3.4).

With the deviations delta_k = theta - theta_k the new global model is theta minus a step along d = sum_k p_k g_k,
g_k = grad log ||delta_k||^2 = 2 delta_k / ||delta_k||^2 (Eq. 7), where p makes d the shortest vector in the convex hull
of the g_k (Eq. 10). Of all directions this one has the largest smallest change rate <g_k, d/||d||> over clients
(Eq. 8). Clients with p_k > 0 share it. All but the last step happens on the K x K Gram matrix of the deviations.

Deviations from the paper, with the option that reproduces it:

- Eq. 12 gives the minimizer of a ridge. Here the weights are those of Eq. 10 (`strategies.gram_matrix`);
- the paper gives no step size. Here the step length is that of the mean deviation times ``server_lr``, so that a single
  client becomes the global model (``server_lr=1``). ``step="constant"`` is theta - server_lr d.

With LoRA the deviations are those of the products of factors, and both factors take the step.

Deviations from the authors' code: it uses g_k = 2 delta_k / ||delta_k|| (``deviation="unit"``), which gives large
deviations more weight, and stops its solver before the optimum. Statistics and counters are plain means here, and
weighted by batches there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedssl.arrays import BLAS_ROW, Cosines, GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.wire.messages import ClientUpdate
from strategies.aggregate import aggregate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.gram_matrix import deviation_gram, gram_memory, min_norm_weights
from strategies.robust import BatchAggregator
from strategies.types import AggregatedModel, Combination
from strategies.update_store import UpdateStore
from strategies.weighted_sum import WeightedSum

_MOVE_TILE = 64 * BLAS_ROW  # elements per step; few enough for the cache, enough to hide the overhead of a call
_MIN_TILE = 8 * BLAS_ROW
_MOVE_NUMBERS = 2**23  # of all clients together in a step, which are a buffer if they are read from a file

# A sum of vectors is zero up to rounding if its square is below this fraction of the square of the sum of lengths.
_CANCELLED = 1e-6

_ACCURACY = 1e-6  # bound on the error of the Gram matrix of models, relative to the lengths of both deviations


@dataclass(frozen=True)
class Solution:
    """EUA's solution for the deviations of one round."""

    weights: np.ndarray  # (K,), p; 0 for a client equal to the global model, all 0 if every client is
    factors: np.ndarray  # (K,), c: the new weights are theta + sum_k c_k (theta_k - theta)
    # Smallest change rate over clients (Eq. 7 with eta = 1) along the mean deviation, and along d. Negative if a client
    # is left behind, 0 if the direction vanishes, None if every client equals the global model.
    before: float | None
    after: float | None


def solve(gram: np.ndarray, *, deviation: str = "log", step: str = "normalized", server_lr: float = 1.0) -> Solution:
    """Apply EUA to the (K, K) Gram matrix of the deviations theta - theta_k. Options as in `eua`."""
    weights, factors = np.zeros((2, len(gram)))
    moved = np.flatnonzero(np.diag(gram) > 0)
    if not moved.size:
        return Solution(weights, factors, None, None)
    gram = gram[np.ix_(moved, moved)]
    lengths = np.sqrt(np.diag(gram))
    scales = 2 / lengths**2 if deviation == "log" else 2 / lengths  # g_k = scale_k delta_k, Eq. 7
    p = min_norm_weights(scales[:, None] * gram * scales, accuracy=_ACCURACY)  # Eq. 10
    mean, direction = np.full(len(moved), 1 / len(moved)), p * scales
    mean_length, length = _length(mean, gram, lengths), _length(direction, gram, lengths)

    def worst(coefficients: np.ndarray, length: float) -> float:
        # <g_k, e> along e = sum_j a_j delta_j / length is 2 (A a)_k / (||delta_k||^2 length), A the Gram matrix.
        return float((2 * (gram @ coefficients) / lengths**2).min() / length) if length else 0.0

    weights[moved] = p
    if length:
        factors[moved] = server_lr * direction * (mean_length / length if step == "normalized" else 1)
    return Solution(weights, factors, worst(mean, mean_length), worst(direction, length))


def _length(coefficients: np.ndarray, gram: np.ndarray, lengths: np.ndarray) -> float:
    """Return the length of a sum of vectors with nonnegative coefficients, 0 if they cancel."""
    square = coefficients @ gram @ coefficients
    return float(np.sqrt(square)) if square > _CANCELLED * (coefficients @ lengths) ** 2 else 0.0


class EUAAggregator(BatchAggregator):
    """EUA for one round at a time, with the options of `eua`. ``solution`` is that of the last `finish`."""

    solution: Solution

    def __init__(self, *, deviation: str = "log", step: str = "normalized", server_lr: float = 1.0) -> None:
        check_arguments("strategy", deviation=deviation, step=step, server_lr=server_lr)
        super().__init__(self._step_of_all)
        self._solve = partial(solve, deviation=deviation, step=step, server_lr=server_lr)
        self._buffers = WeightedSum()

    def start(self, global_layers: GlobalLayers) -> None:
        super().start(global_layers)
        weights = global_layers.weights().layers
        buffers = {name: array for name, array in global_layers.layers.items() if name not in weights}
        self._buffers.start(GlobalLayers(buffers))

    def working_memory(self, layers: Layers, number: int) -> int:
        moved = torch.get_num_threads() * number * (_move_step(number) + _MIN_TILE) * 4
        return max(gram_memory(layers, number, exact=False), moved)

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        super().add(update, cosines)
        self._buffers.add(update, cosines)

    def combination(self, name: str) -> Combination:
        """Return 1 - sum_k c_k and the factors c_k of `Solution`, which all weights have."""
        factors = self.solution.factors.tolist()
        return Combination(1 - sum(factors), dict(zip(self.clients, factors, strict=True)))

    def _step_of_all(self, global_layers: GlobalLayers, models: UpdateStore) -> Layers:
        weights = global_layers.weights()
        self.solution = self._solve(deviation_gram(weights, models))
        result = self._buffers.finish() | _moved(weights, models, self.solution.factors)
        return {name: result[name] for name in global_layers.layers}


def _move_step(number: int) -> int:
    """Return the numbers of each of these clients in a step."""
    # Tiles are multiples of one size, so that vectorized loops end in the same places: the bits do not depend on it.
    return min(max(_MOVE_NUMBERS // max(number, 1) // _MIN_TILE * _MIN_TILE, _MIN_TILE), _MOVE_TILE)


def _moved(weights: GlobalLayers, models: UpdateStore, factors: np.ndarray) -> Layers:
    used = [int(index) for index in np.flatnonzero(factors)]
    step = _move_step(len(used))
    result: Layers = {}

    def move(name: str) -> None:
        old = weights.layers[name]
        new = old.astype(np.result_type(old.dtype, np.float32), order="C")
        g, target = old.reshape(-1), new.reshape(-1)
        buffer = np.empty((2, min(step, g.size)), new.dtype)
        for tile, clients in models.tiles(name, step, used):
            deviation, total = buffer[:, : len(g[tile])]
            total[:] = 0
            addend, sums = torch.from_numpy(deviation), torch.from_numpy(total)
            for index, w in zip(used, clients, strict=True):
                np.subtract(w, g[tile], out=deviation, dtype=deviation.dtype)
                sums.add_(addend, alpha=float(factors[index]))
            target[tile] += total
        result[name] = new.astype(old.dtype, copy=False)

    weights.parallel_for(move)
    return result


def eua(
    global_layers: Layers | GlobalLayers,
    updates: Sequence[ClientUpdate],
    *,
    deviation: str = "log",
    step: str = "normalized",
    server_lr: float = 1.0,
) -> Layers:
    """Step along the direction whose smallest change rate over clients is largest.

    A client whose weights equal the global ones has no direction and contributes only to the means of statistics and
    counters. If the deviations of the clients cancel (d = 0), the weights stay unchanged.

    Parameters
    ----------
    global_layers, updates
        As in `strategies.fedavg.fedavg`.
    deviation : {"log", "unit"}
        g_k = 2 delta_k / ||delta_k||^2 (Eq. 7), or 2 delta_k / ||delta_k|| as in the authors' code.
    step : {"normalized", "constant"}
        theta - server_lr ||mean_k delta_k|| d / ||d||, or theta - server_lr d.
    server_lr : float
        Positive.
    """
    aggregator = EUAAggregator(deviation=deviation, step=step, server_lr=server_lr)
    return aggregate(global_layers, updates, aggregator)


class EUAServer(ServerStrategy):
    """Server that logs EUA's solution. See `EUA`."""

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        assert isinstance(done.aggregator, EUAAggregator)
        clients, solution = done.aggregator.clients, done.aggregator.solution
        weights = {str(client): float(p) for client, p in zip(clients, solution.weights, strict=True)}
        metrics = {"weights": weights, "conflict_before": solution.before, "conflict_after": solution.after}
        return done.model.strategy_state, metrics


class EUA(FedSSLStrategy):
    r"""Efficient unified aggregator. See `eua` for its options. Clients report no metrics.

    Each round logs p by client ("weights") and the smallest change rate over clients along the mean deviation
    ("conflict_before") and along d ("conflict_after"). See `Solution`.

    $$
    g_k = \frac{2 \, \delta_k}{\lVert \delta_k \rVert^2} \qquad
    p = \underset{p \ge 0, \, \sum_k p_k = 1}{\operatorname{argmin}} \left\lVert \sum_k p_k g_k \right\rVert^2 \qquad
    d = \sum_k p_k g_k \qquad
    \theta' = \theta - \eta \left\lVert \frac{1}{K} \sum_k \delta_k \right\rVert \frac{d}{\lVert d \rVert}
    $$

    $$
    c(e) = \min_k \; \frac{2 \langle \delta_k, e \rangle}{\lVert \delta_k \rVert^2 \, \lVert e \rVert}
    $$

    with $\theta$ the global weights as one vector, $\theta_k$ the same after the training of client k, $\delta_k =
    \theta - \theta_k$, $\eta$ the ``server_lr``, and c the smallest change rate along a direction e.
    """

    def __init__(self, *, deviation: str = "log", step: str = "normalized", server_lr: float = 1.0) -> None:
        super().__init__(EUAServer(partial(EUAAggregator, deviation=deviation, step=step, server_lr=server_lr)))
