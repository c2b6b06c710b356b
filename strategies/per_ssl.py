"""Per-SSL: a personal model beside the global one, after SSFL (He et al., 2021, arXiv 2110.02470).

The name is that of Dec-SSL's Table 2, which compares with it; there is no public code. From the paper's abstract:
clients federate self-supervised models by averaging, and have personal ones whose distance from the global one is
regulated. The abstract speaks of a distance between representations, and names Ditto (Li et al., ICML 2021, arXiv
2012.04221) among the algorithms that it extends. What follows is our choice, and is Ditto's:

- the distance is one of weights, ``weight / 2 ||v_k - w||^2`` over all that is trained, added to the loss of v_k
  (for one of representations there is `fedssl.regularizers.alignment`);
- w is the global model that the client received in the round, not what it trains of it: the only one that clients have
  in common, and the same for the whole of the training;
- v_k begins as the received global model when the client takes part for the first time, and is trained once in each of
  its rounds, after the global model, on the same images, views and batches and with the same regulariser.

Everything else of v_k is its own: running statistics, targets that follow it (a copy of v_k itself in its first round,
under ``method.target_init=reset`` in every round) and the stages that it trained before they were frozen. Global
centroids of Orchestra are the server's. No layer of v_k leaves the client.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, exchanged_names, load_and_start_round, local_names
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.regularizers.prox import proximal
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.fedavg import mean
from strategies.interfaces import ClientState, CommunicationSummary, TrainAgain

PERSONAL = "personal."  # before the names of v_k's layers in a client's state: they are no layers of the method


class ProximalTo(Regularizer):
    """Proximal term that pulls the trained weights to given layers.

    Parameters
    ----------
    layers : Layers
        w, of all that is trained.
    weight : float
        lambda; 0 turns it off.
    """

    def __init__(self, layers: Layers, *, weight: float) -> None:
        self._layers, self._weight = layers, weight

    @torch.no_grad()
    def on_train_start(self, method: SSLMethod) -> None:
        trained = {name: weights for name, weights in method.named_tensors.items() if weights.requires_grad}
        self._trained = list(trained.values())
        self._there = [torch.empty_like(w).copy_(torch.from_numpy(self._layers[name])) for name, w in trained.items()]

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if self._weight == 0:
            return loss
        return loss + proximal(self._trained, self._there, weight=self._weight)


class PersonalClient(ClientStrategy):
    """A client with a model of its own.

    Parameters
    ----------
    weight : float
        lambda, at least 0: 0 trains the own model alone.

    Raises
    ------
    InputError
        ``weight`` is negative.
    """

    trainings_per_round = 2

    def __init__(self, *, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise InputError(
                f"strategy.weight={weight} must be a number of at least 0; 0 trains personal models alone, and the "
                "larger it is the nearer they stay to the global one"
            )
        self.weight = weight

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join([f"a personal model ({usual.download})", *method.local_parts]))

    def train_personalized(
        self, method: SSLMethod, plan: TrainPlan, state: ClientState | None, *, train: TrainAgain
    ) -> ClientState:
        found = {name: value.detach().clone() for name, value in method.named_tensors.items()}
        self.personalized_model(method, plan, state)
        train(ProximalTo(plan.layers, weight=self.weight))
        names = [*exchanged_names(method), *local_names(method)]
        personal = {PERSONAL + name: value for name, value in clone_tensors(method, names).items()}
        with torch.no_grad():
            for name, value in found.items():
                method.named_tensors[name].copy_(value)
        return personal

    def personalized_model(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> Layers:
        personal = {
            name.removeprefix(PERSONAL): value.numpy()
            for name, value in (state or {}).items()
            if name.startswith(PERSONAL)
        }
        mine = {*exchanged_names(method), *local_names(method)}  # not what an earlier stage had beside
        return load_and_start_round(
            method, plan.layers | {name: array for name, array in personal.items() if name in mine}
        )


class PerSSL(FedSSLStrategy):
    """Federated averaging of clients that train a personal model as well.

    Parameters
    ----------
    weighting : {"examples", "uniform"}
        As in `FedAvg`.
    weight : float
        As in `PersonalClient`.
    """

    def __init__(self, *, weighting: str = "examples", weight: float = 0.1) -> None:
        super().__init__(ServerStrategy(mean(weighting)), PersonalClient(weight=weight))
