"""An encoder for tests of what surrounds encoders."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.encoders.base import Encoder


class LinearEncoder(Encoder):
    """A matrix without bias, given by its rows."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.define_stages(stages=(), widths=())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
