"""Random vectors, by seed, and two unit vectors."""

import torch
from torch import Tensor

E1, E2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def draw(*shape: int, seed: int = 0, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]
