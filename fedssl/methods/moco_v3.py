"""MoCo v3 (Chen et al., arXiv 2104.02057): contrastive learning against the projections of a target network.

LW-FedSSL trains with it. The code of MoCo v3 multiplies the loss by 2 temperature, which makes losses of different
temperatures comparable; Eq. 2 of LW-FedSSL does not. The factor, ``loss_scale``, matters if another loss is added.
"""

from collections.abc import Callable

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import info_nce
from fedssl.methods.heads import MLP
from fedssl.methods.momentum import EMATargetMethod
from fedssl.views import Views


class MoCoV3(EMATargetMethod):
    r"""MoCo v3.

    $$
    \ell(q, k) = -\frac{1}{n} \sum_{i=1}^{n} \log \frac{\exp(\cos(q_i, k_i) / \tau)}{\sum_{j=1}^{n}
    \exp(\cos(q_i, k_j) / \tau)}
    \qquad \mathcal{L} = c \left( \ell(q^{(1)}, k^{(2)}) + \ell(q^{(2)}, k^{(1)}) \right)
    $$

    with $q_i^{(v)}$ the prediction of the online network from view v of image i, $k_i^{(v)}$ the projection of the
    target network, without gradient, $\tau$ the temperature, and c the ``loss_scale``.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        predictor: Callable[[int], MLP],
        temperature: float,
        ema_decay: float,
        target_init: str = "persist",
        loss_scale: float | None = None,
        train_patches: bool = True,
    ) -> None:
        if not train_patches and encoder.patch_embedding is not None:
            encoder.get_submodule(encoder.patch_embedding).requires_grad_(False)
        super().__init__(
            encoder, projector=projector, predictor=predictor, ema_decay=ema_decay, target_init=target_init
        )
        self.temperature = temperature
        self.loss_scale = 2 * temperature if loss_scale is None else loss_scale

    def loss(self, views: Views) -> Tensor:
        p1, p2, z1, z2 = self.forward_views(*views.images)
        losses = [info_nce(q, k, temperature=self.temperature) for q, k in ((p1, z2), (p2, z1))]
        return self.loss_scale * (losses[0] + losses[1])
