"""Small encoders, views with masks, and the predictor in the authors' order, for tests of masked methods."""

import torch
from torch import Tensor

from fedssl.augmentation.patch_masks import MaskRecipe, sample_masks
from fedssl.encoders import vit_tiny
from fedssl.encoders.tokens import TokenEncoder, sincos_position_embedding
from fedssl.methods.patch_prediction import PatchPredictor
from fedssl.views import View, Views

WIDTH = 8


def vit(*, pool: str = "token", registers: int = 0, patch: int = 2, size: int = 8, depth: int = 2) -> TokenEncoder:
    torch.manual_seed(0)
    return vit_tiny(
        channels=1,
        size=size,
        patch=patch,
        depth=depth,
        width=WIDTH,
        heads=2,
        pool=pool,
        positions="sincos",
        registers=registers,
    )


def masked_views(recipe: MaskRecipe, batch: int = 5, *, seed: int = 1) -> Views:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 1, 8, 8, generator=generator)
    return Views((View(images, mask=sample_masks(recipe, batch, grid=8 // recipe.patch, generator=generator)),))


def slow_prediction(part: PatchPredictor, tokens: Tensor, visible: Tensor, targets: Tensor, *, side: int) -> Tensor:
    """Predict the target patches ``(m,)`` of one image with all its tokens in the order of its patches.

    ``tokens`` are ``(prefix + n, width)`` and ``visible`` are ``(n,)``. Patches that are neither are left out.
    """
    width = part.mask_token.shape[0]
    places = sincos_position_embedding(side, width).to(tokens.dtype)
    embedded = tokens @ part.embedding.weight.T + part.embedding.bias
    prefix = len(tokens) - len(visible)
    at = dict(zip(visible.tolist(), embedded[prefix:], strict=True))
    present = sorted({*visible.tolist(), *targets.tolist()})
    rows = [at.get(patch, part.mask_token) + places[patch] for patch in present]
    x = part.transformer(torch.stack([*embedded[:prefix], *rows])[None])[0, prefix:]
    output = x @ part.output.weight.T + part.output.bias
    return output[[present.index(patch) for patch in targets.tolist()]]
