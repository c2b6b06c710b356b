"""Losses equal those of lightly, another library of self-supervised learning."""

import pytest
import torch
from torch import Tensor

from fedssl.losses import (
    barlow_twins,
    dino,
    masked_reconstruction,
    masked_tokens,
    negative_cosine,
    nt_xent,
    patchify,
    sigreg,
    sinkhorn,
    swav,
    vicreg,
)
from tests.fedssl.losses.vectors import draw


@pytest.fixture(scope="module")
def theirs():
    """lightly's losses, whose import takes seconds, in the worker that runs these tests."""
    from lightly import loss

    return loss


def views(*shape: int, count: int = 2, seed: int = 0) -> list[Tensor]:
    return [z.float() for z in draw(*shape, count=count, seed=seed)]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_losses_of_two_views(theirs) -> None:
    z1, z2 = views(16, 8)
    assert_equal(nt_xent(z1, z2, temperature=0.3), theirs.NTXentLoss(temperature=0.3)(z1, z2))
    assert_equal(negative_cosine(z1, z2), theirs.NegativeCosineSimilarity()(z1, z2))
    assert_equal(barlow_twins(z1, z2, lambd=0.02), theirs.BarlowTwinsLoss(lambda_param=0.02)(z1, z2))


@pytest.mark.parametrize(("batch", "dim"), [(16, 8), (8, 16)])
def test_vicreg(theirs, batch: int, dim: int) -> None:
    z1, z2 = views(batch, dim)
    assert_equal(vicreg(z1, 0.5 * z2), theirs.VICRegLoss()(z1, 0.5 * z2))
    loss = vicreg(z1, z2, sim_weight=3, var_weight=5, cov_weight=2)
    assert_equal(loss, theirs.VICRegLoss(lambda_param=3, mu_param=5, nu_param=2)(z1, z2))


@pytest.mark.parametrize("local_views", [0, 3])
def test_dino(theirs, local_views: int) -> None:
    student, teacher = views(8, 20, count=2 + local_views), views(8, 20, seed=1)
    center = views(20, seed=2)[0]
    reference = theirs.DINOLoss(output_dim=20, student_temp=0.2, teacher_temp=0.07)
    reference.center.copy_(center)
    loss = dino(student, teacher, center=center, student_temperature=0.2, teacher_temperature=0.07)
    assert_equal(loss, reference(teacher, student))


@pytest.mark.parametrize("local_views", [0, 3])
def test_swav(theirs, local_views: int) -> None:
    scores = views(8, 20, count=2 + local_views)
    codes = [sinkhorn(s, epsilon=0.3, iterations=3) for s in scores[:2]]
    torch.testing.assert_close(codes[0], theirs.swav_loss.sinkhorn(scores[0], epsilon=0.3), rtol=1e-5, atol=1e-6)
    reference = theirs.SwaVLoss(temperature=0.2, sinkhorn_epsilon=0.3)
    assert_equal(swav(scores, codes, temperature=0.2), reference(scores[:2], scores[2:]))


@pytest.mark.parametrize("shape", [(32, 8), (3, 32, 8)])
def test_sigreg(theirs, shape: tuple[int, ...]) -> None:
    """Both draw a float32 matrix (dim, slices) from a CPU generator."""
    (z,) = views(*shape, count=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = theirs.SIGReg(num_vectors=64, knots=17, t_max=3.0)(z)
    assert_equal(sigreg(z, slices=64, generator=torch.Generator().manual_seed(5), t_max=3.0), expected)


def test_masked_reconstruction_and_patches() -> None:
    """lightly's MAE applies MSELoss to patches that it normalizes with this function."""
    from lightly.models import utils

    images = views(4, 3, 8, 8)[0]
    patches = patchify(images, 4)
    assert torch.equal(patches, utils.patchify(images, 4))
    prediction = views(4, 4, 48, seed=1)[0]
    expected = torch.nn.MSELoss()(prediction, utils.normalize_mean_var(patches))
    assert_equal(masked_reconstruction(prediction, patches), expected)


def test_masked_tokens(theirs) -> None:
    """lightly receives the logits of the masked tokens only, and a mask (batch, height, width)."""
    student, teacher = views(4, 6, 20)
    center = views(20, seed=2)[0]
    masked = torch.tensor([[1, 0, 1, 1, 0, 0], [0] * 6, [1] * 6, [0, 1, 0, 0, 0, 0]]).bool()
    reference = theirs.IBOTPatchLoss(output_dim=20, student_temp=0.2, teacher_temp=0.07)
    reference.center.center.copy_(center)
    weights = (masked / (4 * masked.sum(dim=1, keepdim=True).clamp(min=1)))[masked]
    temperatures = {"student_temperature": 0.2, "teacher_temperature": 0.07}
    loss = masked_tokens(student[masked], teacher[masked], weights, center=center, **temperatures)
    assert_equal(loss, reference(teacher[masked], student[masked], masked.view(4, 2, 3)))
