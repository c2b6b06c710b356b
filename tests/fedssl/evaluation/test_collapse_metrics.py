"""Measures of collapse: by hand, against slow transcriptions, and for representations with known collapse."""

from math import exp, log, sqrt

import pytest
import torch

from fedssl.evaluation.collapse_metrics import (
    alignment,
    alpha_req,
    covariance_rank,
    dimension_std,
    effective_rank,
    gaussian_spectrum,
    lidar,
    spectrum,
    uniformity,
)


def test_spectrum_by_hand():
    # Two points at +-(3, 4) around (1, 1): the covariance is (3, 4)^T (3, 4) with the eigenvalues 25 and 0.
    h = torch.tensor([[4.0, 5.0], [-2.0, -3.0]])
    assert spectrum(h).tolist() == pytest.approx([25, 0], abs=1e-12)


@pytest.mark.parametrize(("n", "dim"), [(50, 7), (7, 50), (64, 64)])
def test_spectrum_against_a_slow_transcription(n, dim):
    """The covariance entry by entry, as sum over images of the products of their deviations."""
    h = torch.randn(n, dim, generator=torch.Generator().manual_seed(1)).double() * 3 - 1
    means = [sum(column) / n for column in h.T.tolist()]
    deviations = [[value - mean for value, mean in zip(row, means, strict=True)] for row in h.tolist()]
    columns = list(zip(*deviations, strict=True))
    covariance = [[sum(a * b for a, b in zip(one, other, strict=True)) / n for other in columns] for one in columns]
    expected = torch.linalg.svdvals(torch.tensor(covariance, dtype=torch.float64))
    torch.testing.assert_close(spectrum(h), expected[: min(n, dim)], rtol=1e-9, atol=1e-12)
    # With n images at most n - 1 directions vary, hence two images for every dimension.
    assert (spectrum(h) > 1e-12).sum() == min(n - 1, dim)


def test_the_gaussian_spectrum():
    # Unit vectors of no direction have the second moment 1/dim in every direction; with n of them the eigenvalues lie
    # in (1 +- sqrt(dim / n))^2 / dim (Marchenko and Pastur), and their sum is 1 less the squared length of the mean.
    n, dim = 4000, 40
    values = gaussian_spectrum(n, dim) * dim
    edges = [(1 - sqrt(dim / n)) ** 2, (1 + sqrt(dim / n)) ** 2]
    assert values.min() == pytest.approx(edges[0], abs=0.05)
    assert values.max() == pytest.approx(edges[1], abs=0.05)
    assert values.sum() / dim == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(gaussian_spectrum(n, dim) * dim, values, rtol=0, atol=0)


def test_effective_rank_by_hand():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.ones(9, 4)) == pytest.approx(1)
    # Singular values 3 and 1: shares 3/4 and 1/4.
    expected = exp(-(0.75 * log(0.75) + 0.25 * log(0.25)))
    assert effective_rank(torch.tensor([[3.0, 0.0], [0.0, 1.0]])) == pytest.approx(expected)
    assert effective_rank(torch.zeros(4, 3)) == 0


def test_covariance_rank_by_hand():
    # Four points on the corners of a rectangle of 6 x 2: variances 9 and 1, shares 0.9 and 0.1.
    corners = torch.tensor([[3.0, 1.0], [3.0, -1.0], [-3.0, 1.0], [-3.0, -1.0]])
    expected = exp(-0.9 * log(0.9) - 0.1 * log(0.1))
    assert covariance_rank(corners) == covariance_rank(corners + 100) == pytest.approx(expected)
    assert covariance_rank(torch.ones(4, 3)) == 0


def test_spread_by_hand():
    assert dimension_std(torch.ones(6, 3)) == pytest.approx(0)
    # +-e1, +-e2 in two dimensions: each has the variance 1/2, and sqrt(1/2) sqrt(2) = 1; lengths do not count.
    h = torch.tensor([[1.0, 0], [-5, 0], [0, 2], [0, -1]])
    assert dimension_std(h) == pytest.approx(1)


def test_alignment_by_hand():
    h1, h2 = torch.tensor([[2.0, 0], [0, 1]]), torch.tensor([[0, 3.0], [0, 7]])
    assert alignment(h1, h2) == pytest.approx(1)  # squared distances 2 and 0
    assert alignment(h1, -h1) == pytest.approx(4)


def test_uniformity_by_hand():
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)  # one pair, d^2 = 4
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0)
    # e1, e2 and -e1: squared distances 2, 4, 2.
    h = torch.tensor([[1.0, 0], [0, 1], [-1, 0]])
    assert uniformity(h) == pytest.approx(log((2 * exp(-4) + exp(-8)) / 3))


def with_spectrum(values):
    """Representations whose covariance has these eigenvalues: pairs of points at +- sqrt(dim value) on each axis."""
    axes = torch.diag((torch.tensor(values, dtype=torch.float64) * len(values)).sqrt())
    return torch.cat([axes, -axes])


def test_alpha_req_by_hand():
    # Eigenvalues rank^-1.5: every line through some of them has the slope -1.5.
    assert alpha_req(with_spectrum([rank**-1.5 for rank in range(1, 121)])) == pytest.approx(1.5)
    # 8, 2, 1 with weights 1, 1/2, 1/3: with x = 0, log 2, log 3 and y = log 8, log 2, 0 the weighted means are
    # mx = (log 2 / 2 + log 3 / 3) / (11/6) and my = (log 8 + log 2 / 2) / (11/6).
    mx, my = (log(2) / 2 + log(3) / 3) * 6 / 11, (log(8) + log(2) / 2) * 6 / 11
    points = [(1, 0, log(8)), (1 / 2, log(2), log(2)), (1 / 3, log(3), 0)]
    slope = sum(w * (x - mx) * (y - my) for w, x, y in points) / sum(w * (x - mx) ** 2 for w, x, _ in points)
    assert alpha_req(with_spectrum([8, 2, 1])) == pytest.approx(-slope)
    assert alpha_req(torch.ones(9, 4)) == 0


def test_alpha_req_against_the_normal_equations():
    h = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 41) ** -0.7
    values = torch.linalg.eigvalsh(torch.cov(h.T, correction=0)).flip(0)
    # x^T W x slope = x^T W y with columns log(rank) and 1, and weights 1 / rank on the diagonal of W.
    ranks = torch.arange(4, 41, dtype=torch.float64)
    x, y = (torch.stack([ranks.log(), torch.ones_like(ranks)], dim=1), values[3:].log())
    slope, _ = torch.linalg.solve(x.T @ torch.diag(1 / ranks) @ x, x.T @ torch.diag(1 / ranks) @ y).tolist()
    assert alpha_req(h) == pytest.approx(-slope)


def test_lidar_by_hand():
    # Four images at (+-3, 0) and (0, +-1), two views each at +-(0.1, 0.1) or +-(0.1, -0.1) around them, so that
    # Sigma_w = 0.01 (1, 1; 1, 1) / 2 + 0.01 (1, -1; -1, 1) / 2 + 1e-4 = 0.0101 on the diagonal and 0 elsewhere.
    # Sigma_b has 9 / 2 and 1 / 2: shares 0.9 and 0.1.
    means = torch.tensor([[3.0, 0], [-3, 0], [0, 1], [0, -1]])
    offsets = torch.tensor([[0.1, 0.1], [0.1, -0.1], [0.1, 0.1], [0.1, -0.1]])
    expected = exp(-0.9 * log(0.9) - 0.1 * log(0.1))
    assert lidar([means + offsets, means - offsets]) == pytest.approx(expected)
    # Twice the deviations along one axis: the share of its variance is divided by (0.04 + 1e-4) / (0.01 + 1e-4).
    wider = offsets * torch.tensor([2.0, 1.0])
    shares = [4.5 / 0.0401, 0.5 / 0.0101]
    shares = [share / sum(shares) for share in shares]
    assert lidar([means + wider, means - wider]) == pytest.approx(exp(-sum(p * log(p) for p in shares)))
    assert lidar([torch.ones(4, 3), torch.ones(4, 3)]) == 0


@pytest.mark.parametrize(("q", "n", "dim"), [(2, 30, 6), (5, 7, 12)])
def test_lidar_against_the_definition(q, n, dim):
    h = torch.randn(q, n, dim, generator=torch.Generator().manual_seed(2)).double() + 3 * torch.randn(n, dim).double()
    images = [[h[view, image] for view in range(q)] for image in range(n)]
    mean_of = [sum(views) / q for views in images]
    mean = sum(mean_of) / n
    between = sum(torch.outer(m - mean, m - mean) for m in mean_of) / n
    within = sum(torch.outer(v - m, v - m) for views, m in zip(images, mean_of, strict=True) for v in views) / (n * q)
    values, vectors = torch.linalg.eigh(within + 1e-4 * torch.eye(dim, dtype=torch.float64))
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    shares = torch.linalg.eigvalsh(root @ between @ root).clamp(min=0)
    shares = [share for share in (shares / shares.sum()).tolist() if share > 0]
    assert lidar(list(h)) == pytest.approx(exp(-sum(share * log(share) for share in shares)))
