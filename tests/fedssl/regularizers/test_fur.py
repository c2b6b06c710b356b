"""FUR: the terms of both views, the authors' variant by its equation, and the projections that it spreads."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import RegularizerInput
from fedssl.regularizers.fur import FUR, tangent_swd, uot_uniformity
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.views import Views
from tests.fedssl.regularizers.made import fit, make
from tests.fedssl.regularizers.points import random, sphere
from tests.methods import WHOLE


def test_the_terms_of_both_views_are_added_with_the_weight():
    # The samples are redrawn here the way the class draws them: for both views at once, from the step's generator.
    z1, z2 = random(5, 4).float(), random(5, 4, seed=1).float()
    step = RegularizerInput(SSLMethod(), Views.of(z1, z2), (z1, z2), torch_generator(0, "train"))
    s1, s2 = F.normalize(torch.randn(2, 5, 4, generator=torch_generator(0, "train")), dim=-1)
    alone = [uot_uniformity(z, samples=s, max_iter=20, tolerance=0).item() for z, s in ((z1, s1), (z2, s2))]
    together = uot_uniformity(torch.stack((z1, z2)), samples=torch.stack((s1, s2)), max_iter=20, tolerance=0)
    assert together.tolist() == pytest.approx(alone, rel=1e-6)
    both = FUR(weight=0.3, reduction="sum", max_iter=20, tolerance=0).apply(torch.tensor(2.0), step).item()  # Eq. 2
    assert both == pytest.approx(2 + 0.3 * sum(alone), rel=1e-6)


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

    def apply(self, loss: Tensor, step: RegularizerInput) -> Tensor:
        self.step = step
        return super().apply(loss.detach(), step)


@pytest.mark.parametrize(("variant", "frozen"), [("uot", 0), ("tangent_swd", 1)])
@pytest.mark.parametrize("name", WHOLE)
def test_projections_of_both_views_are_spread_with_every_method(name, variant, frozen):
    method, term = make(name), Alone(variant=variant)
    depth = method.encoder.active_stages.depth
    with set_active_stages(method, depth=depth, frozen=frozen):
        fit(method, term)
    head = "encoder" if name == "supervised" else "projector"
    length = method.encoder.feature_dim if name == "supervised" else method.projector.out_features
    assert term.resolve_part(method) == head
    assert term.step.z[0].shape == term.step.z[1].shape == (6, length)
    assert not torch.equal(term.step.z[0], term.step.z[1])
    touched = {part for part, weights in method.named_parameters() if weights.grad is not None and weights.grad.any()}
    assert {part.split(".")[0] for part in touched} == {"encoder", head}
    blocks = {part.split(".")[2] for part in touched if part.startswith("encoder.blocks.")}
    assert blocks == {str(block) for block in range(frozen, depth)}


@pytest.mark.parametrize("variant", ["uot", "tangent_swd"])
def test_the_mean_weighs_the_same_at_every_batch_size(variant):
    for batch in (16, 128, 200):
        z = random(2, batch, 16).float().requires_grad_()
        gradients = []
        for reduction in ("mean", "sum"):
            step = RegularizerInput(SSLMethod(), Views.of(*z), (z[0], z[1]), torch_generator(0, "train"))
            term = FUR(variant=variant, reduction=reduction).apply(torch.zeros(()), step)
            gradients += torch.autograd.grad(term, z)
        assert torch.allclose(gradients[0], gradients[1] * 128 / batch, rtol=1e-5)
        assert (gradients[0].norm() == gradients[1].norm()) == (batch == 128)
