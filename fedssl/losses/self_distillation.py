"""Losses of self-distillation: a student predicts the centered and sharpened outputs of its teacher (DINO, iBOT)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses.precision import at_least_float32
from fedssl.losses.view_pairs import cross_view_entropy


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
    view i and a student view j != i. Eq. 3 sums over pairs; the mean is that of the authors' code.

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

    Returns
    -------
    Tensor
        Scalar >= 0; log K if the student's distributions are uniform.

    Raises
    ------
    InputError
        If there are fewer than two student views, no teacher view, or more teacher than student views.
    """
    targets = _sharpened(torch.stack(tuple(teacher)), center, teacher_temperature)
    logits = at_least_float32(torch.stack(tuple(student))) / student_temperature
    return cross_view_entropy(targets, logits)  # Eq. 3


def masked_tokens(
    student: Tensor,
    teacher: Tensor,
    masked: Tensor,
    *,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return iBOT's loss of masked patches (arXiv 2111.07832, Eq. 2): the student predicts the teacher's output there.

    With P_t and P_s as in `dino`, each image has the mean of ``-sum_k P_t(k) log P_s(k)`` over its masked patches, and
    the loss is the mean over images. Eq. 2 sums over patches; the mean is that of the authors' code.

    All patches are computed and the others set to 0, because selecting the masked ones would synchronize with the
    device.

    Parameters
    ----------
    student : Tensor
        Logits of the patches of the masked images, ``(batch, patches, K)``.
    teacher : Tensor
        Logits of the patches of the complete images, ``(batch, patches, K)``; without gradient.
    masked : Tensor
        Which patches the student did not see, bool, ``(batch, patches)``.
    center, student_temperature, teacher_temperature
        As in `dino`.

    Returns
    -------
    Tensor
        Scalar >= 0; an image without masked patches counts as 0.
    """
    targets = _sharpened(teacher, center, teacher_temperature)
    log_p = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    entropy = torch.where(masked, -(targets * log_p).sum(dim=2), 0)  # Eq. 2
    return (entropy.sum(dim=1) / masked.sum(dim=1).clamp(min=1)).mean()


@torch.no_grad()
def _sharpened(teacher: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the teacher's distributions without gradient, ``(..., K)``."""
    return F.softmax((at_least_float32(teacher) - center) / temperature, dim=-1)
