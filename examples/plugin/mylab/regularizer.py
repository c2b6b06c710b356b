"""Representations of length 1."""

import torch
from torch import Tensor

from fedssl.regularizers.base import Regularizer, Step


class UnitLength(Regularizer):
    """``weight`` times the mean of ``(|h| - 1)^2`` over both views is added to the loss; 0 turns it off."""

    on = "encoder"

    def __init__(self, *, weight: float) -> None:
        self.weight = weight

    def add_to(self, loss: Tensor, step: Step) -> Tensor:
        assert step.z1 is not None  # what `on` promises
        assert step.z2 is not None
        return loss + self.weight * (torch.cat((step.z1, step.z2)).norm(dim=1) - 1).square().mean()
