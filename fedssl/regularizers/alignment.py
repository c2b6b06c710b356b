"""Alignment: keep representations close to those of the downloaded encoder for the other view.

LW-FedSSL (Tun et al., arXiv 2401.11647, Eq. 3) measures the distance by InfoNCE, FeatARC (Wang et al., ICLR 2023, arXiv
2210.10947, section 5) by the cosine. LW-FedSSL does not state whether representations are normalized; here they are.
The code of FeatARC compares the projection of a view with the downloaded encoder's representation of the original
image, which requires projections as long as representations. The paper and this implementation compare representations
with representations.
"""

import torch
from torch import Tensor, nn

from fedssl.encoders.base import frozen_copy
from fedssl.losses import info_nce, negative_cosine
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import names_in_parts
from fedssl.regularizers.base import Regularizer, RegularizerInput


def alignment(
    z1: Tensor, z2: Tensor, g1: Tensor, g2: Tensor, *, distance: str = "info_nce", temperature: float = 0.2
) -> Tensor:
    """Return the distance of local representations from the downloaded encoder's representations of the other view.

    Local representations ``z1``, ``z2`` and those of the downloaded encoder ``g1``, ``g2``, without gradient, are
    ``(batch, dim)``. "info_nce" is ``l(z1, g2) + l(z2, g1)``, >= 0, with l as in `fedssl.losses.info_nce` and a
    positive temperature. "cosine" is the mean of ``-cos(z1, g2)`` and ``-cos(z2, g1)``, in [-1, 1].
    """
    if distance == "cosine":
        return (negative_cosine(z1, g2) + negative_cosine(z2, g1)) / 2
    return info_nce(z1, g2, temperature=temperature) + info_nce(z2, g1, temperature=temperature)  # Eq. 3


class Alignment(Regularizer):
    r"""Alignment with a frozen copy of the initial encoder of local training, in eval mode.

    The initial encoder is the global one, unless the strategy merges it with local layers (FedU, FedBN).

    $$
    \mathcal{L} = \ell + \alpha \left( a(z_1, g_2) + a(z_2, g_1) \right) \qquad
    a(z, g) = -\frac{1}{B} \sum_{i=1}^{B} \log \frac{\exp(\cos(z_i, g_i) / \tau)}{\sum_j \exp(\cos(z_i, g_j) / \tau)}
    \;\text{or}\; -\frac{1}{2B} \sum_{i=1}^{B} \cos(z_i, g_i)
    $$

    with $\ell$ the loss of the method, $z_v$ and $g_v$ the representations of view v by the encoder and by its copy,
    and $\alpha$ the weight. The second distance is ``cosine``.
    """

    def __init__(self, *, weight: float = 0.01, distance: str = "info_nce", temperature: float = 0.2) -> None:
        self.part = "encoder" if weight else None
        self.equal_global_sizes = weight > 0
        self.weight = weight
        self.distance = distance
        self.temperature = temperature
        self.received: nn.Module | None = None

    def on_train_start(self, method: SSLMethod) -> None:
        if not self.weight:
            return
        if self.received is None:
            self.received = frozen_copy(method.encoder).eval()
        else:
            self.received.load_state_dict(method.encoder.state_dict())

    def copied_bytes(self, method: SSLMethod) -> int:
        return method.bytes_of(names_in_parts(method, ("encoder",))) if self.weight else 0

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if self.received is None or not step.z:
            return loss
        z1, z2 = step.z
        with torch.no_grad():
            g1, g2 = self.received(torch.cat(step.views.images[:2])).chunk(2)
        term = alignment(z1, z2, g1, g2, distance=self.distance, temperature=self.temperature)
        return loss + self.weight * term
