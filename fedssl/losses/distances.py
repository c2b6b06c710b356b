"""Losses of the distance between vectors and their targets without gradient: SimSiam, BYOL and distillation.

`similarity_distillation` is SEED (Fang et al., ICLR 2021, arXiv 2101.04731), which compares similarities to others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses.precision import at_least_float32, product


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return the mean of ``-cos(p, z)`` with a stop-gradient on z (SimSiam, arXiv 2011.10566, Eq. 1 and 3).

    ``p`` are predictions from one view and ``z`` projections of the other view, ``(batch, dim)``. The result is a
    scalar in [-1, 1].
    """
    return -F.cosine_similarity(at_least_float32(p), at_least_float32(z.detach()), dim=1).mean()


def byol(p1: Tensor, z2: Tensor, p2: Tensor, z1: Tensor) -> Tensor:
    """Return BYOL's loss (arXiv 2006.07733, Eq. 2): mean of ``2 - 2 cos(p1, z2)`` plus mean of ``2 - 2 cos(p2, z1)``.

    p are predictions of the online network from view 1 and 2, and z projections of the target network, without
    gradient, each ``(batch, dim)``. The result is a scalar in [0, 8].
    """
    return (2 + 2 * negative_cosine(p1, z2)) + (2 + 2 * negative_cosine(p2, z1))  # Eq. 2, both directions


def teacher_distance(h: Tensor, teacher_features: Tensor) -> Tensor:
    """Return the mean squared distance of normalized features, ``|h / |h| - t / |t||^2 = 2 - 2 cos(h, t)``.

    Both are of the same images, ``(batch, dim)``, and normalized here. The result is a scalar in [0, 4]. The gradient
    flows into ``h`` only.
    """
    h, teacher = (F.normalize(at_least_float32(x), dim=1) for x in (h, teacher_features.detach()))
    return (h - teacher).square().sum(dim=1).mean()


def feature_mse(z: Tensor, teacher_features: Tensor) -> Tensor:
    """Return the mean squared error of features, over images and dimensions.

    Both are of the same images, ``(batch, dim)``, and not normalized. The result is a scalar >= 0. The gradient flows
    into ``z`` only.
    """
    return F.mse_loss(at_least_float32(z), at_least_float32(teacher_features.detach()))


def similarity_distillation(
    z: Tensor, teacher_features: Tensor, queue: Tensor, *, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Return SEED's loss (arXiv 2101.04731, Eq. 5): similarities to the teacher's features of other images.

    For the dictionary of image i, which has the entries d of the queue and the image's own teacher feature t_i (section
    3.2), the loss is the mean over images of ``-sum_d p_t(d) log p_s(d)``, with p_t the softmax over d of ``cos(t_i, d)
    / teacher_temperature`` (Eq. 2) and p_s that of ``cos(z_i, d) / student_temperature`` (Eq. 3): a scalar >= 0, 0 with
    an empty queue.

    Parameters
    ----------
    z, teacher_features : Tensor
        Projections of the student and features of the teacher for the same images, ``(batch, dim)``; normalized here.
        The gradient flows into ``z`` only.
    queue : Tensor
        Normalized features of the teacher for earlier images, ``(queue_size, dim)``; rows of zeros are empty and
        ignored.
    student_temperature, teacher_temperature : float
        Divisors of the cosines; positive. A smaller one gives more weight to the most similar entries.
    """
    student, teacher = (F.normalize(at_least_float32(x), dim=1) for x in (z, teacher_features.detach()))
    queue = queue.to(teacher.dtype)
    is_empty = F.pad(~queue.any(dim=1), (1, 0))  # the image's own entry comes first
    logits_s, logits_t = (
        torch.cat(((x * teacher).sum(dim=1, keepdim=True), product(x, queue.T)), dim=1) / temperature
        for x, temperature in ((student, student_temperature), (teacher, teacher_temperature))
    )
    p_t = logits_t.masked_fill(is_empty, -torch.inf).softmax(dim=1)  # Eq. 2
    log_p_s = logits_s.masked_fill(is_empty, -torch.inf).log_softmax(dim=1)  # Eq. 3
    return -(p_t * log_p_s.masked_fill(is_empty, 0)).sum(dim=1).mean()  # Eq. 5
