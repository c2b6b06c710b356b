"""FedNova (Wang et al., NeurIPS 2020, arXiv 2007.07481): clients count by direction, not by steps.

Transcribed from the paper's equations, unverified against its code. A client with more images takes more steps in an
epoch, so that federated averaging favors its objective. Here its change is divided by ||a_i||_1, the effective number
of its steps (Section 4.1; `fedssl.training.LocalSteps.norm`, also with momentum), and the mean direction is multiplied
by the mean of these numbers (Eq. 7). If all clients take equal steps, this is federated averaging, bit for bit. Running
statistics and counters are averaged. Proximal terms, which change a_i in the paper, do not here.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from fedssl.arrays import Cosines, GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.rules import Problem
from fedssl.training import LocalSteps, number_of_batches
from fedssl.wire.messages import NUM_EXAMPLES, ClientUpdate
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.control_variates import local_optimizer, needs_sgd
from strategies.run_context import RunContext
from strategies.weighted_sum import WeightedSum


def gamma(weights: Sequence[float], norms: Sequence[float]) -> float:
    """Return the factor of the mean change with shares p_i / ||a_i||, at least 1: tau_eff sum_i p_i / ||a_i||_1.

    ``weights`` are the p_i, of any sum, and ``norms`` the ||a_i||_1. It is 1 for equal norms.
    """
    if len(set(norms)) == 1:
        return 1.0
    p = np.array(weights) / np.sum(weights)
    return float((p @ np.array(norms)) * (p / np.array(norms)).sum())


class NormalizedSum:
    """Normalized average of the clients' weights, and average of their statistics.

    ``weighting`` as in `FedNova`. ``norm`` is ||a_i||_1 of a client, by its number of images.
    """

    required_metrics = (NUM_EXAMPLES,)

    def __init__(self, *, weighting: str, norm: Callable[[int], float]) -> None:
        self._weighting, self._norm = weighting, norm
        self._weights, self._statistics = WeightedSum(), WeightedSum()

    def start(self, global_layers: GlobalLayers) -> None:
        self._start, weights = global_layers, global_layers.weights()
        self._weights.start(weights)
        self._statistics.start(global_layers.subset(global_layers.layers.keys() - weights.layers.keys()))
        self._shares: list[float] = []
        self._norms: list[float] = []

    def add(self, update: ClientUpdate, cosines: Cosines) -> None:
        images = update.num_examples or 0
        norm, share = self._norm(images), float(images) if self._weighting == "examples" else 1.0
        self._shares.append(share)
        self._norms.append(norm)
        self._weights.add_weighted(update, share * (self._norms[0] / norm))  # of equal steps exactly the share
        self._statistics.add_weighted(update, share)

    def finish(self) -> Layers:
        factor = gamma(self._shares, self._norms)
        mean, old = self._weights.finish(), self._start.layers
        new = self._statistics.finish() | mean
        for name, array in mean.items():
            if factor != 1:
                new[name] = np.asarray(old[name] + array.dtype.type(factor) * (array - old[name]))  # Eq. 7
        return {name: new[name] for name in old}


class FedNovaServer(ServerStrategy):
    """Server side of FedNova. It computes the number of a client's steps from that of its images."""

    def __init__(self, *, weighting: str) -> None:
        check_arguments("strategy", weighting=weighting)
        self._weighting = weighting
        self._norm: Callable[[int], float] = float
        super().__init__(lambda: NormalizedSum(weighting=self._weighting, norm=self._norm))

    def problem(self, context: RunContext) -> Problem:
        if not context.settings.training.epochs:
            return "strategy=fednova divides by the number of local steps; set local_epochs=1 or more"
        settings = context.settings
        is_new = context.is_deployment and settings.recording.resumed is None
        if is_new and self._weighting == "uniform" and settings.aggregation.max_examples is None:
            return (
                "strategy.weighting=uniform of fednova lets a client with a false number of images scale the update of "
                "all; set aggregation.max_examples, or strategy.weighting=examples"
            )
        return needs_sgd(context, strategy="fednova")

    def prepare(self, context: RunContext) -> None:
        training, optimizer = context.settings.training, local_optimizer(context)
        smallest = context.method.min_batch_size

        @functools.cache
        def norm(number: int) -> float:
            return LocalSteps.of(optimizer, number=number).norm

        self._norm = lambda images: norm(
            training.epochs * number_of_batches(images, training.batch_size, min_batch_size=smallest)
        )


class FedNova(FedSSLStrategy):
    r"""Normalized averaging.

    $$
    w = w_g - \tau \sum_i p_i \frac{w_g - w_i}{\lVert a_i \rVert_1} \qquad \tau = \sum_i p_i \lVert a_i \rVert_1
    \qquad p_i = \frac{n_i}{\sum_j n_j} \;\text{or}\; \frac{1}{K}
    $$

    with $w_g$ the global weights, $w_i$ those of client i after its training, $n_i$ its images (``weighting``), and
    $\lVert a_i \rVert_1$ the number of its steps, without momentum.
    """

    def __init__(self, *, weighting: str = "examples") -> None:
        super().__init__(FedNovaServer(weighting=weighting))
