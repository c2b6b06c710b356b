"""Encoders on tokens of patches: the interface for masked methods and smaller views, and operations on patch tokens.

Masked methods (MAE, arXiv 2111.06377; iBOT, arXiv 2111.07832; I-JEPA, arXiv 2301.08243) compute tokens of some of the
patches, or replace patches by a mask token. Methods with local views (DINO, arXiv 2104.14294) encode smaller images.
This module does not import torchvision, so methods can import it without delay.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.encoders.base import Encoder
from fedssl.errors import InputError


def gather_patches(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens at ``indices`` of ``(batch, patches, width)``: ``(batch, n, width)``.

    ``indices`` are int64 ``(batch, n)``, in any order, also repeated.
    """
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[-1]))


def attention(projected: Tensor, *, heads: int) -> Tensor:
    """Return multi-head self-attention before its output projection, ``(batch, tokens, width)``.

    ``projected`` are queries, keys and values of each token, ``(batch, tokens, 3 * width)``. In contrast to
    `torch.nn.MultiheadAttention` there are no transpositions of the batch, which copy it.
    """
    q, k, v = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v)  # (batch, heads, tokens, width / heads)
    return attended.transpose(1, 2).flatten(2)


def sincos_position_embedding(side: int, width: int) -> Tensor:
    """Return MoCo v3's fixed positions (arXiv 2104.02057) of ``side x side`` patches, row by row: ``(side^2, width)``.

    The embedding of a patch in row r and column c concatenates sin(r w_i), cos(r w_i), sin(c w_i) and cos(c w_i), each
    for i = 0 to n - 1 with n = width / 4 and w_i = 10000^(-i / n).
    """
    position = torch.arange(side, dtype=torch.float64)
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.outer(position, frequency)
    half = torch.cat((angle.sin(), angle.cos()), dim=1)
    return torch.cat((half.repeat_interleave(side, dim=0), half.repeat(side, 1)), dim=1).float()


def interpolate_positions(positions: Tensor, side: int) -> Tensor:
    """Interpolate the position embeddings ``(1, grid^2, width)`` of a square bicubically: ``(1, side^2, width)``.

    The first patch of both squares is at the top left, and both squares cover the same image. There is no antialiasing,
    as in DINO. DINO's code adds 0.1 to ``side`` in the ratio of the squares, which is not implemented.
    """
    grid = round(positions.shape[1] ** 0.5)
    identity = torch.eye(grid, dtype=positions.dtype, device=positions.device)
    # One axis as a matrix. Unlike those of the images, the gradient of a matrix product is deterministic on GPUs.
    weights = F.interpolate(identity[None, None], size=(side, grid), mode="bicubic")[0, 0]
    square = positions.view(grid, grid, -1)
    with torch.autocast(positions.device.type, enabled=False):  # positions stay in float32
        return torch.einsum("ar,bc,rcw->abw", weights, weights, square).reshape(1, side * side, -1)


class TokenEncoder(Encoder):
    """Encoder whose stages map tokens ``(batch, tokens, feature_dim)``: prefix tokens, then one token per patch.

    The patches of an image are ordered row by row. ``forward(images)`` equals
    ``pool_tokens(forward_tokens(embed(images)))`` up to rounding. In training mode, and with ``accepts_views``,
    `forward` also accepts smaller views, see `check_view_shape`.
    """

    image_size: int
    patch_size: int  # height and width of a patch in pixels
    num_prefix_tokens: int  # number of tokens before those of the patches: the class token, if any, and the registers

    @property
    def view_step(self) -> int:
        """Return the height and width of a patch in pixels."""
        return self.patch_size

    @property
    def grid(self) -> int:
        """Number of patches per side of an image of ``image_size``."""
        return self.image_size // self.patch_size

    def check_view_shape(self, shape: Sequence[int]) -> None:
        """Accept also smaller squares whose side is a multiple of ``patch_size``."""
        channels, height, width = shape[-3:]
        if height != width or height > self.image_size:
            self.check_image_shape(shape)
            return
        self.check_image_shape((channels, self.image_size, self.image_size))
        if height % self.patch_size:
            below = height - height % self.patch_size
            nearest = [f"{side}x{side}" for side in (below, below + self.patch_size) if side]
            raise InputError(
                f"a view has {height}x{height} pixels, which encoder.patch={self.patch_size} does not divide; "
                f"use views of {' or '.join(nearest)} pixels"
            )

    def embed(self, images: Tensor, *, hidden: Tensor | None = None, mask_token: Tensor | None = None) -> Tensor:
        """Return the tokens of patches with their positions, without prefix tokens: ``(batch, patches, feature_dim)``.

        ``images`` are images or smaller views, ``(batch, channels, side, side)``. ``mask_token`` ``(feature_dim,)``
        replaces the ``hidden`` patches, bool ``(batch, patches)``, before positions are added.
        """
        raise NotImplementedError

    def embed_visible(self, images: Tensor, visible: Tensor) -> Tensor:
        """Return the tokens by `embed` of the ``visible`` patches, int64 ``(batch, n)``: ``(batch, n, feature_dim)``.

        Encoders may override it, so that other patches are not embedded.
        """
        return gather_patches(self.embed(images), visible)

    def forward_tokens(self, patches: Tensor) -> Tensor:
        """Prepend the prefix tokens, run the active stages and normalize the tokens.

        ``patches`` are tokens of `embed`, any number of them: ``(batch, n, feature_dim)``. Return ``(batch,
        num_prefix_tokens + n, feature_dim)``. Stages may not be frozen.
        """
        raise NotImplementedError

    def pool_tokens(self, tokens: Tensor) -> Tensor:
        """Return representations h ``(batch, feature_dim)`` of the tokens that `forward_tokens` returns."""
        raise NotImplementedError
