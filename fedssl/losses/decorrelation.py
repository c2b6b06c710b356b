"""Losses that standardize or decorrelate features over the batch: Barlow Twins.

`barlow_twins_unbiased` has the form of L-DAWA's code, which is an option of the method.
"""

import torch
from torch import Tensor

from fedssl.losses.precision import at_least_float32, product


def barlow_twins(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins' redundancy reduction loss (arXiv 2103.03230, Eq. 1 and 2).

    With C the cross-correlation of the two views' features over the batch, the loss is ``sum_i (1 - C_ii)^2 + lambd
    sum_{i != j} C_ij^2``. Features are standardized by the standard deviation of the batch (divisor ``batch``) with
    1e-5 added to the variance, as in the authors' code: a constant feature counts as uncorrelated.

    Parameters
    ----------
    z1, z2 : Tensor
        Projections of the two views, ``(batch, dim)``. The gradient flows into both.
    lambd : float
        Weight of the redundancy term, >= 0; 0 disables it.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    return _redundancy_reduction(_standardized(z1), _standardized(z2), lambd)


def barlow_twins_unbiased(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins as in the code of L-DAWA (arXiv 2307.07393): the standard deviation has divisor batch - 1.

    The correlation is still divided by ``batch``, so that its diagonal is at most ``(batch - 1) / batch``. Nothing is
    added to the variance. A constant feature counts as uncorrelated here; in the authors' code it gives NaN.

    Parameters
    ----------
    z1, z2, lambd
        As in `barlow_twins`; at least two images.

    Returns
    -------
    Tensor
        Scalar >= ``dim / batch^2``.
    """
    return _redundancy_reduction(_unbiased(z1), _unbiased(z2), lambd)


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
