"""Random masks of patches, drawn on the CPU so that they are equal on every device.

Three kinds:

- ``random``: a fixed number of patches of each image, uniformly (MAE, He et al., arXiv 2111.06377).
- ``block``: rectangles of patches until a random share of the image is hidden (BEiT, arXiv 2106.08254, algorithm 1;
  iBOT, arXiv 2111.07832). Their number differs between images.
- ``multi_block``: several target rectangles of one size, and one context rectangle without the patches of the targets
  (I-JEPA, Assran et al., arXiv 2301.08243, section 3). The context is cut to the smallest one of the batch.

Differences from the authors' code: the patches that are cut from a context of ``multi_block`` are random (I-JEPA cuts
the lowest rows). An image of ``block`` has `TRIALS` candidate rectangles in total; BEiT tries ten for each rectangle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.views import Mask

TRIALS = 20  # rectangles tried per image by ``block``, and arrangements by ``multi_block``


@dataclass(frozen=True, kw_only=True)
class MaskRecipe:
    """Recipe of random masks."""

    kind: str  # "random", "block" or "multi_block", see the module
    patch: int | None  # height and width of a patch in pixels; None if the encoder has no patches, which is rejected
    ratio: float = 0.75  # ``random``: share of hidden patches
    # ``block``: smallest and largest share of hidden patches; the share of an image is uniform.
    ratio_range: Sequence[float] = (0.1, 0.5)
    prob: float = 0.5  # ``block``: probability that a view of an image is masked
    # Smallest and largest height / width of rectangles; uniform in the logarithm for ``block``, uniform for targets.
    aspect_ratio: Sequence[float] = (0.75, 1.5)
    num_targets: int = 4  # ``multi_block``: number of target rectangles
    # ``multi_block``: smallest and largest share of the patches in a target, and in the context before the targets are
    # removed.
    target_scale: Sequence[float] = (0.15, 0.2)
    context_scale: Sequence[float] = (0.85, 1.0)


USED = {  # settings of each kind, besides `kind` and `patch`
    "random": ("ratio",),
    "block": ("ratio_range", "prob", "aspect_ratio"),
    "multi_block": ("aspect_ratio", "num_targets", "target_scale", "context_scale"),
}


def read_mask(recipe: Mapping[str, Any], *, name: str) -> MaskRecipe:
    """Build a `MaskRecipe` from its fields, after validation; ``name`` is that of the recipe, for error messages."""
    kind: Any = recipe.get("kind")
    check_arguments("mask", key=name, kind=kind)
    for key in recipe:
        if key not in ("kind", "patch", *USED[kind]):
            raise InputError(f"{name}.{key} is not a setting of masks of kind {kind}; use {', '.join(USED[kind])}")
    check_arguments("mask", key=name, **recipe)
    if recipe.get("patch") is None:
        raise InputError(f"{name} masks patches, which only a vision transformer has; set encoder=vit_tiny")
    return MaskRecipe(**{field.name: recipe[field.name] for field in fields(MaskRecipe) if field.name in recipe})


def check_grid(recipe: MaskRecipe, *, size: int, name: str) -> None:
    """Reject a mask of views of ``size`` pixels that hides no or all patches."""
    assert recipe.patch is not None
    if size % recipe.patch:
        raise InputError(f"{name}.patch={recipe.patch} does not divide the {size} pixels of a view; set another patch")
    patches = (size // recipe.patch) ** 2
    if recipe.kind == "random":
        hidden = num_hidden(recipe.ratio, patches)
        if not 0 < hidden < patches:
            raise InputError(
                f"{name}.ratio={recipe.ratio} hides {hidden} of {patches} patches; set a smaller encoder.patch"
                + f", or lower {name}.ratio" * (hidden > 0)
            )
    elif patches < 16:
        raise InputError(
            f"{name}.kind={recipe.kind} draws rectangles of patches but a view has only {patches}; set encoder.patch "
            f"to at most {max(1, size // 4)}"
        )
    elif recipe.kind == "multi_block" and _smallest_context(recipe, grid=size // recipe.patch) < 1:
        raise InputError(
            f"{name}.target_scale={list(recipe.target_scale)} lets a target cover the whole context of "
            f"{name}.context_scale={list(recipe.context_scale)}; lower target_scale"
        )


def _smallest_context(recipe: MaskRecipe, *, grid: int) -> int:
    """Return the smallest number of patches in a context of which the largest target is removed."""
    shapes = [number / 100 for number in range(101)]
    largest = max(
        math.prod(_rectangle_size(recipe.target_scale[1], recipe.aspect_ratio, shape, grid=grid)) for shape in shapes
    )
    return math.prod(_rectangle_size(recipe.context_scale[0], (1.0, 1.0), 0.0, grid=grid)) - largest


def num_hidden(ratio: float, patches: int) -> int:
    """Return the number of hidden patches, as in MAE: the visible ones are ``floor(patches * (1 - ratio))``."""
    return patches - int(patches * (1 - ratio))


def sample_masks(recipe: MaskRecipe, batch: int, *, grid: int, generator: torch.Generator) -> Mask:
    """Draw masks for ``batch`` images with ``grid`` patches in a row and in a column, by a CPU ``generator``."""
    if recipe.kind == "random":
        return random_mask(batch, grid**2, ratio=recipe.ratio, generator=generator)
    if recipe.kind == "block":
        return block_mask(recipe, batch, grid=grid, generator=generator)
    return multi_block_mask(recipe, batch, grid=grid, generator=generator)


def random_mask(batch: int, patches: int, *, ratio: float, generator: torch.Generator) -> Mask:
    """Hide `num_hidden` patches of each image, uniformly; the hidden patches are one target block."""
    order = torch.rand(batch, patches, generator=generator).argsort(dim=1)
    visible, masked = order.split([patches - num_hidden(ratio, patches), num_hidden(ratio, patches)], dim=1)
    hidden = torch.ones(batch, patches, dtype=torch.bool).scatter_(1, visible, False)
    targets = masked.sort(dim=1).values[:, None]
    return Mask(hidden, visible.sort(dim=1).values, targets, padded_numbers(hidden))


def block_mask(recipe: MaskRecipe, batch: int, *, grid: int, generator: torch.Generator) -> Mask:
    """Hide random rectangles of patches of each image, until its share is reached.

    A candidate is used if the image then has at most its share of hidden patches. Its area is uniform between a 9th of
    the grid (at least one patch) and the patches that are left of the share.
    """
    uniform = torch.rand(batch, 2 + 4 * TRIALS, generator=generator)
    low, high = recipe.ratio_range
    limit = ((low + (high - low) * uniform[:, 0]) * grid**2).floor()
    limit = torch.where(uniform[:, 1] < recipe.prob, limit, 0)
    smallest = max(1, (grid // 3) ** 2)
    hidden = torch.zeros(batch, grid, grid, dtype=torch.bool)
    log_low, log_high = map(math.log, recipe.aspect_ratio)
    for area, shape, top, left in uniform[:, 2:].reshape(batch, TRIALS, 4).permute(1, 2, 0):
        rest = limit - hidden.flatten(1).sum(dim=1)
        target = smallest + (rest - smallest).clamp(min=0) * area
        aspect = (log_low + (log_high - log_low) * shape).exp()
        height, width = (target * aspect).sqrt().round(), (target / aspect).sqrt().round()
        more = hidden | _rectangles(top, left, height, width, grid=grid)
        fits = (height >= 1) & (width >= 1) & (height < grid) & (width < grid)
        fits &= (more.flatten(1).sum(dim=1) <= limit) & (rest > 0)
        hidden = torch.where(fits[:, None, None], more, hidden)
    return Mask(hidden.flatten(1), hidden_numbers=padded_numbers(hidden.flatten(1)))


def padded_numbers(hidden: Tensor) -> Tensor:
    """Return the numbers of the hidden patches of ``(batch, patches)``, ``image * patches + patch``, and repetitions.

    The first numbers are repeated up to a multiple of a 16th of all patches, at least one, so that batches have few
    sizes: CUDA graphs are captured per size. Without hidden patches the numbers are those of the first patches.
    """
    hidden_numbers = hidden.flatten().nonzero()[:, 0]
    step = math.ceil(hidden.numel() / 16)
    size = step * max(1, math.ceil(len(hidden_numbers) / step))
    return hidden_numbers[torch.arange(size) % len(hidden_numbers)] if len(hidden_numbers) else torch.arange(size)


def multi_block_mask(recipe: MaskRecipe, batch: int, *, grid: int, generator: torch.Generator) -> Mask:
    """Draw target rectangles and a context without their patches; sizes are equal within the batch.

    The positions of all rectangles are drawn `TRIALS` times. An image has the first arrangement whose context has at
    least a 10th of the patches, or else the one with the largest context. All targets of the last arrangement are at
    the same position, so that every context has a patch, see `check_grid`.
    """
    shape = torch.rand(3, generator=generator).tolist()
    low, high = recipe.target_scale
    target = _rectangle_size(low + (high - low) * shape[0], recipe.aspect_ratio, shape[1], grid=grid)
    low, high = recipe.context_scale
    context = _rectangle_size(low + (high - low) * shape[2], (1.0, 1.0), 0.0, grid=grid)
    positions = torch.rand(batch, TRIALS, recipe.num_targets + 1, 2, generator=generator)
    positions[:, -1, 1:-1] = positions[:, -1, :1]
    sizes = torch.tensor([target] * recipe.num_targets + [context], dtype=torch.float32)
    blocks = _rectangles(*positions.unbind(-1), *sizes.unbind(-1), grid=grid).flatten(-2)
    targets, contexts = blocks[:, :, :-1], blocks[:, :, -1] & ~blocks[:, :, :-1].any(dim=2)
    left = contexts.sum(dim=-1)
    enough = left >= max(1, grid**2 // 10)
    chosen = torch.where(enough.any(dim=1), enough.byte().argmax(dim=1), left.argmax(dim=1))
    targets, context_patches = targets[torch.arange(batch), chosen], contexts[torch.arange(batch), chosen]
    priority = context_patches + torch.rand(batch, grid**2, generator=generator)  # context patches first, in any order
    visible = priority.argsort(dim=1, descending=True)[:, : int(context_patches.sum(dim=1).min())].sort(dim=1).values
    hidden = torch.ones(batch, grid**2, dtype=torch.bool).scatter_(1, visible, False)
    indices = targets.nonzero()[:, 2].view(batch, recipe.num_targets, target[0] * target[1])
    return Mask(hidden, visible, indices)


def _rectangle_size(scale: float, aspect_ratio: Sequence[float], shape: float, *, grid: int) -> tuple[int, int]:
    """Return height and width in patches of a rectangle that covers a share of the grid."""
    area, aspect = scale * grid**2, aspect_ratio[0] + (aspect_ratio[1] - aspect_ratio[0]) * shape
    height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    return min(max(height, 1), grid), min(max(width, 1), grid)


def _rectangles(top: Tensor, left: Tensor, height: Tensor, width: Tensor, *, grid: int) -> Tensor:
    """Return rectangles ``(..., grid, grid)``, bool; positions are uniform numbers in [0, 1), sizes are in patches."""
    rows = _interval(top, height, grid=grid)
    columns = _interval(left, width, grid=grid)
    return rows[..., :, None] & columns[..., None, :]


def _interval(start: Tensor, length: Tensor, *, grid: int) -> Tensor:
    first = (start * (grid - length + 1)).floor()[..., None]
    cells = torch.arange(grid)
    return (cells >= first) & (cells < first + length[..., None])
