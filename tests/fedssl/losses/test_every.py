"""Gradients of losses without a check of their own, and losses of images in another order."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses import info_nce, nt_xent, nt_xent_one_sided, relational, similarity_distillation
from tests.fedssl.losses.examples import LOSSES, SHARP
from tests.fedssl.losses.vectors import draw

TEACHER, QUEUE = draw(4, 3, seed=1)[0], F.normalize(draw(5, 3, seed=2)[0], dim=1)
SMOOTH: dict[str, Callable[..., Tensor]] = {
    "nt_xent": lambda a, b: nt_xent(a, b, temperature=0.5),
    "nt_xent_one_sided": lambda a, b: nt_xent_one_sided(a, b, temperature=0.5),
    "info_nce": lambda a, b: info_nce(a, b, temperature=0.5),
    "relational": lambda a, b: relational(a, b, TEACHER, temperature=0.5),
    "relational, anchors": lambda a, b: relational(TEACHER, a, b, temperature=0.5),
    "similarity_distillation": lambda a, b: similarity_distillation(a + b, TEACHER, QUEUE, **SHARP),
}
ORDERLESS = [name for name in LOSSES if name not in ("dino", "masked_tokens", "masked_reconstruction", "ijepa")]


@pytest.mark.parametrize("loss", SMOOTH.values(), ids=SMOOTH)
def test_gradients_are_right_and_flow_into_both(loss: Callable[..., Tensor]) -> None:
    inputs = [z.requires_grad_() for z in draw(4, 3)]
    assert torch.autograd.gradcheck(loss, inputs)
    assert all(gradient.any() for gradient in torch.autograd.grad(loss(*inputs), inputs))


def test_relations_that_round_to_nothing_leave_the_gradient_finite() -> None:
    inputs = [z.float().requires_grad_() for z in draw(6, 4, count=3)]
    gradients = torch.autograd.grad(relational(*inputs, temperature=1e-3), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("name", ORDERLESS)
def test_the_order_of_images_changes_nothing(name: str) -> None:
    z1, z2 = draw(16, 32)
    order = torch.randperm(16)
    torch.testing.assert_close(LOSSES[name](z1[order], z2[order]), LOSSES[name](z1, z2), rtol=1e-6, atol=1e-9)
