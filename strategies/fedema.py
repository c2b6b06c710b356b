"""FedEMA (Zhuang et al., ICLR 2022): a client with a large divergence keeps more of its own weights.

The server averages models by examples. A client measures the divergence d of its encoder during training. In its next
participation it starts from mu w_k + (1 - mu) w, a mixture of its own weights w_k and the global ones w of online
encoder, projector and predictor, where mu = min(lambda d, 1). The client sets lambda = tau / d with its first d, so
that mu is tau in its second participation, and never changes it. Its target networks stay local (if they are exchanged,
``method.target_init=average``, they are mixed like the others). In its first participation it uses the global model.

As in the authors' code:

- d is the mean distance of the convolution kernels after training from those before it (without convolutions: of all
  trained encoder weights, see `strategies.encoder_divergence`). The paper compares the client's trained weights with
  the global ones that it downloads next;
- running statistics of encoder and projector come from the global model, those of the predictor from the side with the
  larger share. Counters come from the same side and are never mixed.

lambda stays unset while d = 0 (no local epochs), which means mu = 0. The authors' code divides by zero. Frozen stages
are neither saved nor mixed, because the server may have calibrated them. Parts that a method does not have, such as
SimCLR's predictor and target, are ignored.
"""

import math
from dataclasses import replace

import torch

from fedssl.arrays import Layers, is_weight
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, load_and_start_round, local_names
from fedssl.rules import Problem
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy, layers_in_state, upload_names_of
from strategies.encoder_divergence import distance_problem, encoder_divergence
from strategies.fedavg import make_weighted_mean
from strategies.run_context import RunContext
from strategies.types import ClientState, CommunicationSummary

LAMBDA, DISTANCE = "fedema.lambda", "fedema.distance"  # keys of a client's state besides layers


def blend(received: Layers, own: Layers, *, mu: float) -> Layers:
    """Return the layers from which a client starts: all of the global layers and of those in its state.

    Weights in both are mixed in new arrays. Statistics and counters in both are those of ``own`` if mu > 0.5. ``mu`` is
    the share of the own weights in [0, 1]; 0 is exactly ``received``, 1 exactly ``own``.
    """
    blended = own | received
    for name in own.keys() & received.keys():
        if is_weight(name, received[name]):
            mixed = torch.lerp(torch.from_numpy(received[name]), torch.from_numpy(own[name]), mu)
            blended[name] = mixed.numpy()  # w = mu w_k + (1 - mu) w
        elif mu > 0.5:
            blended[name] = own[name]
    return blended


def own_share(scale: float | None, distance: float) -> float:
    """Return mu, the share of the own weights; ``scale`` is lambda, None while it is unset."""
    return 0.0 if scale is None else min(scale * distance, 1.0)


def next_scale(scale: float | None, distance: float, *, tau: float) -> float | None:
    """Return lambda after a training: the first distance above 0 sets it."""
    return tau / distance if scale is None and distance > 0 else scale


class FedEMAClient(ClientStrategy):
    """Client side of FedEMA."""

    mixes_own_layers = averages_own_layers = True

    def __init__(self, *, tau: float, distance: str) -> None:
        self.tau, self.distance = tau, distance

    def problem(self, context: RunContext) -> Problem:
        return distance_problem(context.method, distance=self.distance)

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        parts = [f"own weights of {usual.download}", *method.local_parts, "distance and lambda"]
        return replace(usual, local_state=", ".join(parts))

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        layers = plan.layers
        if state is not None:
            mu = own_share(_scale_in(state), float(state[DISTANCE]))
            mine = {*upload_names_of(method, plan), *local_names(method)}  # without stages frozen since then
            own = {name: array for name, array in layers_in_state(state, method).items() if name in mine}
            layers = blend(plan.layers, own, mu=mu)
        return load_and_start_round(method, layers)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        distance = encoder_divergence(method, start, distance=self.distance)
        if not math.isfinite(distance):
            return {}  # training failed: the client keeps its previous state
        new = {DISTANCE: torch.tensor(distance, dtype=torch.float64)}
        scale = next_scale(_scale_in(state), distance, tau=self.tau)
        if scale is not None:
            new[LAMBDA] = torch.tensor(scale, dtype=torch.float64)
        layers = {name: plan.layers[name] for name in upload_names_of(method, plan)}
        mixed = [name for name, array in layers.items() if is_weight(name, array) or name.startswith("predictor.")]
        return new | clone_tensors(method, [*mixed, *local_names(method)])


class FedEMA(FedSSLStrategy):
    r"""Federated averaging whose clients mix the global model with their own.

    $$
    w_k \leftarrow \mu_k w_k + (1 - \mu_k) \, w_g \qquad \mu_k = \min(\lambda_k d_k, 1) \qquad
    \lambda_k = \frac{\tau}{d_k^{\text{first}}} \qquad
    d_k = \frac{1}{N} \sum_{l=1}^{N} \lVert w_k^{(l)} - v_k^{(l)} \rVert
    $$

    with $w_g$ the global weights, and $v_k^{(l)}$ convolution kernel l of the client when its last training began.
    """

    def __init__(self, *, weighting: str = "examples", tau: float = 0.7, distance: str = "mean_conv_l2") -> None:
        super().__init__(ServerStrategy(make_weighted_mean(weighting)), FedEMAClient(tau=tau, distance=distance))


def _scale_in(state: ClientState | None) -> float | None:
    return float(state[LAMBDA]) if state is not None and LAMBDA in state else None
