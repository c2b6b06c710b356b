"""Losses of two views: pure functions of projections z and predictions p, all ``(batch, dim)``.

Each is written down in its docstring. They have the standard forms, but for two of L-DAWA's code,
`nt_xent_one_sided` and `barlow_twins_unbiased`, which methods take if asked. All are computed in at least float32, also
inside autocast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(z1: Tensor, z2: Tensor, *, temperature: float, negatives: Tensor | None = None) -> Tensor:
    """Normalized temperature-scaled cross entropy of SimCLR (arXiv 2002.05709, Eq. 1).

    With s the cosine divided by the temperature and j the other view of i among the ``2 * batch`` vectors,
    the mean over i of ``-log( exp(s_ij) / sum_{k != i} exp(s_ik) )``. Further negatives d add ``sum_d exp(s_id)`` to
    the denominator.

    Parameters
    ----------
    z1, z2 : Tensor
        Projections of the two views, ``(batch, dim)``; need not be normalized. The gradient flows into both.
    temperature : float
        Positive; the smaller, the more the most similar other images weigh.
    negatives : Tensor, optional
        Vectors of images that are no image's of the batch, ``(n, dim)``; need not be normalized, but none is zero.
        None, or n = 0: there are no others.

    Returns
    -------
    Tensor
        Scalar >= 0; 0 without gradient for one image, which has no negatives, unless there are further ones.
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
    """NT-Xent as the code of L-DAWA (arXiv 2307.07393) has it: one direction, an image among its own negatives.

    With s the cosine divided by the temperature, i one of the ``batch`` vectors of view 1 and j its other view, the
    mean over i of ``-log( exp(s_ij) / sum_k exp(s_ik) )``, k over all ``2 * batch`` vectors, i among them.

    Parameters
    ----------
    z1, z2, temperature
        As in `nt_xent`.

    Returns
    -------
    Tensor
        Scalar >= log 2, which it comes near to where both views are alike and all other images far away.
    """
    z1, z2 = F.normalize(at_least_float32(z1), dim=1), F.normalize(at_least_float32(z2), dim=1)
    similarity = _product(z1 / temperature, torch.cat((z1, z2)).T)
    batch = z1.shape[0]
    return F.cross_entropy(similarity, torch.arange(batch, 2 * batch, device=z1.device))


def info_nce(q: Tensor, k: Tensor, *, temperature: float) -> Tensor:
    """InfoNCE with the other keys of the batch as negatives, in one direction (arXiv 2104.02057, Eq. 1).

    With s_ij the cosine of query i and key j divided by the temperature, the mean over i of
    ``-log( exp(s_ii) / sum_j exp(s_ij) )``.

    MoCo v3 multiplies by ``2 * temperature`` and adds the other direction; both are left to the method, and so is
    computing the keys without gradient.

    Parameters
    ----------
    q, k : Tensor
        Queries and keys, ``(batch, dim)``; need not be normalized. The gradient flows into both.
    temperature : float
        Positive.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    q, k = F.normalize(at_least_float32(q), dim=1), F.normalize(at_least_float32(k), dim=1)
    return F.cross_entropy(_product(q / temperature, k.T), torch.arange(q.shape[0], device=q.device))  # Eq. 1


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Mean of ``-cos(p, z)`` with a stop-gradient on z (SimSiam, arXiv 2011.10566, Eq. 1 and 3).

    Parameters
    ----------
    p : Tensor
        Predictions from one view, ``(batch, dim)``.
    z : Tensor
        Projections of the other view, ``(batch, dim)``; no gradient flows into them.

    Returns
    -------
    Tensor
        Scalar in [-1, 1].
    """
    return -F.cosine_similarity(at_least_float32(p), at_least_float32(z.detach()), dim=1).mean()


def byol(p1: Tensor, z2: Tensor, p2: Tensor, z1: Tensor) -> Tensor:
    """Loss of BYOL (arXiv 2006.07733, Eq. 2): the mean of ``2 - 2 cos(p1, z2)`` plus that of ``2 - 2 cos(p2, z1)``.

    Parameters
    ----------
    p1, p2 : Tensor
        Predictions of the online network from view 1 and 2, ``(batch, dim)``.
    z2, z1 : Tensor
        Projections of the target network from view 2 and 1, ``(batch, dim)``; no gradient flows into them.

    Returns
    -------
    Tensor
        Scalar in [0, 8].
    """
    return (2 + 2 * negative_cosine(p1, z2)) + (2 + 2 * negative_cosine(p2, z1))  # Eq. 2, both directions


def relational(z1: Tensor, z2: Tensor, anchors: Tensor, *, temperature: float) -> Tensor:
    """Relational loss of FedX (arXiv 2207.09158): both views of an image have the same similarities to the others.

    With s_ij the cosine of z1_i and anchor j divided by the temperature, p_i is the softmax of s_ij over all j != i,
    q_i likewise from z2, and m = (p + q) / 2: the mean over i of their Jensen-Shannon divergence,
    ``(KL(p_i, m_i) + KL(q_i, m_i)) / 2``.

    Parameters
    ----------
    z1, z2 : Tensor
        Vectors of the two views, ``(batch, dim)``; need not be normalized.
    anchors : Tensor
        One vector per image, to which the others' similarity is taken, ``(batch, dim)``. The gradient flows into all
        three.
    temperature : float
        Positive.

    Returns
    -------
    Tensor
        Scalar in [0, log 2]; 0 for fewer than three images, whose softmax has one term at most.
    """
    z, a = F.normalize(at_least_float32(torch.stack((z1, z2))), dim=2), F.normalize(at_least_float32(anchors), dim=1)
    log_pq = F.log_softmax(_others(_product(z / temperature, a.T)), dim=2)
    pq = log_pq.exp()
    log_m = pq.mean(dim=0).clamp(min=torch.finfo(pq.dtype).tiny).log()  # where p and q are 0 it does not count
    return (pq * (log_pq - log_m)).sum() / (2 * len(z1))


def barlow_twins(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Redundancy reduction of Barlow Twins (arXiv 2103.03230, Eq. 1 and 2).

    With C the cross-correlation of the two views' features over the batch, ``sum_i (1 - C_ii)^2 + lambd sum_{i != j}
    C_ij^2``. Features are standardized by the standard deviation of the batch (divided by ``batch``) with 1e-5
    added to the variance, as in the authors' code: a feature that is constant counts as uncorrelated.

    Parameters
    ----------
    z1, z2 : Tensor
        Projections of the two views, ``(batch, dim)``. The gradient flows into both.
    lambd : float
        Weight of the redundancy term, >= 0; 0 turns it off.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    return _redundancy_reduction(_standardized(z1), _standardized(z2), lambd)


def barlow_twins_unbiased(z1: Tensor, z2: Tensor, *, lambd: float) -> Tensor:
    """Barlow Twins as the code of L-DAWA (arXiv 2307.07393) has it: the standard deviation has the divisor batch - 1.

    The correlation is divided by ``batch`` nevertheless, so that its diagonal reaches ``(batch - 1) / batch`` at most.
    Nothing is added to the variance; a feature that is constant counts as uncorrelated here, there it gives NaN.

    Parameters
    ----------
    z1, z2, lambd
        As in `barlow_twins`; two images or more.

    Returns
    -------
    Tensor
        Scalar >= ``dim / batch^2``.
    """
    return _redundancy_reduction(_unbiased(z1), _unbiased(z2), lambd)


def at_least_float32(z: Tensor) -> Tensor:
    """``z`` in float32, or as it is if it is more precise."""
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
    """Matrices ``(..., n, n)`` without their diagonals, ``(..., n, n - 1)``."""
    n = square.shape[-1]
    # Behind the first number, every (n + 1)-th is on the diagonal.
    rows = square.flatten(-2)[..., 1:].reshape(*square.shape[:-2], n - 1, n + 1)
    return rows[..., :-1].reshape(*square.shape[:-1], n - 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a @ b`` in the precision of the two, also inside autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
