"""Random vectors, by seed, unit vectors, slow sums and cosines, and a check of gradients."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

E1, E2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def draw(*shape: int, seed: int = 0, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def slow_softmax(values: Sequence[float]) -> list[float]:
    exponentials = [math.exp(value) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def slow_cross_entropy(p: Sequence[float], q: Sequence[float]) -> float:
    return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))


def assert_gradients(loss: Tensor, *, into: Sequence[Tensor], not_into: Sequence[Tensor]) -> None:
    loss.backward()
    assert [tensor.grad is not None and bool(tensor.grad.abs().max() > 0) for tensor in into] == [True] * len(into)
    assert [tensor.grad for tensor in not_into] == [None] * len(not_into)
