"""Cross entropy over pairs of different views, of which DINO and SwAV consist."""

import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError


def cross_view_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross entropy over images and over all pairs of a target view i and a predicted view j != i.

    The sum over j is taken first: a target view is multiplied once by the sum of the other views' log-probabilities,
    so that the cost does not grow with the number of pairs.

    Parameters
    ----------
    targets : Tensor
        Distributions of the first views, ``(targets, batch, K)``.
    logits : Tensor
        Predictions of all views in the same order, divided by their temperature, ``(views, batch, K)``. The gradient
        flows into both.

    Returns
    -------
    Tensor
        Scalar >= 0.

    Raises
    ------
    InputError
        If there is no pair, or a target view without a prediction.
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
