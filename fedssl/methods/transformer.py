"""A transformer on tokens, for the decoder of MAE (arXiv 2111.06377) and the predictor of I-JEPA (arXiv 2301.08243).

A block computes what torchvision's does, without its transpositions of the input. On a CPU with two threads a step was
3% to 12% faster, for 16 and 64 tokens of width 96 to 384.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.errors import InputError

_EPSILON = 1e-6  # of layer normalization, as in vision transformers


class Block(nn.Module):
    """Self-attention and an MLP with GELU, each after a layer normalization and with a shortcut.

    It maps tokens ``(batch, tokens, width)`` to tokens of the same shape. The hidden layer is four times as wide.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        transformed: Tensor = x + self.mlp(self.norm2(x))
        return transformed

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self._heads, -1))  # (batch, tokens, 3, heads, width / heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)  # (batch, heads, tokens, width / heads)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


class Transformer(nn.Sequential):
    """Blocks and a final layer normalization, on tokens ``(batch, tokens, width)`` that have their positions.

    Parameters
    ----------
    width : int
        Length of a token; a multiple of ``heads``.
    depth : int
        Number of blocks.
    heads : int
        Number of attention heads.
    """

    def __init__(self, width: int, *, depth: int, heads: int) -> None:
        if width % heads:
            raise InputError(f"a transformer has heads={heads} but width={width} is no multiple of it; change one")
        super().__init__(*(Block(width, heads=heads) for _ in range(depth)), nn.LayerNorm(width, eps=_EPSILON))
        for module in self.modules():
            if isinstance(module, nn.Linear):  # as in MAE
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
