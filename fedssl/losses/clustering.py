"""SwAV (Caron et al., NeurIPS 2020, arXiv 2006.09882): a view predicts the cluster assignment of another view."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses.precision import at_least_float32
from fedssl.losses.view_pairs import cross_view_entropy


@torch.no_grad()
def sinkhorn(scores: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """Return codes: soft assignments of images to prototypes of equal size (Eq. 5).

    Sinkhorn-Knopp gives the matrix closest to ``exp(scores / epsilon)`` in relative entropy whose rows sum to 1 and
    whose columns sum to ``batch / prototypes``. Each iteration normalizes columns, then rows, in log space, so that any
    epsilon is numerically safe.

    Parameters
    ----------
    scores : Tensor
        Similarities of projections and prototypes, ``(batch, prototypes)`` or ``(..., batch, prototypes)``; without
        gradient.
    epsilon : float
        Positive; smaller values give harder codes. 0.05 in the paper.
    iterations : int
        At least 1; column sums become more accurate with each. 3 in the paper.

    Returns
    -------
    Tensor
        Codes with the shape of ``scores``, in [0, 1]; rows sum to 1.

    Raises
    ------
    InputError
        If ``iterations`` is less than 1.
    """
    if iterations < 1:
        raise InputError(f"iterations={iterations} but rows are normalized in each iteration; pass at least 1")
    log_codes = at_least_float32(scores) / epsilon
    for _ in range(iterations):
        log_codes = log_codes.log_softmax(dim=-2).log_softmax(dim=-1)  # Eq. 5
    return log_codes.exp()


def swav(scores: Sequence[Tensor], codes: Sequence[Tensor], *, temperature: float) -> Tensor:
    """Return SwAV's loss (Eq. 2 and 6): each view predicts the codes of the other views.

    With p_j the softmax of ``scores_j / temperature``, the loss is the mean of ``-sum_k codes_i(k) log p_j(k)`` over
    images and all pairs of a view i with codes and a view j != i. Eq. 6 sums over pairs; the mean is that of the
    authors' code.

    Parameters
    ----------
    scores : sequence of Tensor
        Similarities of each view's projections and the prototypes, ``(batch, prototypes)``. The gradient flows into
        all.
    codes : sequence of Tensor
        Codes of the first views in the same order, ``(batch, prototypes)``, whose rows sum to 1; without gradient. See
        `sinkhorn`.
    temperature : float
        Positive.

    Returns
    -------
    Tensor
        Scalar >= 0; log(prototypes) if all scores of an image are equal.

    Raises
    ------
    InputError
        If there are fewer than two views, no codes, or more codes than views.
    """
    targets = at_least_float32(torch.stack(tuple(codes))).detach()
    logits = at_least_float32(torch.stack(tuple(scores))) / temperature
    return cross_view_entropy(targets, logits)  # Eq. 6
