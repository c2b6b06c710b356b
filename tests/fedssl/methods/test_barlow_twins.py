"""Barlow Twins: each view by itself."""

import torch

from fedssl.losses import barlow_twins
from fedssl.methods.barlow_twins import BarlowTwins
from fedssl.views import Views
from tests.fedssl.methods.made import HEAD, encoder, views


def test_barlow_twins_loss_compares_projections_of_each_view_by_itself() -> None:
    method = BarlowTwins(encoder(), projector=HEAD, lambd=0.01)
    view1, view2 = views()
    z1, z2 = (method.projector(method.encoder(view)) for view in (view1, view2))
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), barlow_twins(z1, z2, lambd=0.01), rtol=0, atol=0)
