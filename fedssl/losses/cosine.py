"""Losses of the cosine between a prediction and a target without gradient: SimSiam and BYOL."""

import torch.nn.functional as F
from torch import Tensor

from fedssl.losses.precision import at_least_float32


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return the mean of ``-cos(p, z)`` with a stop-gradient on z (SimSiam, arXiv 2011.10566, Eq. 1 and 3).

    Parameters
    ----------
    p : Tensor
        Predictions from one view, ``(batch, dim)``.
    z : Tensor
        Projections of the other view, ``(batch, dim)``; without gradient.

    Returns
    -------
    Tensor
        Scalar in [-1, 1].
    """
    return -F.cosine_similarity(at_least_float32(p), at_least_float32(z.detach()), dim=1).mean()


def byol(p1: Tensor, z2: Tensor, p2: Tensor, z1: Tensor) -> Tensor:
    """Return BYOL's loss (arXiv 2006.07733, Eq. 2): mean of ``2 - 2 cos(p1, z2)`` plus mean of ``2 - 2 cos(p2, z1)``.

    Parameters
    ----------
    p1, p2 : Tensor
        Predictions of the online network from view 1 and 2, ``(batch, dim)``.
    z2, z1 : Tensor
        Projections of the target network from view 2 and 1, ``(batch, dim)``; without gradient.

    Returns
    -------
    Tensor
        Scalar in [0, 8].
    """
    return (2 + 2 * negative_cosine(p1, z2)) + (2 + 2 * negative_cosine(p2, z1))  # Eq. 2, both directions
