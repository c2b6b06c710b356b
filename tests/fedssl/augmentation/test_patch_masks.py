"""Random masks of patches."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedssl.augmentation.patch_masks import (
    MaskRecipe,
    block_mask,
    multi_block_mask,
    num_hidden,
    padded_numbers,
    random_mask,
)
from fedssl.errors import InputError
from tests.fedssl.augmentation.made import augmentation, generator, random_images

BLOCK = MaskRecipe(kind="block", patch=1, aspect_ratio=(0.3, 3.33))
MULTI = MaskRecipe(kind="multi_block", patch=1)


def is_rectangle(cells: torch.Tensor) -> bool:
    rows, columns = cells.any(dim=1).nonzero().flatten(), cells.any(dim=0).nonzero().flatten()
    filled = cells[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return bool(filled.all())


@pytest.mark.parametrize(("ratio", "patches", "hidden"), [(0.75, 64, 48), (0.75, 196, 147), (0.5, 9, 5), (0.6, 16, 10)])
def test_a_random_mask_hides_a_fixed_number_of_patches(ratio, patches, hidden):
    # MAE keeps int(patches * (1 - ratio)): 16 of 64, 49 of 196, int(4.5) = 4 of 9, int(6.4) = 6 of 16.
    mask = random_mask(50, patches, ratio=ratio, generator=generator())
    assert num_hidden(ratio, patches) == hidden
    assert mask.hidden.sum(dim=1).eq(hidden).all()
    assert mask.visible.shape == (50, patches - hidden)
    assert mask.targets.shape == (50, 1, hidden)
    both = torch.cat((mask.visible, mask.targets[:, 0]), dim=1).sort(dim=1).values
    assert both.eq(torch.arange(patches)).all()
    assert mask.hidden.gather(1, mask.targets[:, 0]).all()
    assert not mask.hidden.gather(1, mask.visible).any()
    assert mask.visible.diff(dim=1).gt(0).all()
    assert mask.targets.diff(dim=2).gt(0).all()


def test_blocks_hide_at_most_their_share_with_their_probability():
    grid = 8
    hidden = block_mask(BLOCK, 2000, grid=grid, generator=generator()).hidden
    shares = hidden.double().mean(dim=1)
    assert shares.max() <= 0.5
    masked = shares[shares > 0]
    assert len(masked) / 2000 == pytest.approx(0.5, abs=0.05)
    # The shares are uniform in [0.1, 0.5]; rectangles reach them except for a few patches.
    assert 0.2 < masked.mean() <= 0.3
    assert masked.quantile(0.9) > 0.4


def test_numbers_of_hidden_patches_are_padded_to_few_sizes():
    """3 images of 16 patches: sizes are multiples of 3."""
    hidden = torch.zeros(3, 16, dtype=torch.bool)
    assert padded_numbers(hidden).tolist() == [0, 1, 2]
    hidden[0, 5] = True
    assert padded_numbers(hidden).tolist() == [5, 5, 5]
    hidden[2, 0] = hidden[2, 15] = True
    assert padded_numbers(hidden).tolist() == [5, 32, 47]
    hidden[1, 3] = True
    assert padded_numbers(hidden).tolist() == [5, 19, 32, 47, 5, 19]
    assert padded_numbers(hidden | True).tolist() == list(range(48))


@pytest.mark.parametrize("draw", [partial(random_mask, ratio=0.75), partial(block_mask, BLOCK)])
def test_masks_have_the_numbers_of_their_hidden_patches(draw):
    sizes = set()
    for seed in range(20):
        mask = draw(32, **({"patches": 64} if draw.func is random_mask else {"grid": 8}), generator=generator(seed))
        assert mask.hidden_numbers.unique().tolist() == mask.hidden.flatten().nonzero()[:, 0].tolist()
        sizes.add(len(mask.hidden_numbers))
    assert len(sizes) <= 4
    assert all(size % 128 == 0 for size in sizes)


@pytest.mark.parametrize("grid", [4, 8, 14])
def test_multi_block_targets_are_rectangles_outside_of_the_context(grid):
    source = generator()
    for _ in range(20):
        mask = multi_block_mask(MULTI, 16, grid=grid, generator=source)
        targets = torch.zeros(16, 4, grid**2, dtype=torch.bool).scatter_(2, mask.targets, True)
        assert all(map(is_rectangle, targets.view(-1, grid, grid)))
        assert not (targets.any(dim=1) & ~mask.hidden).any()
        assert mask.visible.shape[1] == (~mask.hidden).sum(dim=1).min() == (~mask.hidden).sum(dim=1).max() >= 1
        assert not mask.hidden.gather(1, mask.visible).any()
        share = mask.targets.shape[2] / grid**2
        assert 0.15 * 0.7 < share < 0.2 * 1.4  # rounded to whole patches


def test_contexts_and_targets_have_their_shares_of_the_patches():
    """On a grid of 8, 0.25 to 1 of 64 patches are squares of 4 to 8 patches a side; a target is 1 patch."""
    recipe = replace(MULTI, num_targets=1, target_scale=(1 / 64, 1 / 64), context_scale=(0.25, 1.0))
    source, sizes = generator(), set()
    for _ in range(60):
        mask = multi_block_mask(recipe, 1, grid=8, generator=source)
        assert mask.targets.shape == (1, 1, 1)
        context = ~mask.hidden[0]
        covered = context.clone()
        covered[mask.targets.flatten()] = True  # a context lacks the target that it contained
        cells = covered if is_rectangle(covered.view(8, 8)) else context
        assert is_rectangle(cells.view(8, 8))
        sizes.add(int(cells.sum()))
    assert sizes == {16, 25, 36, 49, 64}


@pytest.mark.parametrize("kind", ["random", "block", "multi_block"])
def test_views_have_masks_that_depend_on_the_generator_alone(kind):
    images = random_images(9, 3, 16, 16)
    make = augmentation({"mask": {"kind": kind, "patch": 2}}, {})
    draw = partial(make.sample_params, [5, 4], image_shape=(3, 16, 16), device=torch.device("cpu"))
    sampled = [list(draw(generator=generator(seed))) for seed in (0, 0, 1)]
    for one, other in zip(sampled[0], sampled[1], strict=True):
        assert one.masks[1] is None
        assert torch.equal(one.masks[0].hidden, other.masks[0].hidden)
        assert one.masks[0].hidden.dtype == torch.bool
        for name in ("visible", "targets"):
            part = getattr(one.masks[0], name)
            assert (part is None) == (kind == "block")
            assert part is None or (part.dtype == torch.int64 and torch.equal(part, getattr(other.masks[0], name)))
    assert not torch.equal(sampled[0][0].masks[0].hidden, sampled[2][0].masks[0].hidden)
    assert [len(batch.masks[0].hidden) for batch in sampled[0]] == [5, 4]
    assert torch.equal(make(images, generator())[1], augmentation({}, {})(images, generator())[1])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"kind": "disk", "patch": 2}, "views.0.mask.kind=disk must be random or block or multi_block"),
        ({"patch": 2}, "mask.kind=null must be random or"),
        ({"kind": "random", "patch": None}, "only a vision transformer has; set encoder=vit_tiny"),
        ({"kind": "random", "patch": 0}, "mask.patch=0 must be an integer from 1"),
        ({"kind": "random", "patch": 2, "ratio": 1.0}, "ratio=1.0 must be a number above 0 and below 1"),
        ({"kind": "random", "patch": 2, "ratio": 0}, "ratio=0 must be a number above 0"),
        ({"kind": "random", "patch": 2, "prob": 0.5}, "mask.prob is not a setting of masks of kind random; use ratio"),
        ({"kind": "block", "patch": 2, "prob": 0}, "prob=0 must be a number above 0 and at most 1"),
        ({"kind": "block", "patch": 2, "ratio_range": [0.5, 0.1]}, r"ratio_range=\[0.5, 0.1\] must be a list"),
        ({"kind": "multi_block", "patch": 2, "num_targets": 0}, "num_targets=0 must be an integer from 1"),
        ({"kind": "multi_block", "patch": 2, "target_scale": [0.2, 2]}, "above 0 and at most 1"),
        ({"kind": "multi_block", "patch": 4, "target_scale": [0.2, 0.9]}, "whole context.*; lower target_scale"),
        ({"kind": "random", "patch": 3}, "mask.patch=3 does not divide the 16 pixels of a view"),
        ({"kind": "random", "patch": 16}, "hides 1 of 1 patches; set a smaller encoder.patch, or lower .*ratio"),
        ({"kind": "multi_block", "patch": 8}, "but a view has only 4; set encoder.patch to at most 4"),
    ],
)
def test_bad_masks(mask, message):
    with pytest.raises(InputError, match=message):
        augmentation({"mask": mask}, {})
