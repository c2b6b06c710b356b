"""VICReg: the loss of its projections, what is exchanged and averaged, and its failure modes."""

import pytest
import torch
from torch import Tensor

from fedssl.losses import vicreg
from fedssl.methods.vicreg import VICReg, projection_rank
from fedssl.views import Views
from tests.failures import failures_after
from tests.fedssl.methods.made import HEAD, encoder, views


def make(*, sim_weight: float = 25.0, var_weight: float = 25.0, cov_weight: float = 1.0) -> VICReg:
    return VICReg(encoder(), projector=HEAD, sim_weight=sim_weight, var_weight=var_weight, cov_weight=cov_weight)


def test_loss_is_that_of_projections_of_each_view_by_itself():
    method = make(sim_weight=3.0, var_weight=5.0, cov_weight=7.0)
    view1, view2 = views()
    z1, z2 = method.projector(method.encoder(view1)), method.projector(method.encoder(view2))
    expected = vicreg(z1, z2, sim_weight=3.0, var_weight=5.0, cov_weight=7.0)
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected, rtol=0, atol=0)
    together = method.projector(method.encoder(torch.cat((view1, view2)))).chunk(2)
    assert abs(vicreg(*together, sim_weight=3.0, var_weight=5.0, cov_weight=7.0) - expected) > 1e-4


def test_rank_by_hand():
    """Deviations of (2, 0), (-2, 0), (0, 1), (0, -1) have squared sums 8 and 2: (8 + 2)^2 / (64 + 4) = 100 / 68."""
    z = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) + 3
    assert projection_rank(z) == pytest.approx(100 / 68)
    assert projection_rank(torch.ones(4, 2)) == 0
    assert projection_rank(torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]])) == pytest.approx(1)


def slow_rank(z: Tensor) -> float:
    values = torch.linalg.eigvalsh(torch.cov(z.double().T, correction=0))
    return float(values.sum() ** 2 / values.square().sum())


@torch.no_grad()
def test_diagnostics_are_those_of_all_projections():
    method = make().eval()
    z = method.projector(method.encoder(torch.cat(views())))
    found = method.diagnose(Views.of(*views()))
    assert found["projection_std"] == pytest.approx(z.std(dim=0).mean().item(), rel=1e-5)
    assert found["projection_rank"] == pytest.approx(slow_rank(z), rel=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.var_weight=0"], "nearly the same projection; raise method.var_weight"),
        (["method.cov_weight=0"], "vary in few directions; raise method.cov_weight"),
    ],
)
def test_training_without_a_term_is_reported_as_a_failure(tmp_path, overrides, message):
    (failure,) = failures_after(tmp_path, 6, "method=vicreg", *overrides)
    assert message in failure


def test_two_images_give_the_projector_no_signal():
    """Batch normalization maps two images to 1 and -1 whatever their distance is, so its input has no gradient."""
    method, generator = make().double(), torch.Generator().manual_seed(2)
    shares = []
    for batch in (2, 3):
        h1, h2 = 100 * torch.randn(2, batch, 16, generator=generator, dtype=torch.float64)
        method.zero_grad()
        vicreg(method.projector(h1), method.projector(h2)).backward()
        shares.append(float(method.projector[0].weight.grad.norm() / method.projector[3].weight.grad.norm()))
    assert shares[0] < 0.01 * shares[1]
    assert method.min_batch_size == 3
