"""Solver of the unbalanced optimal transport problem of FedU2 (Liao et al., CVPR 2024, Eqs. 4-6).

Eq. 4 is the minimum, over couplings pi >= 0 of rows and columns with masses 1, of ``sum_ij C_ij pi_ij + tau_a/2 sum_i
(sum_j pi_ij - 1)^2 + tau_b/2 sum_j (sum_i pi_ij - 1)^2``. With dual prices ``u_i`` of rows and ``v_j`` of columns and
slacks ``s_ij = C_ij - u_i - v_j``, pi is optimal if and only if

    sum_j pi_ij = 1 - u_i / tau_a,    sum_i pi_ij = 1 - v_j / tau_b,    pi_ij >= 0,    s_ij >= 0,    pi_ij s_ij = 0.

Difference from the paper: Eq. 6 is projected gradient descent. It soon approximates the minimum but not the coupling,
from which training computes its gradient: for collapsed representations, very different couplings have almost equal
values. Here Mehrotra's predictor-corrector method (SIAM Journal on Optimization, 1992) solves the conditions above with
``pi_ij s_ij = mu`` by Newton steps while mu decreases to 0, which takes about 7 steps for spread and collapsed
representations alike. Each step solves a system of rows + columns equations, of which the rows are eliminated
analytically.
"""

import torch
from torch import Tensor

BOTH = (-2, -1)  # rows and columns
START_SLACK = 0.5  # in units of the spread of the cost
START_MASS = 2.0  # in units of the mass that would be transported if all rows were equal
STEP_FRACTION = 0.99  # fraction of the step at which the first entry becomes 0
MIN_SPREAD = 1e-5  # of the cost, in units of tau_a + tau_b
MIN_START = 0.1  # mass of a row
MIN_MASS = 1e-3  # lower bound of the mass of a row in relative errors
ROUNDING = 64.0  # lower bound of the slack of transported mass in units of rounding; 8 is too small


@torch.inference_mode()  # cheaper than no_grad, which matters for many small operations
def coupling(cost: Tensor, *, tau_a: float, tau_b: float, max_iter: int, tolerance: float) -> Tensor:
    """Compute the coupling pi >= 0 that minimizes Eq. 4 for the cost C, ``(..., rows, columns)``, float32 or float64.

    ``tau_a`` and ``tau_b`` are positive penalties of an unmatched row, and of an unmatched column. There are at most
    ``max_iter`` steps. ``tolerance`` is the relative error of pi (2-norm) at which to stop, estimated by the mean
    length of the predictor's last two changes of pi relative to pi. 0 runs all steps without synchronizing with the
    device.

    Return pi with the shape of C; an inference tensor, which autograd cannot use without a clone. An entry whose cost
    is at least ``tau_a + tau_b`` is exactly 0: prices never exceed tau_a and tau_b.
    """
    pi, slack, u, v = _start(cost, tau_a=tau_a, tau_b=tau_b)
    min_slack = ROUNDING * torch.finfo(cost.dtype).eps * (tau_a + tau_b)
    error = last_error = float("inf")
    for step in range(1, max_iter + 1):
        newton = _Newton(pi, slack, u, v, tau_a=tau_a, tau_b=tau_b)
        _, _, slack_change, new_pi = newton.solve(None)  # predictor: mu = 0
        if tolerance:
            last_error, error = error, _share(new_pi - pi, of=pi)
        if step == max_iter or (last_error + error) / 2 <= tolerance:
            break
        ratio = slack_change / slack
        mu = _next_mu(pi, slack, slack_change, new_pi, ratio, min_slack=min_slack)
        # The predictor ignores the product of both changes:
        # (new_pi - pi) * -slack_change = -slack * new_pi * (ratio - 1).
        du, dv, slack_change, new_pi = newton.solve(torch.addcmul(mu / slack, new_pi, ratio - 1))  # corrector
        new_pi -= pi
        of_pi, of_slack = _length((new_pi / pi).neg_()), _length(slack_change / slack)
        pi, slack = torch.addcmul(pi, of_pi, new_pi), torch.addcmul(slack, of_slack, slack_change, value=-1)
        u, v = torch.addcmul(u, of_slack, du), torch.addcmul(v, of_slack, dv)
    return new_pi.clamp_(min=0).masked_fill_(cost >= tau_a + tau_b, 0)


def unmatched(pi: Tensor, *, dim: int) -> Tensor:
    """Return the unmatched mass of ``pi`` in each row ``(..., rows, 1)`` (``dim=-1``) or column (``dim=-2``)."""
    return 1 - pi.sum(dim=dim, keepdim=True)


def penalties(unmatched_a: Tensor, unmatched_b: Tensor, tau_a: float, tau_b: float) -> Tensor:
    """Return the penalty of the unmatched masses in Eq. 4, ``(..., 1, 1)``."""
    of_a, of_b = (_sum(masses.square()) for masses in (unmatched_a, unmatched_b))
    return tau_a / 2 * of_a + tau_b / 2 * of_b


class _Newton:
    """Newton equations at one point for changes du and dv of the prices, which reduce each slack by ``du_i + dv_j``.

    ``pi_ij s_ij = mu`` then becomes ``pi_ij + dpi_ij = target_ij + W_ij (du_i + dv_j)`` with ``W = pi / s``, where
    target is 0 for mu = 0. Inserted into the sums over rows and columns, which must equal ``1 - u / tau_a`` and ``1 - v
    / tau_b``:

        (1 / tau_a + sum_j W_ij) du_i + sum_j W_ij dv_j = 1 - u_i / tau_a - sum_j target_ij

    and likewise for columns. Inserting du from the first into the second leaves one equation per column.
    """

    def __init__(self, pi: Tensor, slack: Tensor, u: Tensor, v: Tensor, *, tau_a: float, tau_b: float) -> None:
        self.weights = pi / slack
        self.of_rows, self.of_columns = torch.rsub(u, 1, alpha=1 / tau_a), torch.rsub(v, 1, alpha=1 / tau_b)
        self.minus_diagonal = torch.rsub(self.weights.sum(dim=-1, keepdim=True), -1 / tau_a)
        self.minus_eliminated = (self.weights / self.minus_diagonal).mT
        matrix = self.minus_eliminated @ self.weights
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.weights.sum(dim=-2).add_(1 / tau_b))
        self.factors = torch.linalg.lu_factor_ex(matrix)[:2]  # on a CPU twice as fast as Cholesky

    def solve(self, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return du ``(..., rows, 1)``, dv ``(..., 1, columns)``, slack_change, and pi + dpi; target None means 0."""
        rows, columns = self.of_rows, self.of_columns
        if target is not None:
            rows, columns = rows - target.sum(dim=-1, keepdim=True), columns - target.sum(dim=-2, keepdim=True)
        dv = torch.linalg.lu_solve(*self.factors, columns.mT + self.minus_eliminated @ rows)
        du = (self.weights @ dv - rows).div_(self.minus_diagonal)
        slack_change = du + dv.mT
        return (
            du,
            dv.mT,
            slack_change,
            self.weights * slack_change if target is None else target + self.weights * slack_change,
        )


def _start(cost: Tensor, *, tau_a: float, tau_b: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return initial pi, slack, u and v, with all slacks above 0.

    If all rows equaled their mean c, they would share one price u, v_j = min(c_j - u, tau_b), and the masses of all
    rows and of all columns would agree: ``rows (1 - u / tau_a) = sum_j max(0, 1 - (c_j - u) / tau_b)``. The left side
    minus the sum over the k cheapest columns is linear and decreasing in u, and smallest for the k columns with
    positive terms; so u is the smallest of the zeros for k = 0, 1, ..., columns. Prices are then lowered in two halves
    until no slack is negative, and slightly further.
    """
    rows, columns = cost.shape[-2:]
    mean = cost.mean(dim=-2, keepdim=True)
    k = torch.arange(1, columns + 1, device=cost.device, dtype=cost.dtype)
    zeros = (rows - k + mean.sort(dim=-1).values.cumsum(dim=-1) / tau_b) / (rows / tau_a + k / tau_b)
    u = zeros.amin(dim=-1, keepdim=True).clamp_(max=tau_a)
    v = (mean - u).clamp_(max=tau_b)
    mass = (1 - v / tau_b).sum(dim=-1, keepdim=True).clamp_(min=MIN_START * min(rows, columns))
    apart = cost - mean
    spread = (apart - apart.mean(dim=-1, keepdim=True)).square().mean(dim=BOTH, keepdim=True).sqrt()
    spread.clamp_(min=MIN_SPREAD * (tau_a + tau_b))
    u = u + (cost - u - v).amin(dim=-1, keepdim=True).clamp_(max=0) / 2
    v = v + (cost - u - v).amin(dim=-2, keepdim=True).clamp_(max=0)
    u = u - START_SLACK * spread
    slack = cost - u - v
    pi = slack.reciprocal()
    pi *= START_MASS * mass / _sum(pi)
    return pi, slack, u, v


def _share(change: Tensor, *, of: Tensor) -> float:
    """Return the largest relative length of a change over all problems; synchronizes with the device."""
    min_total = MIN_MASS * min(of.shape[-2:]) ** 0.5
    by_how_much, from_what = (torch.linalg.vector_norm(x, dim=BOTH) for x in (change, of))
    return float((by_how_much / from_what.clamp_(min=min_total)).max())


def _length(loss: Tensor) -> Tensor:
    """Return the largest step, at most 1, for which each entry loses at most the fraction STEP_FRACTION.

    ``loss`` is the fraction that each entry loses in a full step.
    """
    return STEP_FRACTION / loss.amax(dim=BOTH, keepdim=True).clamp_(min=STEP_FRACTION)


def _next_mu(
    pi: Tensor, slack: Tensor, slack_change: Tensor, new_pi: Tensor, ratio: Tensor, *, min_slack: float
) -> Tensor:
    """Return the next mu: the current one times the cube of the reduction that the predictor's step achieves.

    The step is cut where the first entry becomes 0. pi changes by the fraction ``ratio - 1``, slack by ``-ratio``. The
    mean slack of transported mass stays above ``min_slack``, the smallest value distinguishable from 0 in this
    precision.
    """
    of_pi = 1 / (1 - ratio.amin(dim=BOTH, keepdim=True)).clamp_(min=1)
    of_slack = 1 / ratio.amax(dim=BOTH, keepdim=True).clamp_(min=1)
    now, mixed, both = (_sum(product) for product in (pi * slack, new_pi * slack, new_pi * slack_change))
    # The sum of (pi + of_pi (new_pi - pi)) (slack - of_slack slack_change), where pi slack_change = new_pi slack.
    after = torch.lerp(
        torch.addcmul(now, of_slack, mixed, value=-1), torch.addcmul(mixed, of_slack, both, value=-1), of_pi
    )
    rows, columns = pi.shape[-2:]
    mass = _sum(pi).clamp_(min=MIN_MASS * min(rows, columns))
    return torch.maximum((after / now) ** 3 * now, min_slack * mass) / (rows * columns)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=BOTH, keepdim=True)
