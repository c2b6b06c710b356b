"""SIGReg against a slow transcription of its statistic, its closed form, and distributions with known values."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedssl.errors import InputError
from fedssl.losses.gaussianity import epps_pulley, sigreg
from tests.fedssl.losses.vectors import draw


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_epps_pulley(x: list[float], num_points: int, t_max: float) -> float:
    """The trapezoid rule over [-t_max, t_max], without symmetry."""
    step = t_max / (num_points - 1)
    total = 0.0
    for k in range(1 - num_points, num_points):
        t = k * step
        real = sum(math.cos(t * value) for value in x) / len(x) - math.exp(-(t**2) / 2)
        imaginary = sum(math.sin(t * value) for value in x) / len(x)
        end = 0.5 if abs(k) == num_points - 1 else 1
        total += end * step * (real**2 + imaginary**2) * math.exp(-(t**2) / 2)
    return len(x) * total


def closed_form(x: list[float]) -> float:
    """The integral over all t: of cos(t d) exp(-t^2 / 2) it is sqrt(2 pi) exp(-d^2 / 2), and of cos(t x) exp(-t^2) it
    is sqrt(pi) exp(-x^2 / 4)."""
    n = len(x)
    pairs = sum(math.exp(-((a - b) ** 2) / 2) for a in x for b in x) / n
    singles = sum(math.exp(-(a**2) / 4) for a in x)
    return math.sqrt(2 * math.pi) * pairs - 2 * math.sqrt(math.pi) * singles + n * math.sqrt(2 * math.pi / 3)


@pytest.mark.parametrize(("num_points", "t_max"), [(17, 5.0), (17, 3.0), (2, 1.0), (30, 4.0)])
def test_epps_pulley_is_its_equation(num_points: int, t_max: float) -> None:
    (x,) = draw(6, 3, count=1)
    statistic = epps_pulley(2 * x + 1, num_points=num_points, t_max=t_max)
    slow = [slow_epps_pulley((2 * x + 1)[:, i].tolist(), num_points, t_max) for i in range(3)]
    assert statistic.tolist() == pytest.approx(slow, rel=1e-10)


@pytest.mark.parametrize("samples", [[0.0], [1.0, -1.0], [0.3, -2.0, 1.1, 0.4]])
def test_the_rule_is_close_to_the_integral(samples: list[float]) -> None:
    statistic = epps_pulley(torch.tensor(samples)[:, None])
    assert statistic.item() == pytest.approx(closed_form(samples), abs=2e-5)


def test_epps_pulley_by_hand() -> None:
    """One sample 0 has phi(t) = 1. At the points 0 and 1 the integrand (1 - exp(-t^2 / 2))^2 exp(-t^2 / 2) is 0 and
    (1 - 0.606531)^2 0.606531 = 0.093902. The trapezoid is half of it, and both sides of 0 the whole."""
    assert epps_pulley(torch.zeros(1, 1), num_points=2, t_max=1).item() == pytest.approx(0.093902, abs=1e-6)


@pytest.mark.parametrize("num_points", [9, 40])  # 40 restarts the recurrence twice
def test_epps_pulley_gradient_is_right(num_points: int) -> None:
    (x,) = draw(2, 3, 2, count=1)
    assert torch.autograd.gradcheck(lambda y: epps_pulley(y, num_points=num_points, t_max=4), x.requires_grad_())


@pytest.mark.parametrize("num_points", [17, 18, 33, 1024])
@pytest.mark.parametrize("scale", [0.01, 1, 10])
def test_float32_is_accurate_with_many_points(num_points: int, scale: float) -> None:
    """A recurrence over all 1,023 points errs by 1.5%, because its errors grow with the square of their number."""
    x = scale * draw(64, 8, count=1)[0]
    exact, single = x.clone().requires_grad_(), x.float().requires_grad_()
    t = torch.linspace(0, 5, num_points, dtype=torch.float64)[:, None]
    y = t[:, :, None] * exact
    real, imaginary = y.cos().mean(dim=1) - torch.exp(-t.square() / 2), y.sin().mean(dim=1)
    integrand = (real.square() + imaginary.square()) * torch.exp(-t.square() / 2)
    expected = 2 * 64 * torch.trapezoid(integrand, t[:, 0], dim=0)
    statistic = epps_pulley(single, num_points=num_points)
    torch.testing.assert_close(statistic.double(), expected, rtol=5e-5, atol=0)
    expected.sum().backward()
    statistic.sum().backward()
    assert (single.grad - exact.grad).norm() < 2e-5 * exact.grad.norm()


def test_autograd_saves_little_more_than_the_samples() -> None:
    """The cosine and the sine of the first point; with those of all 16 points it would be 32 times the samples."""
    x = draw(64, 20)[0].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        epps_pulley(x)
    assert x.numel() < sum(saved) < 3 * x.numel()


def test_sigreg_is_the_mean_statistic_along_its_directions() -> None:
    (z,) = draw(2, 6, 5, count=1)
    directions = F.normalize(torch.randn(5, 4, generator=generator()), dim=0).double()
    assert directions.norm(dim=0).tolist() == pytest.approx([1] * 4, rel=1e-6)
    slow = [slow_epps_pulley((view @ line).tolist(), 17, 5) for view in z for line in directions.T]
    loss = sigreg(z, slices=4, generator=generator())
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(sum(slow) / len(slow), rel=1e-10)
    each = [sigreg(view, slices=4, generator=generator()) for view in z]
    torch.testing.assert_close(torch.stack(each).mean(), loss)


def test_a_rule_of_one_point_is_rejected() -> None:
    with pytest.raises(InputError, match="num_points=1 but the trapezoid rule needs both ends; pass at least 2"):
        sigreg(torch.zeros(2, 3), slices=1, generator=generator(), num_points=1)
