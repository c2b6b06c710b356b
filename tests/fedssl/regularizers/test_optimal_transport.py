"""The transport of FUR: its value and coupling by hand, against other solvers, and against proofs of optimality."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import nnls
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedssl.regularizers.fur import uot_uniformity
from fedssl.regularizers.optimal_transport import coupling
from fedssl.seeding import torch_generator
from tests.fedssl.regularizers.points import random, sphere

EXACT = {"max_iter": 40, "tolerance": 0}  # in float64


def test_transport_of_one_point_by_hand():
    # z and s at 90 degrees: C = 0.5 * 2 = 1. For one number p, Eq. 4 is p + 0.4 (p - 1)^2 + 0.4 (p - 1)^2, smallest at
    # p = 1 - 1/1.6 = 0.375: 0.375 + 0.8 * 0.390625 = 0.6875. Opposite: C = 2 > 1.6, so p = 0 and the value is 0.8.
    s = torch.tensor([[0.0, 1.0]])
    assert uot_uniformity(torch.tensor([[3.0, 0.0]]), samples=s).item() == pytest.approx(0.6875)
    assert uot_uniformity(torch.tensor([[0.0, -2.0]]), samples=s).item() == pytest.approx(0.8)
    assert uot_uniformity(torch.tensor([[0.0, 5.0]]), samples=s).item() == pytest.approx(0, abs=1e-6)


def test_transport_of_two_points_by_hand():
    # z at 0 and 90 degrees, both samples at 0: C = ((0, 0), (1, 1)). By symmetry pi = ((x, x), (y, y)), and Eq. 4 is
    # 2y + 0.4 (2x - 1)^2 + 0.4 (2y - 1)^2 + 0.8 (x + y - 1)^2. Its derivatives are 0 at 3x + y = 2 and x + 3y = 0.75,
    # so x = 0.65625 and y = 0.03125: 0.0625 + 0.4 * (0.3125^2 + 0.9375^2) + 0.8 * 0.3125^2 = 0.53125.
    z, s = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert uot_uniformity(z, samples=s, **EXACT).item() == pytest.approx(0.53125, rel=1e-6)
    pi = coupling(torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double(), tau_a=0.8, tau_b=0.8, **EXACT)
    assert pi.flatten().tolist() == pytest.approx([0.65625, 0.65625, 0.03125, 0.03125], abs=1e-6)


PROBLEMS = [(12, 12, 3, 0.8, 0.8), (12, 12, 16, 0.8, 0.8), (9, 14, 5, 0.5, 1.3)]
PROBLEMS += [(15, 6, 4, 2.0, 0.3), (1, 8, 4, 0.8, 1)]


@pytest.mark.parametrize(("rows", "columns", "dim", "tau_a", "tau_b"), PROBLEMS)
def test_transport_equals_that_of_pot(rows, columns, dim, tau_a, tau_b):
    import ot  # here: in the worker that runs this test

    z, s = sphere(rows, dim), sphere(columns, dim, seed=2)
    cost = (0.5 * torch.cdist(z, s).square()).numpy()
    a, b = np.ones(rows), np.ones(columns)
    pi = ot.unbalanced.mm_unbalanced(a, b, cost, [tau_a, tau_b], div="l2", numItermax=200_000, stopThr=1e-13)
    penalties = tau_a / 2 * ((pi.sum(1) - a) ** 2).sum() + tau_b / 2 * ((pi.sum(0) - b) ** 2).sum()
    ours = uot_uniformity(z, samples=s, tau_a=tau_a, tau_b=tau_b, **EXACT).item()
    assert ours == pytest.approx((pi * cost).sum() + penalties, rel=1e-5)


def test_the_coupling_solves_the_quadratic_form_of_eq_5():
    # Q and w written out with Kronecker products for 3 rows and 4 columns, vec() taking rows after each other; at the
    # best pi >= 0 the gradient Q vec(pi) + w is 0 where pi > 0 and not negative elsewhere.
    rows, columns, tau_a, tau_b = 3, 4, 0.8, 0.6
    z, s = sphere(rows, 4), sphere(columns, 4, seed=2)
    one = torch.ones
    phi_r = torch.kron(torch.eye(rows), one(1, columns)).double()
    phi_c = torch.kron(one(1, rows), torch.eye(columns)).double()
    q = tau_a * phi_r.T @ phi_r + tau_b * phi_c.T @ phi_c
    cost = 0.5 * torch.cdist(z, s).square()
    w = cost.flatten() - tau_a * phi_r.T @ one(rows).double() - tau_b * phi_c.T @ one(columns).double()
    pi = coupling(cost, tau_a=tau_a, tau_b=tau_b, **EXACT).flatten()
    gradient = q @ pi + w
    assert pi.min() >= 0
    assert (pi > 1e-6).any()
    assert gradient[pi > 1e-6].abs().max() < 1e-5
    assert gradient.min() > -1e-5
    eq5 = 0.5 * pi @ q @ pi + w @ pi + (tau_a * rows + tau_b * columns) / 2
    ours = uot_uniformity(z, samples=s, tau_a=tau_a, tau_b=tau_b, **EXACT)
    assert ours.item() == pytest.approx(eq5.item(), rel=1e-10)


# Collapsed: vectors differ by a share of their mean. "relu": means of ReLUs, as encoders put out.
SPREADS = {
    "spread": lambda batch, dim: random(batch, dim),
    "5%": lambda batch, dim: random(1, dim, seed=3) + 0.05 * random(batch, dim),
    "1%": lambda batch, dim: random(1, dim, seed=3) + 0.01 * random(batch, dim),
    "relu": lambda batch, dim: random(batch, dim, 4).relu().mean(dim=2),
}


def gradient_of(z: Tensor, s: Tensor, **options) -> Tensor:
    z = z.detach().requires_grad_()
    return torch.autograd.grad(uot_uniformity(z, samples=s, **options), z)[0].double()


def proven_best(cost: Tensor) -> Tensor:
    """The best coupling of ``cost``, float64, proven to be the best and the only one.

    The prices that its masses stand for break no bound u_i + v_j <= C_ij, so that they give a value of the dual, below
    which Eq. 4 cannot fall; and Eq. 4 is that value. Row and column sums of all best couplings are the same (the
    penalties are strictly convex in them), and mass is where a bound is tight only. If no circle can be made of those
    places, taken as edges between rows and columns, the sums leave one coupling: an edge at a leaf has all that the
    leaf has, and without it there is a smaller forest.
    """
    pi = coupling(cost, tau_a=0.8, tau_b=0.8, **EXACT).clone()
    u, v = 0.8 * (1 - pi.sum(dim=1, keepdim=True)), 0.8 * (1 - pi.sum(dim=0))
    slack = cost - u - v
    value = (cost * pi).sum() + (u.square().sum() + v.square().sum()) / 1.6
    dual = (u - u.square() / 1.6).sum() + (v - v.square() / 1.6).sum()
    assert slack.min() > -1e-10
    assert abs(value - dual) < 1e-9
    tight = (slack < 1e-8).nonzero().numpy()
    rows, columns = cost.shape
    graph = coo_array((np.ones(len(tight)), (tight[:, 0], tight[:, 1] + rows)), shape=(rows + columns,) * 2)
    assert len(tight) == rows + columns - connected_components(graph, directed=False)[0]
    return pi


def least_distance(cost: Tensor, tau_a: float, tau_b: float) -> Tensor:
    """The best coupling by another road: Lawson and Hanson, Solving Least Squares Problems, chapter 23.

    With x = ((u - tau_a) / sqrt(tau_a), (v - tau_b) / sqrt(tau_b)) the dual of Eq. 4 is the shortest x with
    -sqrt(tau_a) x_i - sqrt(tau_b) x_j >= tau_a + tau_b - C_ij. For the y >= 0 that brings the matrix of these bounds,
    with their right sides below it, closest to (0, ..., 0, 1), the residual is r, and the multipliers of the bounds,
    which are pi, are y / -r_last.
    """
    rows, columns = cost.shape
    i, j = np.divmod(np.arange(rows * columns), columns)
    bounds = np.zeros((rows + columns + 1, rows * columns))
    bounds[i, np.arange(rows * columns)] = -math.sqrt(tau_a)
    bounds[rows + j, np.arange(rows * columns)] = -math.sqrt(tau_b)
    bounds[-1] = tau_a + tau_b - cost.flatten().numpy()
    y, _ = nnls(bounds, np.eye(rows + columns + 1)[-1])
    return torch.from_numpy(y / (1 - bounds[-1] @ y)).reshape(rows, columns)


@pytest.mark.parametrize("kind", SPREADS)
@pytest.mark.parametrize(("columns", "tau_a", "tau_b"), [(24, 0.8, 0.8), (15, 0.5, 1.3), (40, 2.0, 0.3)])
def test_the_coupling_is_that_of_least_distance_programming(kind, columns, tau_a, tau_b):
    z, s = F.normalize(SPREADS[kind](24, 64), dim=1), sphere(columns, 64)
    cost = 0.5 * torch.cdist(z, s).square()
    ours = coupling(cost, tau_a=tau_a, tau_b=tau_b, **EXACT)
    assert torch.allclose(ours, least_distance(cost, tau_a, tau_b), atol=1e-9)
    if (columns, tau_a, tau_b) == (24, 0.8, 0.8):
        assert torch.equal(ours, proven_best(cost))


@pytest.mark.parametrize("kind", SPREADS)
@pytest.mark.parametrize(("batch", "dim"), [(32, 128), pytest.param(256, 512, marks=pytest.mark.heavy)])
def test_the_gradient_is_right_for_spread_and_collapsed_representations(batch, dim, kind):
    z, s = F.normalize(SPREADS[kind](batch, dim), dim=1), sphere(batch, dim)
    pi = proven_best(0.5 * torch.cdist(z, s).square())
    best = -pi @ s  # the derivative of 0.5 * (2 - 2 z s^T) at the best pi, on the sphere
    best = best - (best * z).sum(dim=1, keepdim=True) * z
    result = gradient_of(z.float(), s.float())
    assert (result - best).norm() < 2 * 0.08 * best.norm()  # what the solver stops by is an estimate
    assert F.cosine_similarity(result.flatten(), best.flatten(), dim=0) > 0.99
    assert result.norm().item() == pytest.approx(best.norm().item(), rel=0.02)
    assert torch.equal(result, gradient_of(z.float(), s.float(), max_iter=11))
    on_gpu = gradient_of(z.float(), s.float(), max_iter=9, tolerance=0)  # regularizer.gpu_iter
    assert F.cosine_similarity(on_gpu.flatten(), best.flatten(), dim=0) > 0.995
    assert on_gpu.norm().item() == pytest.approx(best.norm().item(), rel=0.005)


@pytest.mark.heavy
def test_the_solver_stands_any_problem_and_any_number_of_steps():
    for seed in range(40):
        draw = torch_generator(seed, "problem")
        rows, columns, dim = torch.randint(1, 40, (3,), generator=draw).tolist()
        tau_a, tau_b, scale = (10 ** (2 * torch.rand(3, generator=draw) - 1)).tolist()
        z, s = (F.normalize(torch.randn(n, dim + 1, generator=draw), dim=1) for n in (rows, columns))
        problem = {"samples": s, "tau_a": tau_a, "tau_b": tau_b, "cost_scale": scale}
        exact = uot_uniformity(z.double(), **problem | {"samples": s.double()}, **EXACT).item()
        for options in ({}, {"tolerance": 0, "max_iter": 60}):
            assert uot_uniformity(z, **problem, **options).item() == pytest.approx(exact, rel=5e-3, abs=1e-4)
