"""SimSiam: its symmetric loss."""

import torch

from fedssl.losses import negative_cosine
from fedssl.methods.simsiam import SimSiam
from fedssl.views import Views
from tests.fedssl.methods.made import HEAD, encoder, views


def test_simsiam_loss_is_symmetric_and_stops_gradients_of_targets() -> None:
    method = SimSiam(encoder(), projector=HEAD, predictor=HEAD)
    view1, view2 = views()
    z1, z2 = (method.projector(method.encoder(view)) for view in (view1, view2))
    p1, p2 = method.predictor(z1), method.predictor(z2)
    expected = negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected)
    assert not negative_cosine(p1.detach(), z2).requires_grad  # no path left to the projector
