"""SimCLR: one or two forward passes."""

import torch

from fedssl.losses import nt_xent
from fedssl.methods.simclr import SimCLR
from fedssl.views import Views
from tests.fedssl.methods.made import HEAD, encoder, views


def test_simclr_in_one_forward_normalizes_both_views_together() -> None:
    method = SimCLR(encoder(), projector=HEAD, temperature=0.5)
    view1, view2 = views()
    z = method.projector(method.encoder(torch.cat((view1, view2))))
    expected = nt_xent(z[:6], z[6:], temperature=0.5)
    torch.testing.assert_close(method.loss(Views.of(view1, view2)), expected, rtol=0, atol=0)


def test_simclr_in_two_forwards_normalizes_each_view_alone() -> None:
    method = SimCLR(encoder(), projector=HEAD, temperature=0.5, concat_views=False)
    view1, view2 = views()
    z1, z2 = method.projector(method.encoder(view1)), method.projector(method.encoder(view2))
    apart = method.loss(Views.of(view1, view2))
    torch.testing.assert_close(apart, nt_xent(z1, z2, temperature=0.5), rtol=0, atol=0)
    method.concat_views = True
    assert abs(method.loss(Views.of(view1, view2)) - apart) > 1e-4
