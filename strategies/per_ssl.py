"""Per-SSL: a personalized model beside the global one, after SSFL (He et al., 2021, arXiv 2110.02470).

Dec-SSL's Table 2 compares with it under this name. There is no public code. According to the paper's abstract, clients
federate self-supervised models by averaging, and have personalized ones whose distance from the global one is
regularized. The abstract mentions a distance between representations, and names Ditto (Li et al., ICML 2021, arXiv
2012.04221) among the algorithms that it extends. The following is our choice, and is Ditto's:

- the distance is one of weights, ``weight / 2 ||v_k - w||^2`` over all trained weights, added to the loss of v_k
  (for one of representations there is `fedssl.regularizers.alignment`);
- w is the global model that the client downloaded in the round, not its trained copy. It is the only model that
  clients have in common, and constant during training;
- v_k starts as the downloaded global model in the client's first participation. It is trained once in each of its
  rounds, after the global model, on the same images, views and batches and with the same regularizer.

All other parts of v_k are local: running statistics, parts that the method trains locally, targets that follow it (a
copy of v_k itself in its first round, under ``method.target_init=reset`` in every round) and stages that were trained
before they were frozen. Global centroids of Orchestra are the server's. No layer of v_k is uploaded.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, copy_arrays, exchanged_names, load_and_start_round, local_names
from fedssl.regularizers.base import RegularizerInput
from fedssl.regularizers.prox import Proximal
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.types import ClientState, CommunicationSummary, TrainAgain

PERSONAL = "personal."  # prefix of v_k's layers in a client's state


class ProximalTo(Proximal):
    """Proximal term with ``weight`` lambda that pulls the trained weights to ``layers``; 0 disables it.

    Trained weights of local parts, which are not in ``layers``, are free.
    """

    cuda_graph_safe = False  # each client builds a new one

    def __init__(self, layers: Layers, *, weight: float) -> None:
        super().__init__(weight=weight)
        self._layers = layers

    @torch.no_grad()
    def on_train_start(self, method: SSLMethod) -> None:
        tensors = method.named_tensors
        trained = {name: tensors[name] for name in tensors if name in self._layers and tensors[name].requires_grad}
        self._trained = list(trained.values())
        self._start = [torch.empty_like(weights) for weights in self._trained]
        copy_arrays(self._start, [self._layers[name] for name in trained])

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        return super().apply(loss, step) if self.weight else loss


class PersonalClient(ClientStrategy):
    """Client with a personalized model. ``weight`` as in `PerSSL`."""

    trainings_per_round = 2
    mixes_own_layers = averages_own_layers = True  # the proximal term compares them

    def __init__(self, *, weight: float) -> None:
        self.weight = weight

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join([f"a personal model ({usual.download})", *method.local_parts]))

    def copied_bytes(self, method: SSLMethod) -> int:
        """Return the memory of the global model during the second training, and of its proximal term."""
        return method.bytes_of(set(method.named_tensors) - set(method.base_names)) + method.bytes_of(method.trainable)

    def train_personalized(
        self, method: SSLMethod, plan: TrainPlan, state: ClientState | None, *, train: TrainAgain
    ) -> ClientState:
        base = set(method.base_names)
        trained = {name: value.detach().clone() for name, value in method.named_tensors.items() if name not in base}
        self.personalized_model(method, plan, state)
        train(ProximalTo(plan.layers, weight=self.weight))
        names = [*exchanged_names(method), *local_names(method)]
        personal = {PERSONAL + name: value for name, value in clone_tensors(method, names).items()}
        with torch.no_grad():
            for name, value in trained.items():
                method.named_tensors[name].copy_(value)
        return personal

    def personalized_model(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        mine = {*exchanged_names(method), *local_names(method)}  # without parts of earlier stages
        keys = {PERSONAL + name: name for name in mine}
        personal = {keys[key]: value.numpy() for key, value in (state or {}).items() if key in keys}
        load_and_start_round(method, plan.layers | personal)


class PerSSL(FedSSLStrategy):
    r"""Federated averaging of clients that also train a personalized model.

    $$
    w = \sum_k \beta_k w_k \qquad
    v_k \leftarrow \underset{v}{\operatorname{argmin}} \; \mathcal{L}_k(v) + \frac{\lambda}{2} \lVert v - w_g \rVert^2
    $$

    with $w_g$ the downloaded global model, $w_k$ the same after the training of client k, and $v_k$ its personalized
    model.
    """

    def __init__(self, *, weighting: str = "examples", weight: float = 0.1) -> None:
        super().__init__(ServerStrategy(make_weighted_mean(weighting)), PersonalClient(weight=weight))
