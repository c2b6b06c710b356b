"""FedAlignUniform: alignment and uniformity (Wang and Isola, ICML 2020, arXiv 2005.10242) on every client.

SSD (Fang et al., ICCV 2025, arXiv 2508.01251) and FedU2 compare with it under this name. Differences from SSD's code:
uniformity is over the pairs of different images, as in the first paper.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.encoders import Encoder
from fedssl.losses import at_least_float32
from fedssl.losses.precision import product
from fedssl.methods.heads import MLP, ProjectorMethod
from fedssl.views import Views


def alignment_loss(z1: Tensor, z2: Tensor) -> Tensor:
    """Return the mean squared distance of the normalized vectors ``(batch, dim)`` of two views, in [0, 4]."""
    z1, z2 = F.normalize(at_least_float32(z1), dim=1), F.normalize(at_least_float32(z2), dim=1)
    return (z1 - z2).square().sum(dim=1).mean()


def uniformity_loss(z: Tensor, *, t: float = 2.0) -> Tensor:
    """Return the logarithm of the mean of ``exp(-t |z_i - z_j|^2)`` over pairs of normalized vectors, in [-4 t, 0].

    ``z`` is ``(batch, dim)`` with at least two vectors.
    """
    z = F.normalize(at_least_float32(z), dim=1)
    potential = 2 * t * (product(z, z.T) - 1)  # |z_i - z_j|^2 = 2 - 2 cos
    potential = potential.fill_diagonal_(-torch.inf)
    return potential.flatten().logsumexp(dim=0) - math.log(len(z) * (len(z) - 1))


class AlignUniform(ProjectorMethod):
    r"""Alignment and uniformity with an encoder and a projector. Each view has a separate forward pass.

    A batch needs at least three images: batch normalization maps any two images to 1 and -1.

    $$
    \mathcal{L} = \frac{1}{n} \sum_i \lVert z_i^{(1)} - z_i^{(2)} \rVert^2
    + \frac{\beta}{2} \sum_{v=1}^{2} \log \frac{1}{n (n - 1)} \sum_{i \ne j}
    \exp \left( -t \lVert z_i^{(v)} - z_j^{(v)} \rVert^2 \right)
    $$

    with $z_i^{(v)}$ the normalized projection of view v of image i, $\beta$ the ``uniformity_weight``, and t the ``t``.
    """

    min_batch_size = 3

    def __init__(
        self, encoder: Encoder, *, projector: Callable[[int], MLP], uniformity_weight: float, t: float
    ) -> None:
        super().__init__(encoder, projector=projector)
        self.uniformity_weight, self.t = uniformity_weight, t

    def loss(self, views: Views) -> Tensor:
        z1, z2 = self.project(views.images)
        uniformity = (uniformity_loss(z1, t=self.t) + uniformity_loss(z2, t=self.t)) / 2
        return alignment_loss(z1, z2) + self.uniformity_weight * uniformity
