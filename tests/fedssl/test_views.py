"""A batch of views, and the views that a method accepts."""

import pytest
import torch

from fedssl.views import AcceptedViews, Mask, View, Views

TWO = (["global", "global"], [None, None])
MULTI_CROP = (["global", "global", "local"], [None, None, None])
MASKED = (["global"], ["random"])


def test_tensors_and_their_replacements_have_the_same_order():
    images, small = torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 4, 4)
    hidden, visible = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 4).long()
    targets, numbers = torch.zeros(2, 1, 5).long(), torch.zeros(7).long()
    masks = Mask(hidden, visible, targets), Mask(hidden, hidden_numbers=numbers)
    views = Views((*(View(images, mask=mask) for mask in masks), View(small, "local")), torch.zeros(2).long())
    numbered = views.with_tensors([x + index for index, x in enumerate(views.tensors(), start=1)])
    assert [float(x.flatten()[0]) for x in numbered.images] == [1, 5, 8]
    assert numbered[0].mask.visible.eq(3).all()
    assert numbered[0].mask.targets.eq(4).all()
    assert numbered[1].mask.visible is None
    assert numbered[1].mask.hidden_numbers.eq(7).all()
    assert numbered.labels.eq(9).all()
    assert [view.role for view in numbered] == ["global", "global", "local"]
    assert len(views.tensors()) == 9
    assert [x.shape for x in views.global_images + views.local_images] == [images.shape, images.shape, small.shape]


@pytest.mark.parametrize(
    ("accepted", "views", "expected"),
    [
        (AcceptedViews(), TWO, True),
        (AcceptedViews(), MULTI_CROP, False),
        (AcceptedViews(), MASKED, False),
        (AcceptedViews(local=True), MULTI_CROP, True),
        (AcceptedViews(local=True), (["global", "local"], [None, None]), False),
        (AcceptedViews(max_global=None), (["global"] * 3, [None] * 3), True),
        (AcceptedViews(max_global=2), (["global"] * 3, [None] * 3), False),
        (AcceptedViews(min_global=1, max_global=1, masks=("random",)), MASKED, True),
        (AcceptedViews(min_global=1, max_global=1, masks=("random",)), (["global"], [None]), False),
        (AcceptedViews(min_global=1, max_global=1, masks=("random",)), (["global"], ["block"]), False),
        (AcceptedViews(local=True, masks=("block",)), (["global", "global", "local"], ["block", "block", None]), True),
        (AcceptedViews(local=True, masks=("block",)), (["global", "global", "local"], ["block"] * 3), False),
    ],
)
def test_accepted_views(accepted, views, expected):
    assert accepted.accept(*views) == expected
