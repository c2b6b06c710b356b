"""The flexible uniform regulariser of FedU2 (Liao et al., CVPR 2024): representations spread out over the sphere.

Eq. 2 adds the divergence of either view's representations from random points of the sphere to the local loss. The
divergence is unbalanced optimal transport (Eqs. 4-6), which leaves unmatched what is too far from everything.

Two readings are ours. The paper gives no masses a and b; they are 1 here. Its cost ||z - s||^2 is about 2 for
vectors of 512 numbers, above tau_a + tau_b = 1.6, from where on nothing is transported: the loss would be constant and
its gradient 0. The cost here is ``cost_scale`` = 0.5 times that.

The authors' code does not compute Eq. 4 but a sliced distance in tangent spaces: ``variant: tangent_swd``.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.machine.devices import to_device
from fedssl.machine.threads import one_thread
from fedssl.regularizers.base import Regularizer, Step

FIRST_LOOK = 10  # iteration of the solver before which it first looks how far it is
PER_FACTOR_E = 11  # iterations in which the distance from the optimum falls to 1/e, about
SHORTEST = 1e-6  # step that an entry of the coupling must be able to make to count as free to move
LONGEST = 100  # step, in units of the exact one for a single entry
TANGENT_SPACES = 6  # of the authors' code, and lines in each
LINES = 6


def uot_uniformity(
    z: Tensor,
    *,
    samples: Tensor,
    cost_scale: float = 0.5,
    tau_a: float = 0.8,
    tau_b: float = 0.8,
    max_iter: int = 60,
    tolerance: float = 1e-3,
) -> Tensor:
    """Unbalanced optimal transport between representations and random points of the sphere (Eq. 4).

    Over couplings pi >= 0 the smallest ``sum_ij C_ij pi_ij + tau_a/2 sum_i (sum_j pi_ij - 1)^2 + tau_b/2 sum_j (sum_i
    pi_ij - 1)^2`` with ``C_ij = cost_scale ||z_i - s_j||^2``. By the envelope theorem its derivative is that at the
    fixed best pi: the gradient flows through C only.

    Parameters
    ----------
    z : Tensor
        Representations, ``(batch, dim)``, or several batches, ``(..., batch, dim)``; normalised here.
    samples : Tensor
        Points of the sphere s, ``(..., samples, dim)``, each of length 1.
    cost_scale : float
        Positive. 1 is the paper's cost.
    tau_a, tau_b : float
        Positive: what it costs to leave a representation, or a sample, unmatched.
    max_iter : int
        Most iterations of the solver; for 128 pictures 60 come to less than a thousandth above the smallest value.
    tolerance : float
        Iterate until the value is proven to be within this fraction of the smallest. 0 takes all iterations, and never
        waits for the device to see how far it is.

    Returns
    -------
    Tensor
        One number >= 0 for each batch, ``(...)``; ``(tau_a * batch + tau_b * samples) / 2`` if nothing is worth
        transporting.
    """
    z = F.normalize(_full(z), dim=-1)
    with torch.autocast(z.device.type, enabled=False):
        cost = cost_scale * (2 - 2 * z @ samples.to(z.dtype).mT)
    pi = coupling(cost.detach(), tau_a=tau_a, tau_b=tau_b, max_iter=max_iter, tolerance=tolerance).clone()
    penalties = _penalties(_unmatched(pi, dim=-1), _unmatched(pi, dim=-2), tau_a, tau_b)
    return (cost * pi).sum(dim=(-2, -1)) + penalties[..., 0, 0]  # Eq. 4


@torch.inference_mode()  # cheaper than no_grad, which counts in so many small operations
def coupling(cost: Tensor, *, tau_a: float, tau_b: float, max_iter: int, tolerance: float) -> Tensor:
    """The coupling pi >= 0 that minimises Eq. 4 for a cost ``(..., rows, columns)``; arguments as in `uot_uniformity`.

    Eq. 6 takes the exact step of the problem without bounds and cuts it off at 0, which need not lower the value. Here
    the gradient counts, as usual with bounds, only where pi is free to move; directions are conjugate, which
    needs fewer iterations; and the cut step is shortened to where the value along it is smallest. So no iteration
    raises the value.

    Autograd can make use of a clone of what is returned.
    """
    rows, columns = cost.shape[-2:]
    tiny = torch.finfo(cost.dtype).tiny
    # Start from the best constant coupling: Eq. 4 is then a parabola in one number.
    mean = cost.mean(dim=(-2, -1), keepdim=True)
    pi = torch.ones_like(cost) * ((tau_a + tau_b - mean) / (tau_a * columns + tau_b * rows)).clamp(min=0)
    gradient = cost - tau_a * _unmatched(pi, dim=-1) - tau_b * _unmatched(pi, dim=-2)  # Q vec(pi) + w
    reach = pi.div_(SHORTEST)  # from here on pi is kept as this
    # Q of Eq. 5 is of size (rows * columns)^2, but row i of Phi_r vec(pi) is the sum of row i of pi, and Phi_r^T puts a
    # number back into all of row i. So Q vec(d) is, at (i, j), tau_a * (sum of row i of d) + tau_b * (sum of column j),
    # and vec(d)^T Q vec(d) is tau_a |row sums of d|^2 + tau_b |column sums of d|^2.
    tau = SHORTEST * torch.cat((cost.new_full((rows,), tau_a), cost.new_full((columns,), tau_b)))
    direction, last_square = torch.zeros_like(cost), torch.ones_like(mean)
    # Memory for what comes again and again: new memory would push the rest out of the cache.
    descent, cut = torch.empty_like(cost), torch.empty_like(cost)
    sums = cost.new_empty((*mean.shape[:-1], rows + columns))
    of_rows, of_columns = sums[..., 0, :rows], sums[..., 0, rows:]
    matched = torch.empty_like(sums)
    matched_rows, matched_columns = matched[..., :rows].mT, matched[..., rows:]
    longest = LONGEST / (tau_a + tau_b) / SHORTEST
    look = FIRST_LOOK if tolerance else max_iter
    for iteration in range(max_iter):
        if iteration == look:
            gap, value = _gap(cost, reach * SHORTEST, tau_a=tau_a, tau_b=tau_b)
            excess = min((gap / (tolerance * value).clamp_(min=tiny)).max().item(), 1e9)
            if not excess > 1:
                break
            look = iteration + max(2, math.ceil(PER_FACTOR_E * math.log(excess)))
        torch.minimum(gradient, reach, out=descent)
        square = _inner(descent, descent, memory=cut)
        beta = (square / last_square).clamp_(max=10)  # Fletcher and Reeves
        torch.minimum(direction.mul_(beta), reach, out=direction).add_(descent)
        _sums(direction, of_rows, of_columns)
        curvature = torch.mul(tau, sums, out=matched).mul_(sums).sum(dim=-1, keepdim=True).clamp_(min=tiny)
        # Where the value is nearly linear along the direction the exact step is too long to be of use.
        step = (_inner(direction, descent, memory=cut) / curvature).clamp_(max=longest)  # Eq. 6
        torch.minimum(torch.mul(direction, step, out=cut), reach, out=cut)
        _sums(cut, of_rows, of_columns)
        curvature = (torch.mul(tau, sums, out=matched) * sums).sum(dim=-1, keepdim=True).clamp_(min=tiny)
        share = (_inner(gradient, cut, memory=descent) / curvature).clamp_(0, 1)
        reach.addcmul_(cut, share, value=-1)
        matched.mul_(share)
        gradient.sub_(matched_rows).sub_(matched_columns)
        last_square = square.clamp_(min=tiny)
    return reach.mul_(SHORTEST)


def tangent_swd(z: Tensor, *, samples: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """The regulariser of FedU2's code: sliced distances in tangent spaces of the sphere.

    With ``log_b`` the logarithm of the sphere at base b, the sum over the bases of the mean over k and projections p of
    ``(sort(log_b(z) p)_k - sort(log_b(s) p)_k)^2``, divided by 6. Unlike in the code z is normalised whatever the
    method; there it is for SimCLR only.

    Parameters
    ----------
    z : Tensor
        Representations, ``(batch, dim)``; normalised here.
    samples : Tensor
        Points of the sphere, ``(batch, dim)``, each of length 1.
    bases : Tensor
        Where the tangent spaces touch, ``(bases, dim)``, each of length 1. The code takes as many as there are pictures
        but divides by the 6 that were meant.
    projections : Tensor
        Lines onto which each tangent space is projected, ``(bases, dim, lines)``, standard normal.

    Returns
    -------
    Tensor
        Scalar >= 0.
    """
    z = F.normalize(_full(z), dim=1)
    with torch.autocast(z.device.type, enabled=False):
        difference = _shadows(z, bases, projections) - _shadows(samples.to(z.dtype), bases, projections)
    return difference.square().mean(dim=(1, 2)).sum() / TANGENT_SPACES


class FUR(Regularizer):
    """Spreads the representations of either view over the sphere (Eq. 2).

    Parameters
    ----------
    weight : float
        lambda_U; 0 turns it off.
    variant : {"uot", "tangent_swd"}
        "uot": Eq. 4. "tangent_swd": the authors' code, which has ``weight=0.01``; the other parameters mean nothing.
    cost_scale, tau_a, tau_b, max_iter, tolerance
        As in `uot_uniformity`.

    Raises
    ------
    InputError
        If a number is out of range or ``variant`` is another word.
    """

    def __init__(
        self,
        *,
        weight: float = 0.1,
        variant: str = "uot",
        cost_scale: float = 0.5,
        tau_a: float = 0.8,
        tau_b: float = 0.8,
        max_iter: int = 60,
        tolerance: float = 1e-3,
    ) -> None:
        if weight < 0:
            raise InputError(f"regularizer.weight={weight} must not be negative; FedU2 uses 0.1, 0 turns it off")
        if variant not in ("uot", "tangent_swd"):
            raise InputError(
                f"regularizer.variant={variant} is unknown; "
                "set regularizer.variant=uot or regularizer.variant=tangent_swd"
            )
        for name, number in (("cost_scale", cost_scale), ("tau_a", tau_a), ("tau_b", tau_b), ("max_iter", max_iter)):
            if number <= 0:
                raise InputError(f"regularizer.{name}={number} must be positive; see conf/regularizer/fur.yaml")
        if tolerance < 0:
            raise InputError(f"regularizer.tolerance={tolerance} must not be negative; 0 takes all iterations")
        self.on = "encoder" if weight else None
        self.weight = weight
        self.variant = variant
        self.transport = partial(
            uot_uniformity, cost_scale=cost_scale, tau_a=tau_a, tau_b=tau_b, max_iter=max_iter, tolerance=tolerance
        )

    def add_to(self, loss: Tensor, step: Step) -> Tensor:
        if step.z1 is None or step.z2 is None:
            return loss
        views = torch.stack((step.z1, step.z2))
        samples = _sphere(views, step.generator)
        if self.variant == "uot":
            with one_thread():  # many small operations, after each of which two would wait for each other
                terms = self.transport(views, samples=samples)
        else:
            bases = _sphere(views, step.generator)
            lines = to_device(torch.randn(*views.shape, LINES, generator=step.generator), views.device)
            spaces = zip(views, samples, bases, lines, strict=True)
            terms = torch.stack([tangent_swd(z, samples=s, bases=b, projections=p) for z, s, b, p in spaces])
        return loss + self.weight * terms.sum()  # Eq. 2


def _sphere(z: Tensor, generator: torch.Generator) -> Tensor:
    """Random points of the sphere, as many and of as many numbers as there are vectors in z, float32."""
    return F.normalize(to_device(torch.randn(z.shape, generator=generator), z.device), dim=-1)


def _shadows(x: Tensor, bases: Tensor, projections: Tensor) -> Tensor:
    """Sorted projections of points x of the sphere in the tangent space of every base, ``(bases, lines, points)``."""
    cosine = (bases @ x.T).clamp(-1 + 1e-6, 1 - 1e-6)[:, None]  # at the ends the angle has no derivative
    angle = torch.arccos(cosine)
    along = torch.einsum("bd,bdl->bl", bases, projections)[:, :, None]
    # log_b(x) = angle / sin(angle) * (x - cos(angle) b)
    tangent = angle / (1 - cosine.square()).sqrt() * (torch.einsum("nd,bdl->bln", x, projections) - cosine * along)
    return tangent.sort(dim=2).values


def _gap(cost: Tensor, pi: Tensor, *, tau_a: float, tau_b: float) -> tuple[Tensor, Tensor]:
    """What Eq. 4 could still fall by at most, and its value, each ``(..., 1, 1)``.

    It cannot fall below any value of its dual, ``sum_i (u_i - u_i^2 / (2 tau_a)) + sum_j (v_j - v_j^2 / (2 tau_b))``
    with ``u_i + v_j <= C_ij``. At the optimum u and v are tau times the unmatched masses. From there u moves by half
    of its slack, or of what it is too large by; for that u the best v is known, and for that v the best u.
    """
    unmatched_a, unmatched_b = _unmatched(pi, dim=-1), _unmatched(pi, dim=-2)
    value = (cost * pi).sum(dim=(-2, -1), keepdim=True) + _penalties(unmatched_a, unmatched_b, tau_a, tau_b)
    u = tau_a * unmatched_a
    u += (cost - u - tau_b * unmatched_b).amin(dim=-1, keepdim=True) / 2
    v = (cost - u).amin(dim=-2, keepdim=True).clamp_(max=tau_b)
    u = (cost - v).amin(dim=-1, keepdim=True).clamp_(max=tau_a)
    bound = u.sum(dim=-2, keepdim=True) + v.sum(dim=-1, keepdim=True) - _penalties(u / tau_a, v / tau_b, tau_a, tau_b)
    return value - bound, value


def _unmatched(pi: Tensor, *, dim: int) -> Tensor:
    """What of the masses 1 of the rows, ``(..., rows, 1)``, or columns, ``(..., 1, columns)``, pi leaves behind."""
    return 1 - pi.sum(dim=dim, keepdim=True)


def _penalties(unmatched_a: Tensor, unmatched_b: Tensor, tau_a: float, tau_b: float) -> Tensor:
    """The price of unmatched masses in Eq. 4, ``(..., 1, 1)``."""
    of_a, of_b = (unmatched.square().sum(dim=(-2, -1), keepdim=True) for unmatched in (unmatched_a, unmatched_b))
    return tau_a / 2 * of_a + tau_b / 2 * of_b


def _sums(matrix: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    """Sums of the rows and of the columns, into memory of theirs."""
    torch.sum(matrix, dim=-1, out=of_rows)
    torch.sum(matrix, dim=-2, out=of_columns)


def _inner(a: Tensor, b: Tensor, *, memory: Tensor) -> Tensor:
    """Inner product of matrices ``(..., 1, 1)``; ``memory``, of their shape, is overwritten.

    torch.dot would wait milliseconds for threads that others use too.
    """
    return torch.mul(a, b, out=memory).sum(dim=(-2, -1), keepdim=True)


def _full(z: Tensor) -> Tensor:
    """``z`` in float32, or as it is where it has more."""
    return z.to(torch.promote_types(z.dtype, torch.float32))
