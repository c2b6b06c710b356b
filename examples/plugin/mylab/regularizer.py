"""A regularizer toward representations of length 1."""

import torch
from torch import Tensor

from fedssl.regularizers.base import Regularizer, RegularizerInput


class UnitLength(Regularizer):
    """Adds ``weight`` times the mean of ``(|h| - 1)^2`` over both views; 0 disables it."""

    part = "encoder"

    def __init__(self, *, weight: float) -> None:
        self.weight = weight

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        return loss + self.weight * (torch.cat(step.z).norm(dim=1) - 1).square().mean()
