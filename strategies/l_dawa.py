"""L-DAWA: each layer of a client scaled by its cosine with the global layer (Rehman et al., ICCV 2023, Eqs. 2, 4-6).

A layer is one named array, as in the authors' code. Where this differs from that code, with the option that reproduces
it:

- running statistics are averaged: ``w = 1/K sum_k w_k``; the authors scale them by their own cosine like weights
  (``buffers="scale"``), which shrinks the running variance each round and so inflates what the network computes in
  evaluation mode until training has refreshed the statistics;
- the rule holds from the first round, as in the paper's Algorithm 1; the authors' first 3 rounds are FedAvg weighted by
  examples (``warmup_rounds=3``);
- the cosine with a layer of zeros (fresh biases) is 1; the authors' code divides by zero there.

The cosine of a client needs nothing but its own and the global model, so the client itself can scale its layers before
it sends them (``scale_at="client"``): the server then computes a plain (weighted) mean, which is all that a protocol
for secure sums allows it to see.

Cosines are clipped above at 1 and not below: a client that points away from the global layer has its sign flipped.
Eqs. 5 and 6 weight by examples and by loss; for both there is no published code.
"""

from collections.abc import Sequence

import numpy as np

from fedssl.errors import InputError
from fedssl.layers import GlobalLayers, Layers
from fedssl.messages import ClientUpdate, TrainPlan
from fedssl.methods.base import SSLMethod
from strategies.base import FedSSLStrategy
from strategies.weighted_sum import BUFFERS, WeightedSum, one_of, weighted_sum


def l_dawa(
    global_layers: Layers,
    updates: Sequence[ClientUpdate],
    *,
    weighting: str = "uniform",
    buffers: str = "average",
) -> Layers:
    """Weighted mean of delta_k^(l) w_k^(l) for every layer l, delta_k^(l) its cosine with the global layer.

    Parameters
    ----------
    global_layers : Layers
        The layers the clients started from, with which they are compared.
    updates : sequence of ClientUpdate
        One per client, in any order.
    weighting : {"uniform", "examples", "loss"}
        beta_k = 1 / K for the K updates received (Eq. 4), n_k / sum n (Eq. 5), or the softmax of minus the training
        loss (Eq. 6).
    buffers : {"average", "scale"}
        Running statistics: mean with the same beta_k, or scaled by their own cosine as in the authors' code.

    Returns
    -------
    Layers
        The new global layers.

    Raises
    ------
    InputError
        No updates, an unknown option, a layer that does not fit or has values that are not finite, or a metric missing
        that the weighting needs.
    """
    rule = WeightedSum(weighting=weighting, scale="layer", buffers=buffers)
    return weighted_sum(global_layers, updates, rule=rule)  # Eqs. 4-6


def scale_layers(global_layers: Layers, layers: Layers, *, buffers: str = "average") -> Layers:
    """One client's layers, each times its cosine with the global one (Eq. 2), as new arrays.

    The plain mean of such layers is `l_dawa`; ``buffers`` as there.
    """
    alignment = GlobalLayers({name: global_layers[name] for name in layers}).align(layers)
    factors = alignment.cosines | (alignment.buffer_cosines if buffers == "scale" else {})
    return {
        name: np.asarray(array * array.dtype.type(factors[name])) if name in factors else array
        for name, array in layers.items()
    }


class LDAWA(FedSSLStrategy):
    """Layer-wise divergence aware weight aggregation; see `l_dawa`.

    Parameters
    ----------
    weighting, buffers : str
        As in `l_dawa`. With ``weighting="uniform"`` clients report nothing but their layers.
    warmup_rounds : int
        First rounds that are FedAvg weighted by examples; 0: none (the paper), 3: the authors' code.
    scale_at : {"server", "client"}
        Who multiplies the layers by their cosines. The global model is the same up to rounding; with "client" the
        cosines in the log are those of the scaled layers, i.e. absolute values.
    metrics : sequence of str
        What clients report for the log in addition.
    """

    def __init__(
        self,
        *,
        weighting: str = "uniform",
        buffers: str = "average",
        warmup_rounds: int = 0,
        scale_at: str = "server",
        metrics: Sequence[str] = (),
    ) -> None:
        super().__init__(metrics=metrics)
        if warmup_rounds < 0:
            raise InputError(f"strategy.warmup_rounds={warmup_rounds} is negative; 0 turns the warm-up off")
        self.warmup_rounds = warmup_rounds
        self._warmup = WeightedSum(weighting="examples")
        self.scale_at = one_of("strategy.scale_at", scale_at, ("server", "client"))
        self.buffers = one_of("strategy.buffers", buffers, BUFFERS)
        scale = "layer" if scale_at == "server" else "none"
        self._rule = WeightedSum(weighting=weighting, scale=scale, buffers=buffers)

    def needs(self) -> tuple[str, ...]:
        warmup = self._warmup.needs if self.warmup_rounds else ()
        return tuple(dict.fromkeys((*warmup, *self._rule.needs)))

    def rule(self, round: int) -> WeightedSum:
        return self._warmup if round <= self.warmup_rounds else self._rule

    def send(self, method: SSLMethod, plan: TrainPlan) -> Layers:
        layers = super().send(method, plan)
        if self.scale_at == "server" or plan.round <= self.warmup_rounds:
            return layers
        return scale_layers(plan.layers, layers, buffers=self.buffers)
