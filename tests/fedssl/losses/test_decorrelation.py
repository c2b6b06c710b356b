"""Decorrelating losses against slow transcriptions of their equations and numbers computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.losses.decorrelation import barlow_twins, barlow_twins_unbiased, vicreg
from tests.fedssl.losses.vectors import draw


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


def test_barlow_twins_gradient_is_finite_for_constant_features() -> None:
    z1, z2 = (z.requires_grad_() for z in draw(4, 3))
    assert torch.autograd.gradcheck(lambda a, b: barlow_twins(a, b, lambd=0.1), (z1, z2))
    constant = torch.zeros(4, 3).requires_grad_()
    barlow_twins(constant, z2.detach().float(), lambd=0.1).backward()
    assert constant.grad.isfinite().all()


def test_a_constant_feature_counts_as_uncorrelated_in_the_unbiased_form() -> None:
    """Beside the other feature's (1 - 3/4)^2 it costs (1 - 0)^2; its gradient is finite."""
    z = torch.tensor([[1.0, 2], [1, 2], [-1, 2], [-1, 2]]).requires_grad_()
    loss = barlow_twins_unbiased(z, z, lambd=1)
    loss.backward()
    assert loss.item() == pytest.approx(1 + 1 / 16, rel=1e-5)
    assert z.grad.isfinite().all()


def slow_vicreg(z1: Tensor, z2: Tensor, sim_weight: float, var_weight: float, cov_weight: float) -> float:
    batch, dim = z1.shape
    invariance = sum(float(a - b) ** 2 for a, b in zip(z1.flatten(), z2.flatten(), strict=True)) / (batch * dim)
    hinge = covariance = 0.0
    for z in (z1, z2):
        means = [float(z[:, i].sum()) / batch for i in range(dim)]
        for i in range(dim):
            for j in range(dim):
                products = [(float(row[i]) - means[i]) * (float(row[j]) - means[j]) for row in z]
                c = sum(products) / (batch - 1)
                if i == j:
                    hinge += max(0, 1 - math.sqrt(c + 1e-4)) / dim / 2
                else:
                    covariance += c**2 / dim
    return sim_weight * invariance + var_weight * hinge + cov_weight * covariance


@pytest.mark.parametrize("weights", [(25, 25, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize(("batch", "dim"), [(2, 5), (6, 4), (5, 5), (4, 12)])
def test_vicreg_is_its_equation(batch: int, dim: int, weights: tuple[float, float, float]) -> None:
    z1, z2 = draw(batch, dim)
    sim, var, cov = weights
    loss = vicreg(z1, 0.5 * z2, sim_weight=sim, var_weight=var, cov_weight=cov)
    assert loss.item() == pytest.approx(slow_vicreg(z1, 0.5 * z2, *weights), rel=1e-10)


ONE_LARGE = torch.ones(64, dtype=torch.float64).index_fill(0, torch.tensor([5]), 1e4)


@pytest.mark.parametrize("dim", [16, 64])  # fewer features than images, and more
@pytest.mark.parametrize(
    ("scale", "mean"), [(1, 0), (1e4, 0), (1e-4, 0), (1, 1e4), (1e-2, 1e4), (1e-3 * ONE_LARGE, 0), (ONE_LARGE, 100)]
)
def test_covariances_are_accurate_in_float32_at_any_scale(dim: int, scale: float | Tensor, mean: float) -> None:
    """Large values with a small variance, and one feature whose variance has all digits of the sum of squares."""
    z1, z2 = ((mean + scale * z)[:, :dim].float() for z in draw(32, 64))
    single, exact = (z1.clone().requires_grad_(), z1.double().requires_grad_())
    loss = vicreg(single, z2, sim_weight=0, var_weight=0)
    expected = torch.zeros((), dtype=torch.float64)
    for z in (exact, z2.double()):
        covariance = torch.cov(z.T)
        expected = expected + (covariance.square().sum() - covariance.diagonal().square().sum()) / dim
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    loss.backward()
    expected.backward()
    assert (single.grad - exact.grad).norm() < 2e-6 * exact.grad.norm()


def test_vicreg_by_hand() -> None:
    """Two images (a, a) and (-a, -a), with opposite signs in the other view. Invariance: all differences are 2 a, so
    4 a^2. Each feature has the variance 2 a^2 (divisor n - 1 = 1); a^2 = 0.12495 makes its square root with 1e-4 added
    0.5, and the hinge 1 - 0.5. The covariance of the two features is 2 a^2 too, twice in the matrix: 2 (2 a^2)^2 / 2
    for each view. Sum: 25 * 0.4998 + 25 * 0.5 + 2 * 0.2499^2 = 25.119900."""
    z = math.sqrt(0.12495) * torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert vicreg(z, -z).item() == pytest.approx(12.495 + 12.5 + 2 * 0.2499**2, rel=1e-6)


@pytest.mark.parametrize(("batch", "dim"), [(3, 5), (5, 3), (3, 10)])
def test_vicreg_gradient_is_right_and_flows_into_both_views(batch: int, dim: int) -> None:
    z1, z2 = (z.requires_grad_() for z in draw(batch, dim))
    assert torch.autograd.gradcheck(lambda a, b: vicreg(a, b), (z1, z2))
