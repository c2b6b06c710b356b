"""Losses in which a view predicts the assignment of another view to prototypes: SwAV, DINO and iBOT."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses.precision import at_least_float32


@torch.no_grad()
def sinkhorn(scores: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """Return codes: soft assignments of images to prototypes of equal size (SwAV, arXiv 2006.09882, Eq. 5).

    Sinkhorn-Knopp gives the matrix closest to ``exp(scores / epsilon)`` in relative entropy whose rows sum to 1 and
    whose columns sum to ``batch / prototypes``. Each of the ``iterations`` (at least 1; 3 in the paper) normalizes
    columns, then rows, in log space, so that any epsilon is numerically safe. Column sums become more accurate with
    each. A smaller positive ``epsilon`` (0.05 in the paper) gives harder codes. ``scores`` are similarities of
    projections and prototypes, ``(..., batch, prototypes)``, without gradient; codes have their shape and are in
    [0, 1].
    """
    if iterations < 1:
        raise InputError(f"iterations={iterations} but rows are normalized in each iteration; pass at least 1")
    log_codes = at_least_float32(scores) / epsilon
    for _ in range(iterations):
        log_codes = log_codes.log_softmax(dim=-2).log_softmax(dim=-1)  # Eq. 5
    return log_codes.exp()


def swav(scores: Sequence[Tensor], codes: Sequence[Tensor], *, temperature: float) -> Tensor:
    """Return SwAV's loss (arXiv 2006.09882, Eqs. 2 and 6): each view predicts the codes of the other views.

    With p_j the softmax of ``scores_j / temperature``, the loss is the mean of ``-sum_k codes_i(k) log p_j(k)`` over
    images and all pairs of a view i with codes and a view j != i: a scalar >= 0, log(prototypes) if all scores of an
    image are equal. Eq. 6 sums over pairs; the mean is that of the authors' code.

    ``scores`` are similarities of each view's projections and the prototypes, ``(batch, prototypes)``; the gradient
    flows into all. ``codes`` are those of the first views in the same order, see `sinkhorn`, without gradient. Raise
    `InputError` if there are fewer than two views, no codes, or more codes than views.
    """
    targets = at_least_float32(torch.stack(tuple(codes))).detach()
    logits = at_least_float32(torch.stack(tuple(scores))) / temperature
    return _cross_view_entropy(targets, logits)  # Eq. 6


def dino(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    *,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return DINO's loss (arXiv 2104.14294, Eq. 3): the student predicts the teacher's output for another view.

    With P_t the softmax of ``(teacher_i - center) / teacher_temperature`` and P_s that of ``student_j /
    student_temperature``, the loss is the mean of ``-sum_k P_t(k) log P_s(k)`` over images and all pairs of a teacher
    view i and a student view j != i: a scalar >= 0, log K if the student's distributions are uniform. Eq. 3 sums over
    pairs; the mean is that of the authors' code. Raise `InputError` as `swav`.

    Parameters
    ----------
    student : sequence of Tensor
        Logits of each view, ``(batch, K)``; the first views are the teacher's, in the same order. The gradient flows
        into all.
    teacher : sequence of Tensor
        Logits of each global view, ``(batch, K)``; without gradient.
    center : Tensor
        Subtracted from the teacher's logits, ``(K,)``; zeros disable it. The method updates it (Eq. 4).
    student_temperature, teacher_temperature : float
        Positive.
    """
    targets = _sharpened(torch.stack(tuple(teacher)), center, teacher_temperature)
    logits = at_least_float32(torch.stack(tuple(student))) / student_temperature
    return _cross_view_entropy(targets, logits)  # Eq. 3


def masked_tokens(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    *,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return iBOT's loss of masked patches (arXiv 2111.07832, Eq. 2): the student predicts the teacher's output there.

    With P_t and P_s as in `dino`, the loss is the sum of ``-w sum_k P_t(k) log P_s(k)`` over patches of weight w, a
    scalar >= 0. Eq. 2 sums over the masked patches; in the authors' code the loss is the mean over images of the mean
    over an image's masked patches: w is 1 / (images * masked patches of the image).

    Parameters
    ----------
    student, teacher : Tensor
        Logits of the same patches of the masked and of the complete images, ``(n, K)``; the teacher's without gradient.
    weights : Tensor
        Weights of the patches, ``(n,)``, 0 for patches that are not masked.
    center, student_temperature, teacher_temperature
        As in `dino`.
    """
    targets = _sharpened(teacher, center, teacher_temperature)
    log_p = F.log_softmax(at_least_float32(student) / student_temperature, dim=1)
    return -(weights * (targets * log_p).sum(dim=1)).sum()  # Eq. 2


def _cross_view_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross entropy over images and over all pairs of a target view i and a predicted view j != i.

    ``targets`` are distributions of the first views, ``(targets, batch, K)``, and ``logits`` predictions of all views,
    ``(views, batch, K)``. The sum over j is taken first: a target view is multiplied once by the sum of the other
    views' log-probabilities, so that the cost does not grow with the number of pairs.
    """
    count, views = len(targets), len(logits)
    if not 1 <= count <= views or views == 1:
        raise InputError(
            f"{count} target views and {views} predicted views; pass at least two predicted views, which start with "
            "the target views"
        )
    log_p = F.log_softmax(logits, dim=2)
    others = log_p.sum(dim=0) - log_p[:count]  # sum over j != i
    return -(targets * others).sum() / (count * (views - 1) * targets.shape[1])


@torch.no_grad()
def _sharpened(teacher: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the teacher's distributions without gradient, ``(..., K)``."""
    return F.softmax((at_least_float32(teacher) - center) / temperature, dim=-1)
