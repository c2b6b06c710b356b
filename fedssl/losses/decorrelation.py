"""Losses that keep the features of a batch varied and uncorrelated: Barlow Twins and VICReg.

`barlow_twins_unbiased` has the form of L-DAWA's code, which is an option of the method.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses.precision import at_least_float32, product

_LARGE_FEATURES = 8


def barlow_twins(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins' redundancy reduction loss (arXiv 2103.03230, Eq. 1 and 2), a scalar >= 0.

    With C the cross-correlation of the two views' features over the batch, the loss is ``sum_i (1 - C_ii)^2 + lambd
    sum_{i != j} C_ij^2``. Features are standardized by the standard deviation of the batch (divisor ``batch``) with
    1e-5 added to the variance, as in the authors' code: a constant feature counts as uncorrelated. Projections of both
    views are ``(batch, dim)``; the gradient flows into both. ``lambd`` >= 0; 0 disables the redundancy term.
    """
    return _redundancy_reduction(_standardized(z1), _standardized(z2), lambd)


def barlow_twins_unbiased(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins as in the code of L-DAWA (arXiv 2307.07393): the standard deviation has divisor batch - 1.

    The correlation is still divided by ``batch``, so that its diagonal is at most ``(batch - 1) / batch`` and the loss
    at least ``dim / batch^2``. Nothing is added to the variance. A constant feature counts as uncorrelated here; in the
    authors' code it gives NaN. Arguments as in `barlow_twins`, with at least two images.
    """
    return _redundancy_reduction(_unbiased(z1), _unbiased(z2), lambd)


def vicreg(
    z1: Tensor, z2: Tensor, *, sim_weight: float = 25.0, var_weight: float = 25.0, cov_weight: float = 1.0
) -> Tensor:
    """Return VICReg's loss (arXiv 2105.04906, Eq. 6): invariance, variance and covariance of features.

    - Invariance s: the mean of ``(z1 - z2)^2`` over images and features. Eq. 5 sums over features.
    - Variance v: the mean of ``max(0, 1 - sqrt(variance + 1e-4))`` over features and both views. Eq. 6 adds the means
      of the two views, which is twice as much.
    - Covariance c: the sum of squared covariances of two different features divided by dim, added over both views.

    These are the terms of the authors' code, to which the default weights refer. The loss is ``sim_weight * s +
    var_weight * v + cov_weight * c``, >= 0 up to rounding; a weight of 0 disables a term. Projections of both views are
    ``(batch, dim)``, of at least two images; the gradient flows into both.
    """
    z = at_least_float32(torch.stack((z1, z2)))
    variance, mean = torch.var_mean(z, dim=1, keepdim=True)
    hinge = F.relu(1 - (variance + 1e-4).sqrt()).mean()  # Eq. 1 and 2
    covariance = _squared_covariances(z - mean) / z.shape[2]  # Eq. 4
    return sim_weight * F.mse_loss(z[0], z[1]) + var_weight * hinge + cov_weight * covariance  # Eq. 6


def _squared_covariances(centered: Tensor) -> Tensor:
    """Return the sum over views of squared covariances of two different features (Eq. 3), ``(views, batch, dim)``."""
    batch, dim = centered.shape[1:]
    # The mean of large values has a rounding error, which counts beside a small variance.
    z = (centered - centered.detach().mean(dim=1, keepdim=True)) / (batch - 1) ** 0.5
    if dim <= batch:
        return _off_diagonal(product(z.mT, z)).square().sum()
    # Z^T Z and Z Z^T have the same squared sum, and the smaller one costs less. It contains the variances. Those of a
    # few large features would leave no digits for the others, so these features are not in it.
    largest = z.detach().square().sum(dim=1, keepdim=True).topk(min(_LARGE_FEATURES, dim), dim=2).indices
    largest = largest.expand(-1, batch, -1)
    large, others = z.gather(2, largest), z.scatter(2, largest, 0.0)
    among_others: Tensor = product(others, others.mT).square().sum() - others.square().sum(dim=1).square().sum()
    between: Tensor = product(large.mT, others).square().sum()
    return among_others + 2 * between + _off_diagonal(product(large.mT, large)).square().sum()


def _off_diagonal(matrices: Tensor) -> Tensor:
    """Return matrices with a zero diagonal, in place."""
    matrices.diagonal(dim1=-2, dim2=-1).zero_()
    return matrices


def _redundancy_reduction(z1: Tensor, z2: Tensor, lambd: float) -> Tensor:
    correlation = product(z1.T, z2) / z1.shape[0]  # Eq. 2
    diagonal = correlation.diagonal()
    invariance = (1 - diagonal).square().sum()
    redundancy = correlation.square().sum() - diagonal.square().sum()
    return invariance + lambd * redundancy  # Eq. 1


def _unbiased(z: Tensor) -> Tensor:
    z = at_least_float32(z)
    variance, mean = torch.var_mean(z, dim=0)
    return (z - mean) * torch.rsqrt(variance.clamp(min=torch.finfo(z.dtype).tiny))


def _standardized(z: Tensor) -> Tensor:
    z = at_least_float32(z)
    variance, mean = torch.var_mean(z, dim=0, correction=0)
    return (z - mean) * torch.rsqrt(variance + 1e-5)
