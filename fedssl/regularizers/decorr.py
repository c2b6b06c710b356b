"""FedDecorr (Shi et al., ICLR 2023, arXiv 2210.00226): decorrelate the dimensions of a network's output.

The paper divides the squared Frobenius norm of the correlation matrix K by dim^2. The authors' code, to which their
weight 0.1 refers, omits the diagonal and does not divide correlations by the batch size; this implementation follows
it: ``(batch - 1)^2 / batch`` times the mean of K_ij^2 over i != j. The term grows with the batch size. ``weight * batch
/ (batch - 1)^2`` gives the paper's term up to the diagonal. The authors train supervised networks and decorrelate the
input of the classifier; FedU2's code decorrelates projections, as here.
"""

import torch
from torch import Tensor

from fedssl.losses import at_least_float32
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import Regularizer, RegularizerInput, part_or_encoder


def feature_decorrelation(z: Tensor) -> Tensor:
    """Return the mean squared correlation of two dimensions of ``(batch, dim)``, times ``(batch - 1)^2 / batch``.

    It is a scalar from 0 to ``(batch - 1)^2 / batch``; 0 for one image or one dimension, which have no correlations. A
    constant dimension counts as uncorrelated.
    """
    batch, dim = z.shape
    if batch == 1 or dim == 1:
        return z.new_zeros((), dtype=torch.float32)
    z = at_least_float32(z)
    variance, mean = torch.var_mean(z, dim=0)  # divided by batch - 1
    z = (z - mean) * torch.rsqrt(variance + 1e-8)
    with torch.autocast(z.device.type, enabled=False):
        products = z.T @ z  # (batch - 1) K
    others = products.square().sum() - products.diagonal().square().sum()
    return others / (dim * (dim - 1)) / batch


class Decorrelation(Regularizer):
    r"""Decorrelation of the output of the projector or the encoder, for each view.

    Of a method without a projector it is the encoder, as in the paper.

    $$
    \mathcal{L} = \ell + \beta \left( R(z_1) + R(z_2) \right) \qquad
    R(z) = \frac{(B - 1)^2}{B} \, \frac{1}{d (d - 1)} \sum_{i \ne j} K_{ij}^2
    $$

    with $z_v$ the outputs for view v, of d dimensions, $K_{ij}$ the correlation of two of them over the B images of a
    batch (0 where one is constant), and $\beta$ the weight.
    """

    def __init__(self, *, weight: float = 0.1, part: str = "projector") -> None:
        self.part = part if weight else None
        self.weight = weight

    def resolve_part(self, method: SSLMethod) -> str | None:
        return part_or_encoder(self.part, method)

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        if not step.z:
            return loss
        z1, z2 = step.z
        return loss + self.weight * (feature_decorrelation(z1) + feature_decorrelation(z2))
