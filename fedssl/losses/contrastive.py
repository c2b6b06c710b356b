"""Losses over the similarities of the images of a batch: SimCLR, MoCo v3 and FedX.

`nt_xent_one_sided` has the form of L-DAWA's code, which is an option of the method.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses.precision import at_least_float32, product


def nt_xent(z1: Tensor, z2: Tensor, *, temperature: float, negatives: Tensor | None = None) -> Tensor:
    """Return SimCLR's normalized temperature-scaled cross entropy (arXiv 2002.05709, Eq. 1).

    With s the cosine divided by the temperature and j the other view of i among the ``2 * batch`` vectors, the loss is
    the mean over i of ``-log( exp(s_ij) / sum_{k != i} exp(s_ik) )``: a scalar >= 0, and 0 without gradient for a
    single image without additional negatives.

    Parameters
    ----------
    z1, z2 : Tensor
        Projections of the two views, ``(batch, dim)``; normalized here. The gradient flows into both.
    temperature : float
        Positive; smaller values increase the weight of the most similar other images.
    negatives : Tensor, optional
        Vectors d of images outside of the batch, ``(n, dim)``, none of them zero; normalized here. They add ``sum_d
        exp(s_id)`` to the denominator. None or n = 0: no additional negatives.
    """
    batch = z1.shape[0]
    z = F.normalize(at_least_float32(torch.cat((z1, z2))), dim=1)
    similarity = product(z / temperature, z.T).fill_diagonal_(-torch.inf)  # k != i
    if negatives is not None and len(negatives):
        further = F.normalize(negatives.to(z.dtype), dim=1)
        similarity = torch.cat((similarity, product(z / temperature, further.T)), dim=1)
    other_view = torch.arange(2 * batch, device=z.device).roll(batch)
    return F.cross_entropy(similarity, other_view)  # Eq. 1


def nt_xent_one_sided(z1: Tensor, z2: Tensor, *, temperature: float) -> Tensor:
    """Return NT-Xent as in the code of L-DAWA (arXiv 2307.07393): one direction, with self-similarity.

    With s the cosine divided by the temperature, i one of the ``batch`` vectors of view 1 and j its other view, the
    loss is the mean over i of ``-log( exp(s_ij) / sum_k exp(s_ik) )``, with k over all ``2 * batch`` vectors including
    i. It is a scalar >= log 2, the limit for equal views and distant other images. Arguments as in `nt_xent`.
    """
    z1, z2 = F.normalize(at_least_float32(z1), dim=1), F.normalize(at_least_float32(z2), dim=1)
    similarity = product(z1 / temperature, torch.cat((z1, z2)).T)
    batch = z1.shape[0]
    return F.cross_entropy(similarity, torch.arange(batch, 2 * batch, device=z1.device))


def info_nce(q: Tensor, k: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE with the other keys of the batch as negatives, in one direction (arXiv 2104.02057, Eq. 1).

    With s_ij the cosine of query i and key j divided by the positive temperature, the loss is the mean over i of
    ``-log( exp(s_ii) / sum_j exp(s_ij) )``, a scalar >= 0. Queries and keys are ``(batch, dim)`` and normalized here;
    the gradient flows into both. MoCo v3 multiplies by ``2 * temperature`` and adds the other direction; the method
    does both, and computes keys without gradient.
    """
    q, k = F.normalize(at_least_float32(q), dim=1), F.normalize(at_least_float32(k), dim=1)
    return F.cross_entropy(product(q / temperature, k.T), torch.arange(q.shape[0], device=q.device))  # Eq. 1


def relational(z1: Tensor, z2: Tensor, anchors: Tensor, *, temperature: float) -> Tensor:
    """Return FedX's relational loss (arXiv 2207.09158): both views of an image have equal similarities to the others.

    With s_ij the cosine of z1_i and anchor j divided by the positive temperature, p_i is the softmax of s_ij over all
    j != i, q_i likewise from z2, and m = (p + q) / 2: the mean over i of their Jensen-Shannon divergence, ``(KL(p_i,
    m_i) + KL(q_i, m_i)) / 2``. It is a scalar in [0, log 2], and 0 for fewer than three images, whose softmax has one
    term at most. Vectors of the views and ``anchors``, one per image, are ``(batch, dim)`` and normalized here; the
    gradient flows into all three.
    """
    z, a = F.normalize(at_least_float32(torch.stack((z1, z2))), dim=2), F.normalize(at_least_float32(anchors), dim=1)
    log_pq = F.log_softmax(_others(product(z / temperature, a.T)), dim=2)
    pq = log_pq.exp()
    log_m = pq.mean(dim=0).clamp(min=torch.finfo(pq.dtype).tiny).log()  # where p and q are 0 it does not count
    return (pq * (log_pq - log_m)).sum() / (2 * len(z1))


def _others(square: Tensor) -> Tensor:
    """Return matrices ``(..., n, n)`` without their diagonals, ``(..., n, n - 1)``."""
    n = square.shape[-1]
    # After the first number, every (n + 1)-th is on the diagonal.
    rows = square.flatten(-2)[..., 1:].reshape(*square.shape[:-2], n - 1, n + 1)
    return rows[..., :-1].reshape(*square.shape[:-1], n - 1)
