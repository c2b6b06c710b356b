"""FedEMA (Zhuang et al., ICLR 2022): a client that drifts far keeps more of its own weights.

The server averages models by examples. A client measures how far its encoder moves in training, d. At its next
participation it begins with mu w_k + (1 - mu) w, a mixture of its own weights w_k and the global ones w of online
encoder, projector and predictor, where mu = min(lambda d, 1). The client sets lambda = tau / d by its first d, so that
mu is tau at its second participation, and never changes it. Its target networks stay its own (those that travel,
``method.target_init=average``, are mixed like the others), and in its first participation it takes everything from the
global model.

As in the authors' code:

- d is the mean distance of the convolution kernels after training from those before it (without convolutions: of all
  that is trained of the encoder, see `strategies.encoder_divergence`); the paper compares the client's trained
  weights with the global ones that it receives next;
- running statistics of encoder and projector come from the global model, those of the predictor from the side with the
  larger share. Counters go with them and are never mixed.

Here lambda stays open as long as d = 0 (no local epochs), which means mu = 0, where the authors' code divides by zero.
Stages that are frozen at present are neither kept nor mixed: they are the server's, which may have calibrated them.
Parts that a method does not have, such as SimCLR's predictor and target, are left out.
"""

import math
from dataclasses import replace

import torch

from fedssl.arrays import Layers, is_weight
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, load_and_start_round, local_names
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy, layers_in_state, upload_names_of
from strategies.encoder_divergence import DISTANCES, distance_names, encoder_divergence
from strategies.fedavg import mean
from strategies.interfaces import ClientState, CommunicationSummary, StrategyContext
from strategies.weighted_sum import check_choice

LAMBDA, DISTANCE = "fedema.lambda", "fedema.distance"  # names in a client's state that are no layers


def blend(received: Layers, own: Layers, *, mu: float) -> Layers:
    """The layers that a client begins with.

    Parameters
    ----------
    received, own : Layers
        The global layers, and those that the client kept: some of these, and perhaps others (of target networks).
    mu : float
        Share of the own weights in [0, 1]; 0 takes the received ones, 1 the own ones, exactly.

    Returns
    -------
    Layers
        All layers of both. Weights that are in both are mixed in new arrays; of statistics and counters that are in
        both, those of ``own`` are taken if mu > 0.5.
    """
    blended = own | received
    for name in own.keys() & received.keys():
        if is_weight(name, received[name]):
            mixed = torch.lerp(torch.from_numpy(received[name]), torch.from_numpy(own[name]), mu)
            blended[name] = mixed.numpy()  # w = mu w_k + (1 - mu) w
        elif mu > 0.5:
            blended[name] = own[name]
    return blended


class FedEMAClient(ClientStrategy):
    """FedEMA's client side.

    Parameters
    ----------
    tau : float
        Share of its own weights that a client keeps at its second participation; at least 0, which always takes the
        global ones.
    distance : {"mean_conv_l2", "squared_l2"}
        d, see `strategies.encoder_divergence`.

    Raises
    ------
    InputError
        ``tau`` is negative, or ``distance`` another word.
    """

    def __init__(self, *, tau: float, distance: str) -> None:
        if tau < 0:
            raise InputError(f"strategy.tau={tau} must not be negative; FedEMA uses 0.7, 0 takes the global weights")
        self.tau = tau
        self.distance = check_choice("strategy.distance", distance, DISTANCES)

    def validate(self, context: StrategyContext) -> None:
        distance_names(context.method, distance=self.distance)

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(
            usual,
            local_state=", ".join([f"own weights of {usual.download}", *method.local_parts, "distance and lambda"]),
        )

    def load_start(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        layers = plan.layers
        if state is not None:
            mu = min(float(state[LAMBDA]) * float(state[DISTANCE]), 1.0) if LAMBDA in state else 0.0
            mine = {*upload_names_of(method, plan), *local_names(method)}  # not the stages frozen since
            own = {name: array for name, array in layers_in_state(state, method).items() if name in mine}
            layers = blend(plan.layers, own, mu=mu)
        return load_and_start_round(method, layers)

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        distance = encoder_divergence(method, start, distance=self.distance)
        if not math.isfinite(distance):
            return {}  # training failed: the client goes on from what it kept before
        new = {DISTANCE: torch.tensor(distance, dtype=torch.float64)}
        if state is not None and LAMBDA in state:
            new[LAMBDA] = state[LAMBDA]
        elif distance > 0:
            new[LAMBDA] = torch.tensor(self.tau / distance, dtype=torch.float64)
        layers = {name: plan.layers[name] for name in upload_names_of(method, plan)}
        mixed = [name for name, array in layers.items() if is_weight(name, array) or name.startswith("predictor.")]
        return new | clone_tensors(method, [*mixed, *local_names(method)])


class FedEMA(FedSSLStrategy):
    """Federated averaging whose clients mix the global model with their own.

    Parameters
    ----------
    weighting : {"examples", "uniform"}
        As in `FedAvg`.
    tau : float
        As in `FedEMAClient`.
    distance : str
        As in `FedEMAClient`.
    """

    def __init__(self, *, weighting: str = "examples", tau: float = 0.7, distance: str = "mean_conv_l2") -> None:
        super().__init__(ServerStrategy(mean(weighting)), FedEMAClient(tau=tau, distance=distance))
