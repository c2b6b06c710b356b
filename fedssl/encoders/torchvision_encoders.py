"""Vision transformers of torchvision as encoders in stages.

This is a separate module because importing torchvision takes two seconds and the other encoders do not need it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from fedssl.encoders.base import Encoder


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


class ViTEncoder(Encoder, VisionTransformer):
    """VisionTransformer of torchvision; its blocks are the stages, the last layer normalization is the tail.

    Parameters
    ----------
    size, patch, depth, heads, width : int
        Height of an image and of a patch in pixels, blocks, attention heads, length of a token.
    pool : {"token", "mean"}
        h is the class token, or the mean over patches, in which case there is no class token.
    fixed_positions : bool
        Whether positions are `sincos_position_embedding` (and 0 for the class token), which are neither trained,
        exchanged nor part of the ``state_dict``. False: they are weights.
    """

    conv_proj: nn.Conv2d
    _process_input: Any
    class_token: nn.Parameter
    encoder: Any
    heads: nn.Module
    patch_embedding = "conv_proj"
    stages_interchangeable = True

    def __init__(
        self, *, size: int, patch: int, depth: int, heads: int, width: int, pool: str, fixed_positions: bool
    ) -> None:
        super().__init__(
            image_size=size, patch_size=patch, num_layers=depth, num_heads=heads, hidden_dim=width, mlp_dim=4 * width
        )
        self.feature_dim = width
        self.image_size = size
        self.heads = nn.Identity()
        self._pooling = pool
        if pool == "mean":
            del self.class_token
            self.encoder.pos_embedding = nn.Parameter(self.encoder.pos_embedding.detach()[:, 1:].clone())
        if fixed_positions:
            patches = sincos_position_embedding(size // patch, width)
            positions = torch.zeros_like(self.encoder.pos_embedding)
            positions[0, -len(patches) :] = patches
            del self.encoder.pos_embedding
            self.encoder.register_buffer("pos_embedding", positions.detach(), persistent=False)
        self.define_stages(
            stages=tuple(f"encoder.layers.{name}" for name, _ in self.encoder.layers.named_children()),
            widths=(width,) * depth,
            tail=("encoder.ln",),
        )

    def stem(self, images: Tensor) -> Tensor:
        tokens: Tensor = self._process_input(images)
        if self._pooling == "token":
            tokens = torch.cat((self.class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        placed: Tensor = self.encoder.dropout(tokens + self.encoder.pos_embedding)
        return placed

    def pool(self, x: Tensor) -> Tensor:
        h: Tensor = self.encoder.ln(x[:, 0]) if self._pooling == "token" else self.encoder.ln(x).mean(dim=1)
        return h
