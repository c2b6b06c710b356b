"""Barlow Twins (Zbontar et al., arXiv 2103.03230): features are equal in both views and uncorrelated otherwise.

L-DAWA trains with it. Its code uses one linear layer as head, a redundancy weight of 0.005, and a standard deviation
with divisor n - 1, which limits the diagonal of the correlation to (n - 1) / n. Here all three are settings.
"""

from collections.abc import Callable

from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import barlow_twins, barlow_twins_unbiased
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import Views

LOSSES = {"standard": barlow_twins, "l_dawa": barlow_twins_unbiased}


class BarlowTwins(ProjectorMethod):
    r"""Barlow Twins with an encoder and a projector. Each view has a separate forward pass.

    A batch needs at least three images: over two images the correlation of two features is always 1 or -1.

    $$
    \hat{z}_{ia}^{(v)} = \frac{z_{ia}^{(v)} - \mu_a^{(v)}}{\sqrt{(\sigma_a^{(v)})^2 + 10^{-5}}} \qquad
    C_{ab} = \frac{1}{n} \sum_{i=1}^{n} \hat{z}_{ia}^{(1)} \hat{z}_{ib}^{(2)} \qquad
    \mathcal{L} = \sum_a (1 - C_{aa})^2 + \lambda \sum_a \sum_{b \ne a} C_{ab}^2
    $$

    with $z_{ia}^{(v)}$ feature a of the projection of view v of image i, $\mu$ and $\sigma^2$ its mean and variance
    over the batch (divisor n; with ``loss="l_dawa"`` n - 1, and nothing is added), and $\lambda$ the ``lambd``.
    """

    min_batch_size = 3

    def __init__(
        self, encoder: Encoder, *, projector: Callable[[int], MLP], lambd: float, loss: str = "standard"
    ) -> None:
        super().__init__(encoder, projector=projector)
        self._loss, self.lambd = LOSSES[loss], lambd

    def loss(self, views: Views) -> Tensor:
        z1, z2 = self.project(views.images)
        return self._loss(z1, z2, lambd=self.lambd)
