"""Terms that keep the encoder near the initial one, such as a pretrained encoder, whose knowledge training forgets.

L2-SP (Li et al., ICML 2018, arXiv 1802.01483) compares weights. Feature distillation compares representations of the
same images, as less-forgetting learning does (Jung et al., arXiv 1607.00122), with the distance of FedCA's alignment.

FedProx's proximal term (`fedssl.regularizers.prox`) compares with the model at the start of a round. The initial
encoder is that before the first round: the part `fedssl.methods.base.INITIAL_ENCODER`, which clients download once.
"""

import torch
from torch import Tensor

from fedssl.losses import teacher_distance
from fedssl.methods.base import INITIAL_ENCODER, SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.regularizers.prox import proximal


class L2SP(Regularizer):
    r"""L2-SP: squared distance of the encoder from its initial weights, and squared norm of the heads.

    w are the trained parameters of the encoder, w_0 their initial values, and v all other trained parameters: the
    heads, which have no pretrained values. It replaces the optimizer's weight decay. A client holds w_0, as large as
    the encoder.

    $$
    \mathcal{L}(w, v) = \ell(w, v) + \frac{\alpha}{2} \lVert w - w_0 \rVert^2 + \frac{\beta}{2} \lVert v \rVert^2
    $$
    """

    def __init__(self, *, alpha: float, beta: float) -> None:
        self.uses_initial_encoder = alpha > 0
        self.alpha, self.beta = alpha, beta
        self._weights: list[Tensor] = []
        self._initial: list[Tensor] = []
        self._heads: list[Tensor] = []

    def on_train_start(self, method: SSLMethod) -> None:
        trained = {name: weights for name, weights in method.named_parameters() if weights.requires_grad}
        encoder = [name for name in trained if name.startswith("encoder.")] if self.alpha else []
        self._weights = [trained[name] for name in encoder]
        self._initial = [method.named_tensors[f"{INITIAL_ENCODER}.{name.partition('.')[2]}"] for name in encoder]
        others = [name for name in trained if not name.startswith("encoder.")] if self.beta else []
        self._heads = [trained[name] for name in others]

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if self._weights:
            loss = loss + proximal(self._weights, self._initial, weight=self.alpha)
        if self._heads:
            loss = loss + self.beta / 2 * torch.stack([weights.square().sum() for weights in self._heads]).sum()
        return loss


class FeatureDistillation(Regularizer):
    r"""Squared distance of normalized representations from those of the initial encoder, times ``weight``.

    h and h_0 are the representations of a view by the encoder and by the initial encoder. A client holds the initial
    encoder, and runs it in every step.

    $$
    \mathcal{L} = \ell + \frac{\lambda}{2n} \sum_{i=1}^{2n}
    \left\lVert \frac{h_i}{\lVert h_i \rVert} - \frac{h^0_i}{\lVert h^0_i \rVert} \right\rVert^2
    $$
    """

    supports_frozen_stages = False

    def __init__(self, *, weight: float) -> None:
        self.part = "encoder" if weight else None
        self.uses_initial_encoder = self.equal_global_sizes = weight > 0
        self.weight = weight

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if not step.z:
            return loss
        initial_encoder = step.method.get_submodule(INITIAL_ENCODER)
        with torch.no_grad():
            initial = initial_encoder(torch.cat(step.views.images[: self.num_views]))
        return loss + self.weight * teacher_distance(torch.cat(step.z), initial)
