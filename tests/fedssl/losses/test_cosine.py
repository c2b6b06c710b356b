"""Negative cosine and BYOL against their equations, numbers computed by hand, and where gradients flow."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.losses import byol, negative_cosine
from tests.fedssl.losses.vectors import E1, E2, draw


def test_negative_cosine_by_hand() -> None:
    """Angles of 0, 90 and 180 degrees, then 45 degrees twice: -(1 + 0 - 1 + 2 / sqrt 2) / 5."""
    p = torch.stack((E1, E1, E1, E1, E2))
    z = torch.stack((2 * E1, E2, -E1, E1 + E2, E1 + E2))
    assert negative_cosine(p, z).item() == pytest.approx(-math.sqrt(2) / 5, rel=1e-6)


def test_byol_by_hand() -> None:
    """cos(p1, z2) = 1 and 0 for the two images: mean of 0 and 2 is 1. cos(p2, z1) = -1 and 1 / sqrt 2: mean of 4 and
    2 - sqrt 2 is 3 - sqrt 2 / 2. Sum: 4 - sqrt 2 / 2."""
    p1, z2 = torch.stack((E1, E1)), torch.stack((E1, E2))
    p2, z1 = torch.stack((E2, E1)), torch.stack((-5 * E2, E1 + E2))
    assert byol(p1, z2, p2, z1).item() == pytest.approx(4 - math.sqrt(2) / 2, rel=1e-6)


def test_byol_is_its_equation() -> None:
    """Eq. 2 is the squared distance of the normalized vectors."""
    p1, z2, p2, z1 = draw(6, 5, count=4)

    def slow(p: Tensor, z: Tensor) -> float:
        squares = [float(((a / a.norm() - b / b.norm()) ** 2).sum()) for a, b in zip(p, z, strict=True)]
        return sum(squares) / len(squares)

    assert byol(p1, z2, p2, z1).item() == pytest.approx(slow(p1, z2) + slow(p2, z1), rel=1e-12)


def test_no_gradient_flows_into_targets() -> None:
    p1, z2, p2, z1 = (tensor.requires_grad_() for tensor in draw(4, 5, count=4))
    (byol(p1, z2, p2, z1) + negative_cosine(p1, z1)).backward()
    assert z1.grad is None
    assert z2.grad is None
    assert p1.grad is not None
    assert p1.grad.abs().max() > 0
    assert p2.grad is not None
    assert p2.grad.abs().max() > 0
