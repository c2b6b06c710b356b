"""L-DAWA: each layer of a client scaled by its cosine with the global layer (Rehman et al., ICCV 2023, Eqs. 2, 4-6).

A layer is one named array, as in the authors' code. Deviations from that code, with the option that reproduces it:

- running statistics are averaged: ``w = 1/K sum_k w_k``. The authors scale them by their own cosine like weights
  (``buffers="scale"``). That shrinks the running variance each round, and so inflates the activations in evaluation
  mode until training has updated the statistics;
- the rule applies from the first round, as in the paper's Algorithm 1. The authors' first 3 rounds are FedAvg weighted
  by examples (``warmup_rounds=3``);
- the cosine with a layer of zeros (fresh biases) is 1. The authors' code divides by zero.

The cosine of a client depends only on its own and the global model, so the client can scale its layers before upload
(``scale_at="client"``). The server then computes a plain (weighted) mean, which is all that secure aggregation allows.

A product of factors (`fedssl.arrays.GlobalLayers`) is a layer: its cosine is that of the products, and multiplies the
factor B. Factors A are averaged.

Cosines are clipped above at 1 and not below: a client that points away from the global layer has its sign flipped.
Eqs. 5 and 6 weight by examples and by loss. There is no published code for either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedssl.arrays import GlobalLayers, Layers
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import global_layers as global_layers_of
from fedssl.wire.messages import ClientUpdate, TrainPlan
from strategies.aggregate import aggregate, as_reference
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.run_context import RunContext
from strategies.types import GLOBAL, AggregatedModel, Aggregator, CommunicationSummary
from strategies.weighted_sum import WeightedSum

SHRUNK = 0.7  # norm of a kernel or matrix after a round, relative to before: then it hardly recovers


def l_dawa(
    global_layers: Layers | GlobalLayers,
    updates: Sequence[ClientUpdate],
    *,
    weighting: str = "uniform",
    buffers: str = "average",
    normalize: bool = False,
) -> Layers:
    """Return the weighted mean of delta_k^(l) w_k^(l) for every layer l, delta_k^(l) its cosine with the global layer.

    Parameters
    ----------
    global_layers, updates
        As in `strategies.fedavg.fedavg`.
    weighting : {"uniform", "examples", "loss"}
        beta_k = 1 / K for the K received updates (Eq. 4), n_k / sum n (Eq. 5), or the softmax of minus the training
        loss (Eq. 6).
    buffers : {"average", "scale"}
        Running statistics: mean with the same beta_k, or scaled by their own cosine as in the authors' code.
    normalize : bool
        False divides by sum_k beta_k, as in the paper, so that a layer shrinks by the mean cosine in every round. True
        divides by sum_k beta_k |delta_k^(l)|, so that the cosines only weight the clients against each other. A layer
        whose cosines are all exactly 0 becomes 0 in both cases.
    """
    aggregator = WeightedSum(weighting=weighting, scale="layer", buffers=buffers, normalize=normalize)
    return aggregate(global_layers, updates, aggregator)  # Eqs. 4-6


def scale_layers(global_layers: Layers | GlobalLayers, layers: Layers, *, buffers: str = "average") -> Layers:
    """Return one client's layers, each multiplied by its cosine with the global layer (Eq. 2), as new arrays.

    Their plain mean is `l_dawa`. ``buffers`` as there. Of the factors of a product, B is multiplied.
    """
    reference = as_reference(global_layers).subset(layers)
    cosines = reference.cosines_of(layers)
    cosine_of = cosines.weights | (cosines.statistics if buffers == "scale" else {})
    scaled = dict(layers)
    for name, array in layers.items():
        compared = reference.compared_name(name)
        if compared in cosine_of and name not in reference.first_factors:
            scaled[name] = np.asarray(array * array.dtype.type(cosine_of[compared]))
    return scaled


class LDAWAServer(ServerStrategy):
    """Server whose first ``rounds`` rounds are federated averaging weighted by examples.

    Warn once if the cosines shrink a layer much: the same step then turns it more, so that its cosines fall further.
    ``can_normalize``: whether ``normalize`` would prevent this.
    """

    _has_warned = False

    def __init__(self, make_aggregator: Callable[[], Aggregator], *, rounds: int, can_normalize: bool) -> None:
        super().__init__(make_aggregator)
        check_arguments("strategy", warmup_rounds=rounds)
        self.rounds, self._can_normalize = rounds, can_normalize

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        if self.rounds >= context.settings.rounds:
            log.warning(
                "strategy.warmup_rounds=%d are all rounds=%d, which are federated averaging: set fewer, or more rounds",
                *(self.rounds, context.settings.rounds),
            )

    def aggregator(self, round: int, name: str = GLOBAL) -> Aggregator:
        return WeightedSum(weighting="examples") if round <= self.rounds else super().aggregator(round)

    def after_aggregation(self, done: AggregatedModel) -> tuple[Any, dict[str, Any]]:
        before = done.model.layers
        kernels = [name for name, layer in done.layers.items() if layer.ndim > 1 and before[name].any()]
        if kernels and done.round > self.rounds and not self._has_warned:
            ratios = {name: np.linalg.norm(done.layers[name]) / np.linalg.norm(before[name]) for name in kernels}
            name = min(kernels, key=ratios.__getitem__)
            if ratios[name] < SHRUNK:
                self._has_warned = True
                remedy = "strategy.normalize=true (in Python normalize=True), or " if self._can_normalize else ""
                log.warning(
                    "L-DAWA has multiplied the norm of %s by %.2f in round %d; layers with small cosines shrink more "
                    "and more: set %sa smaller learning rate of the clients",
                    *(name, ratios[name], done.round, remedy),
                )
        return super().after_aggregation(done)

    def describe_communication(self, usual: CommunicationSummary) -> CommunicationSummary:
        ever = [*self.aggregator(1).required_metrics, *self.aggregator(self.rounds + 1).required_metrics]
        return replace(super().describe_communication(usual), required_metrics=tuple(dict.fromkeys(ever)))


@dataclass(frozen=True)
class ScaleUpload:
    """Multiply the layers that a client uploads by their cosines after the warm-up. ``buffers`` as in `l_dawa`."""

    buffers: str
    warmup_rounds: int

    def __call__(self, method: SSLMethod, plan: TrainPlan, layers: Layers) -> Layers:
        if plan.round <= self.warmup_rounds:
            return layers
        return scale_layers(global_layers_of(method, plan.layers), layers, buffers=self.buffers)


class LDAWA(FedSSLStrategy):
    r"""Layer-wise divergence aware weight aggregation. See `l_dawa`.

    $$
    \delta_k^{(l)} = \frac{\langle w_k^{(l)}, w_g^{(l)} \rangle}{\lVert w_k^{(l)} \rVert \, \lVert w_g^{(l)} \rVert}
    \qquad w^{(l)} = \frac{\sum_k \beta_k \, \delta_k^{(l)} \, w_k^{(l)}}{\sum_k \beta_k} \qquad
    \beta_k = 1, \; n_k \;\text{or}\; \exp(-\mathcal{L}_k)
    $$

    with $w_g^{(l)}$ layer l of the global model, $w_k^{(l)}$ the same after the training of client k, $n_k$ its images,
    and $\mathcal{L}_k$ its mean loss of the last local epoch (``weighting``). With ``normalize`` the divisor is $\sum_k
    \beta_k |\delta_k^{(l)}|$. If one of the two layers is all zero, the cosine is 1.

    ``client`` replaces the client side of federated averaging.
    """

    def __init__(
        self,
        *,
        weighting: str = "uniform",
        buffers: str = "average",
        warmup_rounds: int = 0,
        normalize: bool = False,
        scale_at: str = "server",
        client: ClientStrategy | None = None,
    ) -> None:
        check_arguments("strategy", owner="LDAWA", scale_at=scale_at)
        if normalize and scale_at == "client":
            raise InputError(
                "strategy.normalize=true needs the cosines on the server, which strategy.scale_at=client keeps from it;"
                " set one of them back"
            )
        scale = "layer" if scale_at == "server" else "none"
        aggregator = partial(WeightedSum, weighting=weighting, scale=scale, buffers=buffers, normalize=normalize)
        client = client or ClientStrategy()
        if scale_at == "client":
            client.change_upload = ScaleUpload(buffers, warmup_rounds)
        can_normalize = scale_at == "server" and not normalize
        super().__init__(LDAWAServer(aggregator, rounds=warmup_rounds, can_normalize=can_normalize), client)
