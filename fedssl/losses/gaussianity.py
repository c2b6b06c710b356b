"""SIGReg (LeJEPA, Balestriero and LeCun, arXiv 2511.08544): keep projections close to an isotropic Gaussian.

A distribution is an isotropic Gaussian if each of its projections onto a line is a standard normal distribution. The
Epps-Pulley statistic tests this on random lines by the empirical characteristic function.

The authors' Algorithm 1 has 17 points in [-5, 5]. Here they are in [0, 5], because the integrand is even: the integral
is the same with half the distance of points. The authors' library integrates over [0, 3].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedssl.errors import InputError
from fedssl.losses.precision import at_least_float32, product
from fedssl.machine.devices import to_device

_RESTART = 16  # the recurrence of the default of 17 points never starts anew


def sigreg(z: Tensor, *, slices: int, generator: torch.Generator, num_points: int = 17, t_max: float = 5.0) -> Tensor:
    """Return the mean Epps-Pulley statistic of projections along random directions.

    It is a scalar >= 0. Its expectation is 1.06 for standard normal z; it is ``0.41 * batch`` if all z are 0.

    Parameters
    ----------
    z : Tensor
        Projections, ``(batch, dim)``, or ``(views, batch, dim)`` for the mean over views. The gradient flows into all.
    slices : int
        Number of directions, which all views share.
    generator : torch.Generator
        Generator of the directions, on the CPU.
    num_points, t_max
        As in `epps_pulley`, also what it raises.
    """
    z = at_least_float32(z)
    directions = F.normalize(torch.randn(z.shape[-1], slices, generator=generator), dim=0)
    directions = to_device(directions, z.device).to(z.dtype)
    return epps_pulley(product(z, directions), num_points=num_points, t_max=t_max).mean()


def epps_pulley(x: Tensor, *, num_points: int = 17, t_max: float = 5.0) -> Tensor:
    """Return the Epps-Pulley statistic of samples, which tests for a standard normal distribution.

    With phi(t) the mean of ``exp(i t x)`` over the n samples, it is n times the integral over t of ``|phi(t) -
    exp(-t^2 / 2)|^2 exp(-t^2 / 2)``, by the trapezoid rule on [0, t_max], doubled because the integrand is even.

    ``x`` are samples ``(..., n, slices)``, at least float32; the result is one number >= 0 for each slice, ``(...,
    slices)``. ``num_points`` is that of equidistant points of [0, t_max]; raise `InputError` below 2. ``t_max`` is
    positive; the weight ``exp(-t^2 / 2)`` is 4e-6 at 5.
    """
    if num_points < 2:
        raise InputError(f"num_points={num_points} but the trapezoid rule needs both ends; pass at least 2")
    statistic: Tensor = _EppsPulley.apply(x, num_points, t_max)
    return statistic


class _EppsPulley(torch.autograd.Function):
    """Statistic with few operations and two saved tensors of the size of x, three for more than `_RESTART` points.

    Points are t_k = k h. ``cos(k h x)`` and ``sin(k h x)`` follow from those of k = 1 by ``f_{k+1} = 2 cos(h x) f_k -
    f_{k-1}``. Autograd would save both for each point. The point t = 0 contributes nothing. Rounding errors grow with
    the square of k, so that the recurrence starts anew after `_RESTART` points.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_points: int, t_max: float) -> Tensor:
        step = t_max / (num_points - 1)
        t = step * torch.arange(1, num_points, device=x.device, dtype=x.dtype)
        t = t.view(-1, *(1,) * (x.dim() - 1))
        normal = torch.exp(-t.square() / 2)
        weight = 2 * step * normal
        weight[-1] /= 2  # trapezoid rule
        y = step * x
        cos, sin = y.cos(), y.sin()
        real, imaginary = _means_of_multiples(y, cos, sin, count=num_points - 1)
        real -= normal
        ctx.save_for_backward(cos, sin, real, imaginary, 2 * weight * t, *([y] if num_points - 1 > _RESTART else []))
        return x.shape[-2] * (weight * (real.square() + imaginary.square())).sum(dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin, real, imaginary, weight, *y = ctx.saved_tensors
        # The derivative by x is the sum over k of 2 weight_k t_k (imaginary_k cos(t_k x) - real_k sin(t_k x)).
        weight = weight * grad
        of_cos, of_sin = (weight * imaginary).unsqueeze(-2), (-weight * real).unsqueeze(-2)
        return _series(*y, cos=cos, sin=sin, of_cos=of_cos, of_sin=of_sin), None, None


def _means_of_multiples(y: Tensor, cos: Tensor, sin: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return means of ``cos(k y)`` and ``sin(k y)`` over the samples for k = 1 to count, ``(count, ..., slices)``."""
    twice_cos, means = 2 * cos, []
    for function, before, now in ((torch.cos, torch.ones_like(cos), cos), (torch.sin, torch.zeros_like(sin), sin)):
        now, values = now.clone(), []
        for k in range(1, count + 1):
            if k % _RESTART == 1 and k > 1:
                before, now = function((k - 1) * y), function(k * y)
            values.append(now.mean(dim=-2))
            before, now = now, before.neg_().addcmul_(twice_cos, now)
        means.append(torch.stack(values))
    return means[0], means[1]


def _series(*y: Tensor, cos: Tensor, sin: Tensor, of_cos: Tensor, of_sin: Tensor) -> Tensor:
    """Return ``sum_k of_cos_k cos(k y) + of_sin_k sin(k y)`` from k = 1 on; ``y`` is for more than `_RESTART` terms."""
    twice_cos, total = 2 * cos, torch.zeros_like(cos)
    for number, factors in enumerate(zip(of_cos.split(_RESTART), of_sin.split(_RESTART), strict=True)):
        (a, b), (c, d) = (_clenshaw(twice_cos, part) for part in factors)
        if not number:
            total = cos * a - b + sin * c
            continue
        angle = number * _RESTART * y[0]
        # cos(k y + angle) = cos(k y) cos(angle) - sin(k y) sin(angle), and so on
        total += angle.cos() * (cos * a - b + sin * c) + angle.sin() * (cos * c - d - sin * a)
    return total


def _clenshaw(twice_cos: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return b_1 and b_2 of Clenshaw's recurrence: of cos(k y) the sum is cos(y) b_1 - b_2, of sin(k y) sin(y) b_1."""
    now, after = torch.zeros_like(twice_cos), torch.zeros_like(twice_cos)
    for factor in factors.flip(0):
        now, after = torch.sub(factor, after, out=after).addcmul_(twice_cos, now), now
    return now, after
