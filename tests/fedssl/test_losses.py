"""Losses against slow transcriptions of their equations, numbers computed by hand, and where gradients flow."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.losses import (
    barlow_twins,
    barlow_twins_unbiased,
    byol,
    info_nce,
    negative_cosine,
    nt_xent,
    nt_xent_one_sided,
)

E1, E2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def draw(*shape: int, seed: int = 0, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def slow_nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> float:
    z, n = [*z1, *z2], len(z1)
    losses = []
    for i in range(2 * n):
        other = i + n if i < n else i - n
        denominator = sum(math.exp(cosine(z[i], z[k]) / temperature) for k in range(2 * n) if k != i)
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


def slow_barlow_twins(z1: Tensor, z2: Tensor, lambd: float, *, fewer: int = 0, more: float = 1e-5) -> float:
    batch, dim = z1.shape

    def column(z: Tensor, i: int) -> list[float]:
        mean = float(z[:, i].sum()) / batch
        variance = sum((float(value) - mean) ** 2 for value in z[:, i]) / (batch - fewer)
        return [(float(value) - mean) / math.sqrt(variance + more) for value in z[:, i]]

    loss = 0.0
    for i in range(dim):
        for j in range(dim):
            c = sum(a * b for a, b in zip(column(z1, i), column(z2, j), strict=True)) / batch
            loss += (1 - c) ** 2 if i == j else lambd * c**2
    return loss


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


def test_nt_xent_of_swapped_views_by_hand() -> None:
    """The second views belong to the wrong images: cosine 0 with the positive, and 0 and 1 with the other two, so the
    loss is -log(1 / (1 + 1 + e)) = log(2 + e) = 1.551445 at t = 1 (1 more than with the right ones)."""
    z = torch.stack((E1, E2))
    assert nt_xent(z, z.flip(0), temperature=1.0).item() == pytest.approx(1.551445, abs=1e-6)


def test_nt_xent_of_all_equal_vectors_is_the_logarithm_of_the_others() -> None:
    """Of 2 * 8 - 1 = 15 equal candidates one is right; with the self-similarity left in it would be log 16."""
    z = torch.ones(8, 3)
    assert nt_xent(z, z, temperature=0.07).item() == pytest.approx(math.log(15), rel=1e-6)


def test_one_sided_nt_xent_has_one_direction_and_other_candidates() -> None:
    z1, z2 = draw(5, 7)
    loss = nt_xent_one_sided(z1, z2, temperature=0.5).item()
    assert loss != pytest.approx(nt_xent_one_sided(z2, z1, temperature=0.5).item(), rel=1e-6)
    assert loss != pytest.approx(nt_xent(z1, z2, temperature=0.5).item(), rel=1e-3)


def test_one_sided_nt_xent_by_hand() -> None:
    """Two images whose views agree, e1 and e2. An anchor has cosine 1 with itself and its other view and 0 with both
    views of the other image: -log(e^(1/t) / (2 e^(1/t) + 2)) = log 2 + log(1 + e^(-1/t)); with t = 1: 1.006409.
    Of eight equal images all 16 candidates are alike, the anchor too: log 16."""
    z = torch.stack((E1, E2))
    assert nt_xent_one_sided(z, 3 * z, temperature=1.0).item() == pytest.approx(1.006409, abs=1e-6)
    assert nt_xent_one_sided(torch.ones(8, 3), torch.ones(8, 3), temperature=0.07).item() == pytest.approx(math.log(16))


def test_one_sided_nt_xent_gradient_is_right_and_flows_into_both_views() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(3, 4))
    assert torch.autograd.gradcheck(lambda a, b: nt_xent_one_sided(a, b, temperature=0.5), (z1, z2))


@pytest.mark.parametrize("lambd", [0, 0.005, 1])
@pytest.mark.parametrize("batch", [2, 6])
def test_unbiased_barlow_twins_is_its_equation(batch: int, lambd: float) -> None:
    z1, z2 = draw(batch, 4)
    loss = barlow_twins_unbiased(z1, z2, lambd=lambd)
    assert loss.item() == pytest.approx(slow_barlow_twins(z1, z2, lambd, fewer=1, more=0), rel=1e-10)
    assert loss.item() != pytest.approx(barlow_twins(z1, z2, lambd=lambd).item(), rel=1e-3)


def test_unbiased_barlow_twins_by_hand() -> None:
    """Two equal views of n = 4 images, features (1, 1, -1, -1) and (1, -1, 1, -1): uncorrelated, of mean 0. Divided
    by their standard deviations sqrt(4 / 3) their squares sum to 3, so that C = diag(3/4): 2 (1 - 3/4)^2 = 1/8."""
    z = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    assert barlow_twins_unbiased(5 * z + 1, z, lambd=1).item() == pytest.approx(1 / 8, rel=1e-5)


def test_a_constant_feature_counts_as_uncorrelated_in_the_unbiased_form() -> None:
    """Beside the other feature's (1 - 3/4)^2 it costs (1 - 0)^2; its gradient is finite."""
    z = torch.tensor([[1.0, 2], [1, 2], [-1, 2], [-1, 2]]).requires_grad_()
    loss = barlow_twins_unbiased(z, z, lambd=1)
    loss.backward()
    assert loss.item() == pytest.approx(1 + 1 / 16, rel=1e-5)
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_nt_xent_does_not_depend_on_order_or_length_of_vectors() -> None:
    z1, z2 = draw(6, 4)
    loss = nt_xent(z1, z2, temperature=0.3)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(nt_xent(z1[order], z2[order], temperature=0.3), loss)
    torch.testing.assert_close(nt_xent(z2, z1, temperature=0.3), loss)
    torch.testing.assert_close(nt_xent(7 * z1, 0.1 * z2, temperature=0.3), loss)


def test_nt_xent_gradient_is_right_and_flows_into_both_views() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(3, 4))
    assert torch.autograd.gradcheck(lambda a, b: nt_xent(a, b, temperature=0.5), (z1, z2))


def test_one_image_gives_zero_not_nan() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(1, 4))
    loss = nt_xent(z1, z2, temperature=0.1)
    loss.backward()
    assert loss.item() == 0
    assert z1.grad is not None
    assert z1.grad.abs().max() < 1e-12
    assert info_nce(z1, z2, temperature=0.1).item() == 0
    assert barlow_twins(z1, z2, lambd=0.1).item() == pytest.approx(4)  # every correlation is 0, four diagonal ones


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_info_nce_is_its_equation(temperature: float) -> None:
    q, k = draw(5, 6)
    assert info_nce(q, k, temperature=temperature).item() == pytest.approx(slow_info_nce(q, k, temperature), rel=1e-12)
    assert info_nce(q, k, temperature=temperature) != info_nce(k, q, temperature=temperature)


def test_info_nce_by_hand() -> None:
    """Queries e1, e2 and keys equal to them: log(1 + e^(-1/t)), at t = 1 log(1 + 1/e) = 0.313262."""
    z = torch.stack((E1, E2))
    assert info_nce(z, 2 * z, temperature=1.0).item() == pytest.approx(0.313262, abs=1e-6)


def test_info_nce_gradient_is_right() -> None:
    q, k = (z.requires_grad_() for z in draw(3, 4))
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, temperature=0.5), (q, k))


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


@pytest.mark.parametrize("lambd", [0.0, 0.005, 1.0])
def test_barlow_twins_is_its_equation(lambd: float) -> None:
    z1, z2 = draw(6, 4)
    assert barlow_twins(z1, z2, lambd=lambd).item() == pytest.approx(slow_barlow_twins(z1, z2, lambd), rel=1e-10)


def test_barlow_twins_by_hand() -> None:
    """Features (1, -1, 1, -1) and (1, 1, -1, -1) have mean 0, variance 1 and no correlation: 0 with themselves. With
    the two features swapped in view 2 the diagonal is 0 and both others are 1: 2 + 2 lambd."""
    z = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1, -1]], dtype=torch.float64)
    assert barlow_twins(z, z, lambd=0.5).item() == pytest.approx(0, abs=1e-8)
    assert barlow_twins(z, 10 * z + 3, lambd=0.5).item() == pytest.approx(0, abs=1e-8)
    assert barlow_twins(z, z.flip(1), lambd=0.5).item() == pytest.approx(3, rel=1e-4)


def test_barlow_twins_gradient_is_right_and_finite_for_a_constant_feature() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(4, 3))
    assert torch.autograd.gradcheck(lambda a, b: barlow_twins(a, b, lambd=0.1), (z1, z2))
    constant = torch.zeros(4, 3).requires_grad_()
    barlow_twins(constant, z2.detach().float(), lambd=0.1).backward()
    assert constant.grad is not None
    assert constant.grad.isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: nt_xent(a, b, temperature=0.07),
        lambda a, b: info_nce(a, b, temperature=0.07),
        lambda a, b: barlow_twins(a, b, lambd=0.005),
        lambda a, b: byol(a, b, b, a),
    ],
    ids=["nt_xent", "info_nce", "barlow_twins", "byol"],
)
def test_autocast_does_not_lower_the_precision(loss) -> None:
    """Low-precision projections are widened first, and the products inside stay in float32."""
    z1, z2 = (z.to(torch.bfloat16) for z in draw(16, 32))
    expected = loss(z1.double(), z2.double()).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in ((z1, z2), (z1.float(), z2.float())):
            value = loss(a, b)
            assert value.dtype == torch.float32
            assert value.item() == pytest.approx(expected, rel=1e-5)
