"""Local regularisers: their numbers by hand, against slow transcriptions and solvers, and inside training."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scipy.optimize import minimize, nnls
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedssl.config import compose
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.losses import info_nce
from fedssl.methods.base import SSLMethod
from fedssl.regularizers.alignment import Alignment, alignment
from fedssl.regularizers.base import Regularizer, Step
from fedssl.regularizers.decorr import Decorrelation, feature_decorrelation
from fedssl.regularizers.fur import FUR, tangent_swd, uot_uniformity
from fedssl.regularizers.transport import coupling
from fedssl.schedule.stages import at_stage
from fedssl.seeding import torch_generator
from fedssl.training import train
from tests.local_training import local_training

CONF = Path(__file__).parents[3] / "conf"
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
REGULARIZERS = {
    "fur": FUR,
    "decorr": Decorrelation,
    "alignment": Alignment,
}
EXACT = {"max_iter": 40, "tolerance": 0}  # in float64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are not worth the wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test"), dtype=torch.float64)


def sphere(rows: int, dim: int, seed: int = 1) -> Tensor:
    return F.normalize(random(rows, dim, seed=seed), dim=1)


# Unbalanced optimal transport, Eqs. 4-6 of FedU2


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


def test_samples_where_the_representations_are_cost_nothing():
    z = torch.eye(6, dtype=torch.float64)
    assert uot_uniformity(z, samples=z[torch.tensor([2, 0, 5, 4, 1, 3])], **EXACT).item() == pytest.approx(0, abs=1e-9)


PROBLEMS = [
    (12, 12, 3, 0.8, 0.8),
    (12, 12, 16, 0.8, 0.8),
    (9, 14, 5, 0.5, 1.3),
    (15, 6, 4, 2.0, 0.3),
    (1, 8, 4, 0.8, 1),
]


@pytest.mark.parametrize(("rows", "columns", "dim", "tau_a", "tau_b"), PROBLEMS)
def test_transport_equals_that_of_another_solver(rows, columns, dim, tau_a, tau_b):
    z, s = sphere(rows, dim), sphere(columns, dim, seed=2)
    cost = np.array([[0.5 * ((a - b) ** 2).sum().item() for b in s] for a in z])

    def eq4(flat):
        pi = flat.reshape(rows, columns)
        a, b = pi.sum(1) - 1, pi.sum(0) - 1
        value = (cost * pi).sum() + tau_a / 2 * (a**2).sum() + tau_b / 2 * (b**2).sum()
        return value, (cost + tau_a * a[:, None] + tau_b * b).ravel()

    best = minimize(
        eq4,
        np.zeros(rows * columns),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (rows * columns),
        options={"maxiter": 50_000, "maxfun": 50_000, "ftol": 1e-15, "gtol": 1e-10},
    )
    ours = uot_uniformity(5 * z, samples=s, tau_a=tau_a, tau_b=tau_b, **EXACT).item()
    assert ours == pytest.approx(best.fun, rel=1e-7)
    single = uot_uniformity(z.float(), samples=s.float(), tau_a=tau_a, tau_b=tau_b).item()
    assert best.fun * (1 - 1e-5) <= single <= best.fun * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize(("rows", "columns", "dim", "tau_a", "tau_b"), PROBLEMS)
def test_transport_equals_that_of_pot(rows, columns, dim, tau_a, tau_b):
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
@pytest.mark.parametrize("dim", [128, 512])
@pytest.mark.parametrize("batch", [32, 128, 256])
def test_the_gradient_is_right_where_representations_are_spread_and_where_they_collapse(batch, dim, kind):
    z, s = F.normalize(SPREADS[kind](batch, dim), dim=1), sphere(batch, dim)
    pi = proven_best(0.5 * torch.cdist(z, s).square())
    best = -pi @ s  # the derivative of 0.5 * (2 - 2 z s^T) at the best pi, on the sphere
    best = best - (best * z).sum(dim=1, keepdim=True) * z
    found = gradient_of(z.float(), s.float())
    assert (found - best).norm() < 2 * 0.08 * best.norm()  # what the solver stops by is an estimate
    assert F.cosine_similarity(found.flatten(), best.flatten(), dim=0) > 0.99
    assert found.norm().item() == pytest.approx(best.norm().item(), rel=0.02)
    assert torch.equal(found, gradient_of(z.float(), s.float(), max_iter=11))


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


def test_the_gradient_is_that_of_finite_differences():
    # The optimal pi depends on z too; by the envelope theorem that does not matter.
    s = sphere(6, 3)
    z = random(6, 3, seed=4).requires_grad_()
    loss = lambda z: uot_uniformity(z, samples=s, **EXACT)  # noqa: E731
    (gradient,) = torch.autograd.grad(loss(z), z)
    slow = torch.zeros_like(z)
    for index in itertools.product(range(6), range(3)):
        h = torch.zeros_like(slow)
        h[index] = 1e-4
        with torch.no_grad():
            slow[index] = (loss(z + h) - loss(z - h)) / 2e-4
    assert gradient.abs().max() > 0.05
    assert torch.allclose(gradient, slow, atol=1e-5)


def test_the_gradient_is_alive_at_512_dimensions_with_half_the_cost_and_dead_with_the_papers():
    s = sphere(128, 512).float()
    for z in (random(128, 512, seed=5).float(), random(128, 512, seed=5).float() / 20 + random(1, 512, seed=6).float()):
        z.requires_grad_()
        (alive,) = torch.autograd.grad(uot_uniformity(F.normalize(z, dim=1), samples=s), z)
        assert (alive.norm(dim=1) * z.norm(dim=1) > 0.01).all()
        paper = uot_uniformity(z, samples=s, cost_scale=1.0)
        (dead,) = torch.autograd.grad(paper, z)
        assert paper.item() == pytest.approx(0.8 * 128)  # Omega of Eq. 5: nothing is transported
        assert dead.abs().max() == 0


@pytest.mark.parametrize("dim", [8, 128, 512])
def test_spread_representations_have_a_smaller_value_than_collapsed_ones(dim):
    spread, s = random(64, dim, seed=7), sphere(64, dim)
    narrow = spread / 5 + random(1, dim, seed=8)
    point = random(1, dim, seed=8).expand(64, dim)
    values = [uot_uniformity(z, samples=s).item() for z in (spread, narrow, point)]
    assert values[0] < values[1] < values[2]


@pytest.mark.parametrize("variant", ["uot", "tangent_swd"])
def test_following_the_gradient_spreads_a_narrow_cone(variant):
    z = (random(1, 32, seed=9) + 0.2 * random(64, 32)).float().requires_grad_()
    term = FUR(weight=0.1, variant=variant)
    generator = torch_generator(0, "train")
    resultant = lambda: F.normalize(z.detach(), dim=1).mean(dim=0).norm().item()  # noqa: E731
    before = resultant()
    optimizer = torch.optim.Adam([z], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        term.add_to(torch.zeros(()), Step(SSLMethod(), z, z, z, z, generator)).backward()
        optimizer.step()
    assert before > 0.9
    assert resultant() < 0.5


def test_the_terms_of_both_views_are_added_with_the_weight():
    # The samples are redrawn here the way the class draws them: for both views at once, from the step's generator.
    z1, z2 = random(5, 4).float(), random(5, 4, seed=1).float()
    step = Step(SSLMethod(), z1, z2, z1, z2, torch_generator(0, "train"))
    s1, s2 = F.normalize(torch.randn(2, 5, 4, generator=torch_generator(0, "train")), dim=-1)
    alone = [uot_uniformity(z, samples=s, max_iter=20, tolerance=0).item() for z, s in ((z1, s1), (z2, s2))]
    together = uot_uniformity(torch.stack((z1, z2)), samples=torch.stack((s1, s2)), max_iter=20, tolerance=0)
    assert together.tolist() == pytest.approx(alone, rel=1e-6)
    both = FUR(weight=0.3, reduction="sum", max_iter=20, tolerance=0).add_to(torch.tensor(2.0), step).item()  # Eq. 2
    assert both == pytest.approx(2 + 0.3 * sum(alone), rel=1e-6)
    both = Decorrelation(weight=0.3).add_to(torch.tensor(2.0), step).item()
    assert both == pytest.approx(2 + 0.3 * (feature_decorrelation(z1) + feature_decorrelation(z2)).item(), rel=1e-6)


@pytest.mark.parametrize("variant", ["uot", "tangent_swd"])
def test_the_mean_weighs_the_same_at_every_batch_size_and_equals_the_sum_at_128(variant):
    for batch in (16, 128, 200):
        z = random(2, batch, 16).float().requires_grad_()
        gradients = []
        for reduction in ("mean", "sum"):
            step = Step(SSLMethod(), z[0], z[1], z[0], z[1], torch_generator(0, "train"))
            term = FUR(variant=variant, reduction=reduction).add_to(torch.zeros(()), step)
            gradients += torch.autograd.grad(term, z)
        assert torch.allclose(gradients[0], gradients[1] * 128 / batch, rtol=1e-5)
        assert (gradients[0].norm() == gradients[1].norm()) == (batch == 128)


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_batches_have_finite_gradients(batch, dtype):
    same = torch.ones(batch, 4, dtype=dtype, requires_grad=True)
    s = F.normalize(torch.ones(batch, 4), dim=1)
    lines = torch.ones(batch, 4, 2)
    for value in (
        uot_uniformity(same, samples=s),
        uot_uniformity(same, samples=-s, cost_scale=0.1, tolerance=0),
        tangent_swd(same, samples=-s, bases=s, projections=lines),
        feature_decorrelation(same) + same.sum() * 0,  # one picture: a constant
    ):
        (gradient,) = torch.autograd.grad(value, same)
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert gradient.isfinite().all()


# The authors' code of FUR


def test_the_tangent_distance_by_hand():
    # At base (1, 0) the logarithms of (0, 1) and (0, -1) are (0, pi/2) and (0, -pi/2), on the line (5, 2) pi and -pi:
    # (2 pi)^2 / 6. A second base that has both at 90 degrees adds as much again.
    z, s = torch.tensor([[0.0, -4.0]]), torch.tensor([[0.0, 1.0]])
    line = torch.tensor([[[5.0], [2.0]]])
    base = torch.tensor([[1.0, 0.0]])
    assert tangent_swd(z, samples=s, bases=base, projections=line).item() == pytest.approx(4 * math.pi**2 / 6)
    both = tangent_swd(z, samples=s, bases=torch.cat((base, -base)), projections=torch.cat((line, line)))
    assert both.item() == pytest.approx(8 * math.pi**2 / 6)


def test_the_tangent_distance_equals_its_equation():
    z, s, bases = random(5, 3), sphere(5, 3), sphere(4, 3, seed=2)
    lines = random(4, 3, 2, seed=3)

    def log(b, x):
        x = x / x.norm()
        across = x - (b @ x) * b
        return torch.arccos(b @ x) * across / across.norm()

    slow = 0.0
    for b, p in zip(bases, lines, strict=True):
        ours, theirs = (torch.stack([log(b, row) for row in rows]) @ p for rows in (z, s))
        for k in range(2):
            pairs = zip(sorted(ours[:, k].tolist()), sorted(theirs[:, k].tolist()), strict=True)
            slow += sum((x - y) ** 2 for x, y in pairs) / 5 / 2 / 6
    fast = tangent_swd(z, samples=s, bases=bases, projections=lines)
    assert fast.item() == pytest.approx(slow, rel=1e-10)


class Alone(FUR):
    """FUR without the gradient of the method's own loss; it remembers the last step."""

    def add_to(self, loss: Tensor, step: Step) -> Tensor:
        self.step = step
        return super().add_to(loss.detach(), step)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("variant", ["uot", "tangent_swd"])
@pytest.mark.parametrize("name", METHODS)
def test_projections_of_both_views_are_spread_with_every_method_and_no_other_part_is_touched(name, variant, frozen):
    method, term = make(name), Alone(variant=variant)
    depth = method.encoder.span.depth
    with at_stage(method, depth=depth, frozen=frozen):
        fit(method, term)
    head, length = ("encoder", method.encoder.feature_dim) if name == "supervised" else ("projector", 8)
    assert term.part_of(method) == head
    assert term.step.z1.shape == term.step.z2.shape == (6, length)
    assert not torch.equal(term.step.z1, term.step.z2)
    touched = {part for part, weights in method.named_parameters() if weights.grad is not None and weights.grad.any()}
    assert {part.split(".")[0] for part in touched} == {"encoder", head}
    blocks = {part.split(".")[2] for part in touched if part.startswith("encoder.blocks.")}
    assert blocks == {str(block) for block in range(frozen, depth)}


def test_the_encoders_outputs_are_an_option():
    method, term = make("byol"), Alone(part="encoder")
    fit(method, term)
    assert term.step.z1.shape == (6, method.encoder.feature_dim)
    assert all(weights.grad is None for weights in method.projector.parameters())


# Decorrelation


def test_decorrelation_by_hand():
    # Three pictures, one dimension twice the other: the correlation is 1, so (3 - 1)^2 / 3. With a third dimension that
    # is constant one pair of three is correlated: a third of it. All four corners of a square: no correlation.
    z = torch.tensor([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]])
    assert feature_decorrelation(z).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(-3 * z + 1).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(torch.cat((z, torch.ones(3, 1)), dim=1)).item() == pytest.approx(4 / 9)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert feature_decorrelation(corners).item() == 0
    assert feature_decorrelation(z[:1]).item() == 0
    assert feature_decorrelation(z[:, :1]).item() == 0


def test_decorrelation_equals_its_equation():
    z = random(7, 5) @ random(5, 5, seed=1)
    correlation = np.corrcoef(z.numpy().T)
    squares = [correlation[i, j] ** 2 for i in range(5) for j in range(5) if i != j]
    assert feature_decorrelation(z).item() == pytest.approx(6**2 / 7 * np.mean(squares), rel=1e-6)
    z.requires_grad_()
    assert torch.autograd.gradcheck(feature_decorrelation, z)


def test_decorrelation_is_on_the_chosen_part():
    assert Decorrelation().on == "projector"
    assert Decorrelation(part="encoder").on == "encoder"
    with pytest.raises(InputError, match="regularizer.part=head is unknown; set regularizer.part=projector or"):
        Decorrelation(part="head")


# Alignment


def test_alignment_by_hand():
    # Two pictures that the local encoder puts where the received one puts their other views, at 90 degrees: either
    # term is log(1 + e^0 / e^1).
    e = torch.eye(2)
    value = alignment(e, 2 * e, 3 * e, 4 * e, temperature=1.0)
    assert value.item() == pytest.approx(2 * math.log(1 + math.exp(-1)))
    # cos(z1, g2) = 0, cos(z2, g1) = 1 / sqrt(2)
    z1, z2, g1, g2 = (torch.tensor([vector]) for vector in ([1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 3.0]))
    assert alignment(z1, z2, g1, g2, distance="cosine").item() == pytest.approx(-math.sqrt(0.5) / 2)


def step_of(method: SSLMethod, view1: Tensor, view2: Tensor) -> Step:
    return Step(method, view1, view2, method.encoder(view1), method.encoder(view2), torch_generator(0, "train"))


def test_alignment_compares_with_the_other_view_under_the_received_encoder():
    method = make("simclr").eval()
    view1, view2 = torch.rand(2, 6, 1, 8, 8, generator=torch_generator(0, "views"))
    term = Alignment(weight=0.5)
    term.start(method)
    g1, g2 = method.encoder(view1).detach(), method.encoder(view2).detach()
    with torch.no_grad():
        for weights in method.encoder.parameters():
            weights.mul_(1.1).add_(0.05)
    step = step_of(method, view1, view2)
    expected = 2 + 0.5 * (info_nce(step.z1, g2, temperature=0.2) + info_nce(step.z2, g1, temperature=0.2))
    assert term.add_to(torch.tensor(2.0), step).item() == pytest.approx(expected.item(), rel=1e-6)


def test_right_after_the_start_the_same_view_aligns_perfectly():
    method = make("simclr").eval()
    view = torch.rand(6, 1, 8, 8, generator=torch_generator(0, "views"))
    term = Alignment(weight=1.0, distance="cosine")
    term.start(method)
    assert term.add_to(torch.zeros(()), step_of(method, view, view)).item() == pytest.approx(-1)


def test_the_received_encoder_stays_as_it_was_until_the_next_start_which_takes_no_new_memory():
    method, term = make("simclr"), Alignment(weight=1.0)
    term.start(method)
    copies = {name: tensor.clone() for name, tensor in term.received.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in term.received.state_dict().items()}
    fit(method, term)  # starts it with the same weights
    assert not term.received.training
    for name, tensor in term.received.state_dict().items():
        assert torch.equal(tensor, copies[name])
        assert tensor.data_ptr() == places[name] != method.encoder.state_dict()[name].data_ptr()
    assert not torch.equal(method.encoder.state_dict()["blocks.0.0.weight"], copies["blocks.0.0.weight"])
    term.start(method)
    for name, tensor in term.received.state_dict().items():
        assert torch.equal(tensor, method.encoder.state_dict()[name])
        assert tensor.data_ptr() == places[name]


@pytest.mark.parametrize("distance", ["info_nce", "cosine"])
def test_the_gradient_of_the_alignment_reaches_the_local_encoder_only(distance):
    method, term = make("simclr"), Alignment(weight=1.0, distance=distance)
    term.start(method)
    view1, view2 = torch.rand(2, 6, 1, 8, 8, generator=torch_generator(0, "views"))
    term.add_to(torch.zeros(()), step_of(method, view1, view2)).backward()
    assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in method.encoder.parameters())
    assert all(weights.grad is None for weights in method.projector.parameters())
    assert all(weights.grad is None and not weights.requires_grad for weights in term.received.parameters())


# All of them, in training


def make(name: str) -> SSLMethod:
    settings = OmegaConf.create(
        {"method": OmegaConf.load(CONF / "method" / f"{name}.yaml"), "dataset": {"num_classes": 3}}
    )
    for head in {"projector", "predictor"} & set(settings.method):
        settings.method[head].hidden = 16
    if "projector" in settings.method:
        settings.method.projector.out = 8
    torch.manual_seed(0)
    return instantiate(settings.method, encoder=conv_small(channels=1, size=8, width=4))


def fit(method: SSLMethod, regularizer: Regularizer, *, precision: str = "fp32", epochs: int = 1) -> float:
    generator = torch_generator(0, "train")
    images = torch.randint(256, (12, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return train(
        method,
        images,
        torch.arange(12),
        training=local_training(
            torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1),
            augment=lambda batch, draw: (batch / 255 + torch.rand(batch.shape, generator=draw), batch / 255),
            regularizer=regularizer,
            epochs=epochs,
            batch_size=6,
            precision=precision,
        ),
        generator=generator,
        labels=torch.arange(12) % 3,
    ).loss


VARIANTS = {
    "uot": lambda: FUR(),
    "tangent_swd": lambda: FUR(weight=0.01, variant="tangent_swd"),
    "decorr": lambda: Decorrelation(part="encoder"),
    "decorr of projections": lambda: Decorrelation(),
    "info_nce": lambda: Alignment(),
    "cosine": lambda: Alignment(weight=1.0, distance="cosine"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", METHODS)
def test_every_regulariser_trains_with_every_method_the_same_bits_from_the_same_seed(name, variant):
    if name == "supervised" and variant == "decorr of projections":
        pytest.skip("supervised training has no projector")
    for precision in ("fp32", "bf16"):
        methods = [make(name) for _ in range(2)]
        losses = [fit(method, VARIANTS[variant](), precision=precision) for method in methods]
        assert math.isfinite(losses[0])
        assert losses[0] == losses[1]
        for one, other in zip(*(method.state_dict().values() for method in methods), strict=True):
            assert torch.equal(one, other)
            assert one.isfinite().all()
        assert losses[0] != fit(make(name), Regularizer(), precision=precision)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_encoder_gives_regularisers_the_same_and_is_compiled_once(variant):
    """They take what the encoder puts out by a hook of their own for each step, and alignment copies the encoder."""
    compiled, plain = make("byol"), make("byol")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled.encoder.compile(backend=backend)
    regularizers = VARIANTS[variant](), VARIANTS[variant]()
    for _ in range(2):
        losses = [fit(*pair, epochs=2) for pair in zip((compiled, plain), regularizers, strict=True)]
        assert losses[0] == losses[1]
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", REGULARIZERS)
def test_a_weight_of_zero_turns_it_off_to_the_bit(kind):
    with_term, without = make("simclr"), make("simclr")
    assert fit(with_term, REGULARIZERS[kind](weight=0), epochs=2) == fit(without, Regularizer(), epochs=2)
    for one, other in zip(with_term.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", REGULARIZERS)
def test_a_negative_weight_is_refused(kind):
    with pytest.raises(InputError, match=r"^regularizer.weight=-0.1 must not be negative; .* 0 turns it off$"):
        REGULARIZERS[kind](weight=-0.1)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: FUR(variant="kl"), "regularizer.variant=kl is unknown; set regularizer.variant=uot or"),
        (lambda: FUR(part="head"), "regularizer.part=head is unknown; set regularizer.part=projector or"),
        (lambda: FUR(reduction="none"), "regularizer.reduction=none is unknown; set regularizer.reduction=mean or"),
        (lambda: FUR(cost_scale=0), "regularizer.cost_scale=0 must be positive"),
        (lambda: FUR(tau_b=-1), "regularizer.tau_b=-1 must be positive"),
        (lambda: FUR(max_iter=0), "regularizer.max_iter=0 must be positive"),
        (lambda: FUR(tolerance=-1), "regularizer.tolerance=-1 must not be negative"),
        (lambda: Alignment(distance="l2"), "regularizer.distance=l2 is unknown; set regularizer.distance=info_nce or"),
        (lambda: Alignment(temperature=0), "regularizer.temperature=0 must be positive"),
    ],
)
def test_other_bad_settings_are_refused(make_it, words):
    with pytest.raises(InputError, match=words):
        make_it()


@pytest.mark.parametrize("kind", REGULARIZERS)
def test_the_settings_have_the_defaults_of_the_class(kind):
    made = compose([f"regularizer={kind}"]).training.regularizer.make()
    default = REGULARIZERS[kind]()
    assert type(made) is type(default)
    assert {key: str(value) for key, value in vars(made).items()} == {
        key: str(value) for key, value in vars(default).items()
    }
