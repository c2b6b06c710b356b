"""Losses of two views: pure functions of projections z and predictions p, all ``(batch, dim)``.

They have the standard forms, as written in the docstrings, except for two of L-DAWA's code, `nt_xent_one_sided` and
`barlow_twins_unbiased`, which are options of methods. All are computed in at least float32, also inside autocast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(z1: Tensor, z2: Tensor, *, temperature: float, negatives: Tensor | None = None) -> Tensor:
    """Return SimCLR's normalized temperature-scaled cross entropy (arXiv 2002.05709, Eq. 1), a scalar >= 0.

    With s the cosine divided by the temperature and j the other view of i among the ``2 * batch`` vectors, the loss is
    the mean over i of ``-log( exp(s_ij) / sum_{k != i} exp(s_ik) )``. Additional negatives d add ``sum_d exp(s_id)`` to
    the denominator. A single image without them has the loss 0, without gradient.

    ``z1`` and ``z2`` are projections of the two views, ``(batch, dim)``, and ``negatives`` are vectors of other images,
    ``(n, dim)``, none of them zero; all are normalized here. The gradient flows into both views.
    """
    batch = z1.shape[0]
    z = F.normalize(at_least_float32(torch.cat((z1, z2))), dim=1)
    similarity = _product(z / temperature, z.T).fill_diagonal_(-torch.inf)  # k != i
    if negatives is not None and len(negatives):
        further = F.normalize(negatives.to(z.dtype), dim=1)
        similarity = torch.cat((similarity, _product(z / temperature, further.T)), dim=1)
    other_view = torch.arange(2 * batch, device=z.device).roll(batch)
    return F.cross_entropy(similarity, other_view)  # Eq. 1


def nt_xent_one_sided(z1: Tensor, z2: Tensor, *, temperature: float) -> Tensor:
    """Return NT-Xent as in the code of L-DAWA (arXiv 2307.07393): one direction, with self-similarity.

    With s the cosine divided by the temperature, i one of the ``batch`` vectors of view 1 and j its other view, the
    loss is the mean over i of ``-log( exp(s_ij) / sum_k exp(s_ik) )``, with k over all ``2 * batch`` vectors including
    i. It is at least log 2, the limit for equal views and distant other images. For the arguments see `nt_xent`.
    """
    z1, z2 = F.normalize(at_least_float32(z1), dim=1), F.normalize(at_least_float32(z2), dim=1)
    similarity = _product(z1 / temperature, torch.cat((z1, z2)).T)
    batch = z1.shape[0]
    return F.cross_entropy(similarity, torch.arange(batch, 2 * batch, device=z1.device))


def info_nce(q: Tensor, k: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE with the other keys of the batch as negatives, in one direction (arXiv 2104.02057, Eq. 1).

    With s_ij the cosine of query i and key j divided by the temperature, the loss is the mean over i of ``-log(
    exp(s_ii) / sum_j exp(s_ij) )``, a scalar >= 0. Queries and keys are ``(batch, dim)`` and normalized here. The
    gradient flows into both.

    MoCo v3 multiplies by ``2 * temperature`` and adds the other direction. The method does both, and computes keys
    without gradient.
    """
    q, k = F.normalize(at_least_float32(q), dim=1), F.normalize(at_least_float32(k), dim=1)
    return F.cross_entropy(_product(q / temperature, k.T), torch.arange(q.shape[0], device=q.device))  # Eq. 1


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return the mean of ``-cos(p, z)`` with a stop-gradient on z (SimSiam, arXiv 2011.10566, Eq. 1 and 3).

    ``p`` are predictions from one view and ``z`` projections of the other, ``(batch, dim)``.
    """
    return -F.cosine_similarity(at_least_float32(p), at_least_float32(z.detach()), dim=1).mean()


def byol(p1: Tensor, z2: Tensor, p2: Tensor, z1: Tensor) -> Tensor:
    """Return BYOL's loss (arXiv 2006.07733, Eq. 2): mean of ``2 - 2 cos(p1, z2)`` plus mean of ``2 - 2 cos(p2, z1)``.

    ``p1`` and ``p2`` are predictions of the online network from view 1 and 2, ``z1`` and ``z2`` projections of the
    target network, without gradient; all are ``(batch, dim)``.
    """
    return (2 + 2 * negative_cosine(p1, z2)) + (2 + 2 * negative_cosine(p2, z1))  # Eq. 2, both directions


def relational(z1: Tensor, z2: Tensor, anchors: Tensor, *, temperature: float) -> Tensor:
    """Return the relational loss of FedX (arXiv 2207.09158): both views of an image are equally similar to the others.

    With s_ij the cosine of z1_i and anchor j divided by the temperature, p_i is the softmax of s_ij over all j != i,
    q_i likewise from z2, and m = (p + q) / 2. The loss is the mean over i of their Jensen-Shannon divergence,
    ``(KL(p_i, m_i) + KL(q_i, m_i)) / 2``, a scalar in [0, log 2]; 0 for fewer than three images, whose softmax has one
    term at most.

    ``z1``, ``z2`` and ``anchors``, one per image, are ``(batch, dim)`` and need not be normalized. The gradient flows
    into all three.
    """
    z, a = F.normalize(at_least_float32(torch.stack((z1, z2))), dim=2), F.normalize(at_least_float32(anchors), dim=1)
    log_pq = F.log_softmax(_others(_product(z / temperature, a.T)), dim=2)
    pq = log_pq.exp()
    log_m = pq.mean(dim=0).clamp(min=torch.finfo(pq.dtype).tiny).log()  # where p and q are 0 it does not count
    return (pq * (log_pq - log_m)).sum() / (2 * len(z1))


def barlow_twins(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins' redundancy reduction loss (arXiv 2103.03230, Eq. 1 and 2), a scalar >= 0.

    With C the cross-correlation of the two views' features over the batch, the loss is ``sum_i (1 - C_ii)^2 + lambd
    sum_{i != j} C_ij^2``. Features are standardized by the standard deviation of the batch (divisor ``batch``) with
    1e-5 added to the variance, as in the authors' code: a constant feature counts as uncorrelated.

    ``z1`` and ``z2`` are projections of the two views, ``(batch, dim)``; the gradient flows into both.
    """
    return _redundancy_reduction(_standardized(z1), _standardized(z2), lambd)


def barlow_twins_unbiased(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Return Barlow Twins as in the code of L-DAWA (arXiv 2307.07393): the standard deviation has divisor batch - 1.

    The correlation is still divided by ``batch``, so that its diagonal is at most ``(batch - 1) / batch`` and the loss
    at least ``dim / batch^2``. Nothing is added to the variance. A constant feature counts as uncorrelated here; in the
    authors' code it gives NaN. For the arguments see `barlow_twins`; at least two images.
    """
    return _redundancy_reduction(_unbiased(z1), _unbiased(z2), lambd)


def at_least_float32(z: Tensor) -> Tensor:
    """Return ``z`` in float32, or unchanged if its precision is higher."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _redundancy_reduction(z1: Tensor, z2: Tensor, lambd: float) -> Tensor:
    correlation = _product(z1.T, z2) / z1.shape[0]  # Eq. 2
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


def _others(square: Tensor) -> Tensor:
    """Return matrices ``(..., n, n)`` without their diagonals, ``(..., n, n - 1)``."""
    n = square.shape[-1]
    # After the first number, every (n + 1)-th is on the diagonal.
    rows = square.flatten(-2)[..., 1:].reshape(*square.shape[:-2], n - 1, n + 1)
    return rows[..., :-1].reshape(*square.shape[:-1], n - 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the precision of its factors, also inside autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
