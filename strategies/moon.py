"""MOON (Li, He and Song, CVPR 2021, arXiv 2103.16257): model-contrastive learning on the clients.

Transcribed from the paper's equations, unverified against its code. The projection of a view is pulled to that of the
downloaded model and pushed from that of the client's own last model, both in eval mode and without gradient. A client
without a last model has no term. Methods without a projector contrast representations. A client's state has one more
encoder and projector, and a step has two more forward passes.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.arrays import Layers
from fedssl.config.constraints import check_arguments
from fedssl.encoders.base import frozen_copy
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, names_in_parts
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.training import LocalSteps
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.types import ClientState

LAST = "moon."  # prefix of the last model's layers in a client's state


def model_contrastive(z: Tensor, z_global: Tensor, z_last: Tensor, *, temperature: float) -> Tensor:
    """Return the mean model-contrastive loss of ``(batch, dim)`` features, >= 0 (Eq. 3)."""
    similarities = torch.stack((F.cosine_similarity(z, z_global), F.cosine_similarity(z, z_last)), dim=1)
    return -F.log_softmax(similarities / temperature, dim=1)[:, 0].mean()


class ModelContrast(Regularizer):
    """Model-contrastive term. ``weight`` and ``temperature`` as in `MOON`."""

    supports_frozen_stages = False

    def __init__(self, *, weight: float, temperature: float) -> None:
        self._weight, self._temperature = weight, temperature
        self.equal_global_sizes = weight > 0
        self._last_layers: dict[str, Tensor] = {}
        self._networks: tuple[nn.Module, nn.Module] | None = None  # the downloaded model and the last one
        self._factor = torch.zeros(())  # the weight, 0 without a last model

    def load(self, layers: dict[str, Tensor]) -> None:
        """Set the last model of the client, by the names in the method; empty without one."""
        self._last_layers = layers

    def resolve_part(self, method: SSLMethod) -> str | None:
        return contrasted_part(method) if self._weight else None

    def copied_bytes(self, method: SSLMethod) -> int:
        return 2 * method.bytes_of(contrasted_names(method)) if self._weight else 0

    def on_train_start(self, method: SSLMethod) -> None:
        if not self._weight:
            return
        if self._networks is None:
            self._networks = frozen_copy(network_of(method)).eval(), frozen_copy(network_of(method)).eval()
            self._factor = self._factor.to(next(method.parameters()).device)
        current = network_of(method).state_dict()
        self._networks[0].load_state_dict(current)
        self._networks[1].load_state_dict({**current, **self._last_layers})
        self._factor.fill_(self._weight if self._last_layers else 0.0)  # in place: CUDA graphs use this memory

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if self._networks is None or not step.z:
            return loss
        images = torch.cat(step.views.images[: self.num_views])
        with torch.no_grad():
            z_global, z_last = (network(images) for network in self._networks)
        term = model_contrastive(torch.cat(step.z), z_global, z_last, temperature=self._temperature)
        return loss + self._factor * term  # Eq. 4


def contrasted_part(method: SSLMethod) -> str:
    """Return the part whose output is contrasted: the projector, or the encoder if the method has none."""
    has_projector = any(name == "projector" for name, _ in method.named_children())
    return "projector" if has_projector and "projector" in method.regularized_parts else "encoder"


def contrasted_names(method: SSLMethod) -> list[str]:
    """Return the names of the encoder's layers and of those of `contrasted_part`."""
    return names_in_parts(method, ("encoder", contrasted_part(method)))


class MOONClient(ClientStrategy):
    """Client side of MOON, which keeps its last model. ``weight`` and ``temperature`` as in `MOON`."""

    def __init__(self, *, weight: float, temperature: float) -> None:
        check_arguments("strategy", owner="MOON", weight=weight, temperature=temperature)
        self._keeps_last = self.evaluates_projector = weight > 0
        self.keeps = "its last model" if self._keeps_last else ""
        self.mixes_own_layers = self._keeps_last  # the copies have the base layers of the trained model
        self.term = self._contrast = ModelContrast(weight=weight, temperature=temperature)

    def start_term(self, method: SSLMethod, plan: TrainPlan, state: ClientState | None) -> None:
        last = {name.removeprefix(LAST): value for name, value in (state or {}).items() if name.startswith(LAST)}
        self._contrast.load(last)

    def finish_training(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None, steps: LocalSteps
    ) -> tuple[ClientState, Layers]:
        if not self._keeps_last:
            return {}, {}
        left_out = {*method.inactive_names, *method.base_names}
        kept = clone_tensors(method, [name for name in contrasted_names(method) if name not in left_out])
        return {LAST + name: value for name, value in kept.items()}, {}


class MOON(FedSSLStrategy):
    r"""Federated averaging whose clients contrast models.

    $$
    \mathcal{L} = \ell + \mu \left( -\frac{1}{2B} \sum_{i=1}^{2B} \log \frac{\exp(\cos(z_i, z_i^g) / \tau)}
    {\exp(\cos(z_i, z_i^g) / \tau) + \exp(\cos(z_i, z_i^l) / \tau)} \right)
    $$

    with $\ell$ the loss of the method, $z_i$, $z_i^g$ and $z_i^l$ the projections of a view by the trained model, the
    downloaded one and the client's last one, $\mu$ the ``weight`` and $\tau$ the ``temperature``.
    """

    def __init__(self, *, weighting: str = "examples", weight: float = 1.0, temperature: float = 0.5) -> None:
        super().__init__(
            ServerStrategy(make_weighted_mean(weighting)), MOONClient(weight=weight, temperature=temperature)
        )


def network_of(method: SSLMethod) -> nn.Module:
    """Return the encoder and the contrasted part, one after the other, with the names of the method's layers."""
    parts = dict.fromkeys(("encoder", contrasted_part(method)))
    return nn.Sequential(OrderedDict((name, method.get_submodule(name)) for name in parts))
