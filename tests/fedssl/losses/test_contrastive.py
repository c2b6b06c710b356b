"""Contrastive losses against slow transcriptions of their equations and numbers computed by hand."""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fedssl.losses.contrastive import info_nce, nt_xent, nt_xent_one_sided
from tests.fedssl.losses.vectors import E1, E2, cosine, draw


def slow_nt_xent(z1: Tensor, z2: Tensor, temperature: float, negatives: Iterable[Tensor] = ()) -> float:
    z, n = [*z1, *z2], len(z1)
    losses = []
    for i in range(2 * n):
        other = i + n if i < n else i - n
        others = [*(z[k] for k in range(2 * n) if k != i), *negatives]
        denominator = sum(math.exp(cosine(z[i], one) / temperature) for one in others)
        losses.append(-math.log(math.exp(cosine(z[i], z[other]) / temperature) / denominator))
    return sum(losses) / len(losses)


def slow_nt_xent_one_sided(z1: Tensor, z2: Tensor, temperature: float) -> float:
    losses = []
    for own, other in zip(z1, z2, strict=True):
        denominator = sum(math.exp(cosine(own, z) / temperature) for z in [*z1, *z2])
        losses.append(-math.log(math.exp(cosine(own, other) / temperature) / denominator))
    return sum(losses) / len(losses)


def slow_info_nce(q: Tensor, k: Tensor, temperature: float) -> float:
    losses = []
    for i in range(len(q)):
        denominator = sum(math.exp(cosine(q[i], key) / temperature) for key in k)
        losses.append(-math.log(math.exp(cosine(q[i], k[i]) / temperature) / denominator))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("temperature", [0.07, 0.5, 2.0])
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize(("fast", "slow"), [(nt_xent, slow_nt_xent), (nt_xent_one_sided, slow_nt_xent_one_sided)])
def test_nt_xent_is_its_equation(fast, slow, temperature: float, batch: int) -> None:
    z1, z2 = draw(batch, 7)
    loss = fast(z1, z2, temperature=temperature)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(slow(z1, z2, temperature), rel=1e-12)
    assert fast(z1.float(), z2.float(), temperature=temperature).item() == pytest.approx(loss.item(), rel=1e-5)


def test_nt_xent_by_hand() -> None:
    """Two images whose views agree, e1 and e2. Every anchor has cosine 1 with its other view and 0 with both views of
    the other image, so the loss is -log(e^(1/t) / (e^(1/t) + 2)) = log(1 + 2 e^(-1/t)); with t = 1: 0.551445."""
    z = torch.stack((E1, E2))
    assert nt_xent(z, 3 * z, temperature=1.0).item() == pytest.approx(0.551445, abs=1e-6)
    assert nt_xent(z, z, temperature=0.5).item() == pytest.approx(math.log(1 + 2 * math.exp(-2)), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_info_nce_is_its_equation(temperature: float) -> None:
    q, k = draw(5, 6)
    assert info_nce(q, k, temperature=temperature).item() == pytest.approx(slow_info_nce(q, k, temperature), rel=1e-12)
    assert info_nce(q, k, temperature=temperature) != info_nce(k, q, temperature=temperature)


def test_info_nce_by_hand() -> None:
    """Queries e1, e2 and keys equal to them: log(1 + e^(-1/t)), at t = 1 log(1 + 1/e) = 0.313262."""
    z = torch.stack((E1, E2))
    assert info_nce(z, 2 * z, temperature=1.0).item() == pytest.approx(0.313262, abs=1e-6)


def test_one_image_gives_zero_not_nan() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(1, 4))
    loss = nt_xent(z1, z2, temperature=0.1)
    loss.backward()
    assert loss.item() == 0
    assert z1.grad.abs().max() < 1e-12
    assert info_nce(z1, z2, temperature=0.1).item() == 0
