"""FedExP (Jhunjhunwala et al., ICLR 2023, arXiv 2301.09604, Algorithm 1): a server step that grows with disagreement.

Transcribed from the paper's equations, unverified against its code. The more the changes of the clients cancel, the
larger the step along their mean, and it is never below 1, federated averaging. The paper evaluates the mean of the last
two models: ``model_average=last model_average.rounds=2``. Weights are extrapolated; statistics are averaged.
"""

from typing import Any

import numpy as np

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.wire.messages import ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.types import AggregatedModel
from strategies.weighted_sum import WeightedSum


class ExtrapolatedSum:
    """Mean of the clients' models, extrapolated by ``server_lr``, which `finish` sets. Arguments as in `FedExP`."""

    def __init__(self, mean: WeightedSum, *, epsilon: float) -> None:
        self._mean, self._epsilon = mean, epsilon
        self.server_lr = 1.0

    @property
    def required_metrics(self) -> tuple[str, ...]:
        return self._mean.required_metrics

    def start(self, global_layers: GlobalLayers) -> None:
        self._mean.start(global_layers)
        self._weights = GlobalLayers(global_layers.weights().layers)
        self._square, self._total = 0.0, 0.0

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        self._mean.add(update, cosines)
        weight = float(update.num_examples or 0) if self._mean.weighting == "examples" else 1.0
        self._square += weight * self._norm(update.layers)
        self._total += weight

    def finish(self) -> Layers:
        mean, old = self._mean.finish(), self._weights.layers
        spread = self._square / self._total
        size = 2 * (self._norm(mean) + self._epsilon)
        self.server_lr = max(1.0, spread / size) if size else 1.0  # Eq. 8; without a mean change it has no effect
        if self.server_lr > 1:
            for name, start in old.items():
                mean[name] = np.asarray(start + start.dtype.type(self.server_lr) * (mean[name] - start))  # Eq. 2
        return mean

    def _norm(self, layers: Layers) -> float:
        """Return ||w - w_g||^2 of the weights."""
        return sum(self._weights.squared_distances(layers).values())


class FedExPServer(ServerStrategy):
    """Server side of FedExP."""

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        assert isinstance(done.aggregator, ExtrapolatedSum)
        return done.model.strategy_state, {"server_lr": done.aggregator.server_lr}


class FedExP(FedSSLStrategy):
    r"""Federated averaging with an extrapolated mean.

    $$
    w = w_g + \eta \sum_k \beta_k (w_k - w_g) \qquad
    \eta = \max \left( 1, \frac{\sum_k \beta_k \lVert w_k - w_g \rVert^2}
    {2 (\lVert \sum_k \beta_k (w_k - w_g) \rVert^2 + \epsilon)} \right)
    $$

    with $w_g$ the global weights, $w_k$ those of client k after its training, $\beta_k$ as in federated averaging
    (``weighting``), and $\epsilon$ the ``epsilon``.
    """

    def __init__(self, *, weighting: str = "uniform", epsilon: float = 1e-3) -> None:
        check_arguments("strategy", owner="FedExP", epsilon=epsilon)
        make_mean = make_weighted_mean(weighting)
        super().__init__(FedExPServer(lambda: ExtrapolatedSum(make_mean(), epsilon=epsilon)))
