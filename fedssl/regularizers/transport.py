"""Solver of the unbalanced optimal transport of FedU2 (Liao et al., CVPR 2024, Eqs. 4-6): the best coupling.

Over couplings pi >= 0 of rows and columns with masses 1, Eq. 4 is the smallest value of ``sum_ij C_ij pi_ij + tau_a/2
sum_i (sum_j pi_ij - 1)^2 + tau_b/2 sum_j (sum_i pi_ij - 1)^2``: a quadratic form with bounds.

Where this differs from the paper: Eq. 6 takes the exact step of the problem without bounds and cuts it off at 0, which
need not lower the value. Here the gradient counts, as usual with bounds, only where pi is free to move; directions are
conjugate, which needs fewer iterations; and the cut step is shortened to where the value along it is smallest. So no
iteration raises the value.
"""

import math

import torch
from torch import Tensor

FIRST_LOOK = 10  # iteration before which the solver first looks how far it is
PER_FACTOR_E = 11  # iterations in which the distance from the optimum falls to 1/e, about
SHORTEST = 1e-6  # step that an entry of the coupling must be able to make to count as free to move
LONGEST = 100  # step, in units of the exact one for a single entry


@torch.inference_mode()  # cheaper than no_grad, which counts in so many small operations
def coupling(cost: Tensor, *, tau_a: float, tau_b: float, max_iter: int, tolerance: float) -> Tensor:
    """Find the coupling pi >= 0 of the smallest value in Eq. 4.

    Parameters
    ----------
    cost : Tensor
        C, ``(..., rows, columns)``.
    tau_a, tau_b : float
        Positive: price of an unmatched row, and column.
    max_iter : int
        Most iterations.
    tolerance : float
        Iterate until the value is proven to be within this fraction of the smallest; 0 takes all iterations.

    Returns
    -------
    Tensor
        pi, ``(..., rows, columns)``; an inference tensor, of which autograd needs a clone.
    """
    tiny = torch.finfo(cost.dtype).tiny
    pi = _best_constant(cost, tau_a=tau_a, tau_b=tau_b)
    gradient = cost - tau_a * unmatched(pi, dim=-1) - tau_b * unmatched(pi, dim=-2)  # Q vec(pi) + w
    reach = pi.div_(SHORTEST)  # pi in units of the shortest step: as far as an entry can move down
    form = _Form(cost, tau_a=tau_a, tau_b=tau_b)
    longest = LONGEST / (tau_a + tau_b) / SHORTEST
    direction, last_square = torch.zeros_like(cost), cost.new_ones((*cost.shape[:-2], 1, 1))
    # Memory that every iteration uses again: new memory would push the rest out of the cache.
    descent, cut = torch.empty_like(cost), torch.empty_like(cost)
    look = FIRST_LOOK if tolerance else max_iter
    for iteration in range(max_iter):
        if iteration == look:
            excess = _excess(cost, reach * SHORTEST, tau_a=tau_a, tau_b=tau_b, tolerance=tolerance)
            if not excess > 1:
                break
            look = iteration + max(2, math.ceil(PER_FACTOR_E * math.log(excess)))
        torch.minimum(gradient, reach, out=descent)  # an entry that is 0 cannot fall
        square = _inner(descent, descent, memory=cut)
        beta = (square / last_square).clamp_(max=10)  # Fletcher and Reeves
        torch.minimum(direction.mul_(beta), reach, out=direction).add_(descent)
        # Where the value is nearly linear along the direction the exact step is too long to be of use.
        step = (_inner(direction, descent, memory=cut) / form.curvature(direction)).clamp_(max=longest)  # Eq. 6
        torch.minimum(torch.mul(direction, step, out=cut), reach, out=cut)
        share = (_inner(gradient, cut, memory=descent) / form.curvature(cut)).clamp_(0, 1)
        reach.addcmul_(cut, share, value=-1)
        form.subtract_last(gradient, share)
        last_square = square.clamp_(min=tiny)
    return reach.mul_(SHORTEST)


def unmatched(pi: Tensor, *, dim: int) -> Tensor:
    """Mass that ``pi`` leaves unmatched in each row ``(..., rows, 1)`` (``dim=-1``) or column (``dim=-2``)."""
    return 1 - pi.sum(dim=dim, keepdim=True)


def penalties(unmatched_a: Tensor, unmatched_b: Tensor, tau_a: float, tau_b: float) -> Tensor:
    """Price of the unmatched masses in Eq. 4, ``(..., 1, 1)``."""
    of_a, of_b = (masses.square().sum(dim=(-2, -1), keepdim=True) for masses in (unmatched_a, unmatched_b))
    return tau_a / 2 * of_a + tau_b / 2 * of_b


class _Form:
    """Q of Eq. 5, a matrix of size (rows * columns)^2, by the sums that it consists of.

    Row i of Phi_r vec(d) is the sum of row i of d, and Phi_r^T puts a number back into all of row i. So Q vec(d) is, at
    (i, j), tau_a * (sum of row i of d) + tau_b * (sum of column j), and vec(d)^T Q vec(d) is
    tau_a |row sums of d|^2 + tau_b |column sums of d|^2. Directions d are in units of the shortest step.
    """

    def __init__(self, cost: Tensor, *, tau_a: float, tau_b: float) -> None:
        rows, columns = cost.shape[-2:]
        self._tau = SHORTEST * torch.cat((cost.new_full((rows,), tau_a), cost.new_full((columns,), tau_b)))
        self._tiny = torch.finfo(cost.dtype).tiny
        self._sums = cost.new_empty((*cost.shape[:-2], 1, rows + columns))
        self._of_rows, self._of_columns = self._sums[..., 0, :rows], self._sums[..., 0, rows:]
        self._weighted = torch.empty_like(self._sums)
        self._weighted_rows, self._weighted_columns = self._weighted[..., :rows].mT, self._weighted[..., rows:]

    def curvature(self, d: Tensor) -> Tensor:
        """vec(d)^T Q vec(d) ``(..., 1, 1)``, kept above 0."""
        torch.sum(d, dim=-1, out=self._of_rows)
        torch.sum(d, dim=-2, out=self._of_columns)
        weighted = torch.mul(self._tau, self._sums, out=self._weighted)
        return (weighted * self._sums).sum(dim=-1, keepdim=True).clamp_(min=self._tiny)

    def subtract_last(self, gradient: Tensor, share: Tensor) -> None:
        """Subtract ``share`` times Q vec(d) from ``gradient``, with the last d of `curvature`."""
        self._weighted.mul_(share)
        gradient.sub_(self._weighted_rows).sub_(self._weighted_columns)


def _best_constant(cost: Tensor, *, tau_a: float, tau_b: float) -> Tensor:
    """Best coupling of equal entries: Eq. 4 is then a parabola in one number."""
    rows, columns = cost.shape[-2:]
    mean = cost.mean(dim=(-2, -1), keepdim=True)
    return torch.ones_like(cost) * ((tau_a + tau_b - mean) / (tau_a * columns + tau_b * rows)).clamp(min=0)


def _excess(cost: Tensor, pi: Tensor, *, tau_a: float, tau_b: float, tolerance: float) -> float:
    """How often the tolerated gap fits into the gap of the worst problem; waits for the device."""
    gap, value = _gap(cost, pi, tau_a=tau_a, tau_b=tau_b)
    tiny = torch.finfo(cost.dtype).tiny
    return min((gap / (tolerance * value).clamp_(min=tiny)).max().item(), 1e9)


def _gap(cost: Tensor, pi: Tensor, *, tau_a: float, tau_b: float) -> tuple[Tensor, Tensor]:
    """How far Eq. 4 can still fall at most, and its value, each ``(..., 1, 1)``.

    It cannot fall below any value of its dual, ``sum_i (u_i - u_i^2 / (2 tau_a)) + sum_j (v_j - v_j^2 / (2 tau_b))``
    with ``u_i + v_j <= C_ij``. At the optimum u and v are tau times the unmatched masses; before it these break some of
    the bounds and leave slack in others. Any u gives a value of the dual: the best v for it is known, and for that v
    the best u. How tight it is depends on how row i and its nearest column share their slack, the smallest
    ``C_ij - u_i - v_j`` (below 0: the excess). Half goes to u, so that v finds the other half. That is a choice, not a
    theorem: of the shares 0, 1/4, 1/2, 3/4 and 1 a half gave the tightest gap or one at most 7% wider on spread and
    collapsed batches of 48 to 128, 0 and 1 gaps up to half as wide again.
    """
    unmatched_a, unmatched_b = unmatched(pi, dim=-1), unmatched(pi, dim=-2)
    value = (cost * pi).sum(dim=(-2, -1), keepdim=True) + penalties(unmatched_a, unmatched_b, tau_a, tau_b)
    u = tau_a * unmatched_a
    u += (cost - u - tau_b * unmatched_b).amin(dim=-1, keepdim=True) / 2
    v = (cost - u).amin(dim=-2, keepdim=True).clamp_(max=tau_b)
    u = (cost - v).amin(dim=-1, keepdim=True).clamp_(max=tau_a)
    bound = u.sum(dim=-2, keepdim=True) + v.sum(dim=-1, keepdim=True) - penalties(u / tau_a, v / tau_b, tau_a, tau_b)
    return value - bound, value


def _inner(a: Tensor, b: Tensor, *, memory: Tensor) -> Tensor:
    """Inner product of matrices ``(..., 1, 1)``; ``memory``, of their shape, is overwritten.

    torch.dot would wait milliseconds for threads that others use too.
    """
    return torch.mul(a, b, out=memory).sum(dim=(-2, -1), keepdim=True)
