"""Random points, by seed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.seeding import torch_generator


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test"), dtype=torch.float64)


def sphere(rows: int, dim: int, seed: int = 1) -> Tensor:
    return F.normalize(random(rows, dim, seed=seed), dim=1)
