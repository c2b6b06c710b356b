"""MoCo v3: keys of the target and the scale of the loss."""

import pytest
import torch

from fedssl.encoders import vit_tiny
from fedssl.losses import info_nce
from fedssl.methods.moco_v3 import MoCoV3
from fedssl.views import Views
from tests.fedssl.methods.made import HEAD, encoder, step, views


def make_moco(*, loss_scale: float | None = None) -> MoCoV3:
    return MoCoV3(encoder(), projector=HEAD, predictor=HEAD, temperature=0.2, ema_decay=0.9, loss_scale=loss_scale)


@pytest.mark.parametrize(("loss_scale", "factor"), [(None, 2 * 0.2), (1, 1), (0.5, 0.5)])
def test_moco_loss_has_keys_of_the_target_and_a_scale(loss_scale: float | None, factor: float) -> None:
    method = make_moco(loss_scale=loss_scale)
    step(method)  # so that target and online differ
    view1, view2 = views()
    q1, q2 = (method.predictor(method.projector(method.encoder(view))) for view in (view1, view2))
    k1, k2 = (method.target_projector(method.target_encoder(view)) for view in (view1, view2))
    expected = factor * (info_nce(q1, k2, temperature=0.2) + info_nce(q2, k1, temperature=0.2))
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected, rtol=0, atol=0)
    assert method.local_parts == ("target_encoder", "target_projector")


def test_moco_can_leave_the_patch_embedding_at_its_start() -> None:
    for train in (True, False):
        vit = vit_tiny(channels=1, size=8, depth=1, width=8, heads=1)
        method = MoCoV3(vit, projector=HEAD, predictor=HEAD, temperature=0.2, ema_decay=0.9, train_patches=train)
        frozen = {name for name, parameter in method.encoder.named_parameters() if not parameter.requires_grad}
        assert frozen == (set() if train else {"conv_proj.weight", "conv_proj.bias"})
