"""Prediction of hidden patches from the visible ones: the decoder of MAE and the predictor of I-JEPA.

They are transformers on tokens. A block computes what torchvision's does.
"""

import torch
from torch import Tensor, nn

from fedssl.encoders import Encoder
from fedssl.encoders.tokens import (
    TokenEncoder,
    attention,
    gather_patches,
    interpolate_positions,
    sincos_position_embedding,
)
from fedssl.errors import InputError
from fedssl.views import Mask, View

_EPSILON = 1e-6  # of layer normalization, as in vision transformers


def require_tokens(encoder: Encoder, *, method: str, augmentation: str) -> TokenEncoder:
    """Return the encoder; raise `InputError` unless it computes tokens of some of the patches.

    ``augmentation`` is a choice whose views the method accepts.
    """
    if not isinstance(encoder, TokenEncoder):
        raise InputError(
            f"{method} encodes some of the patches of an image, which {type(encoder).__name__} cannot; "
            f"set encoder=vit_tiny augmentation={augmentation}"
        )
    return encoder


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
        x = x + self.out(attention(self.qkv(self.norm1(x)), heads=self._heads))
        transformed: Tensor = x + self.mlp(self.norm2(x))
        return transformed


class Transformer(nn.Sequential):
    """``depth`` blocks and a final layer normalization, on tokens ``(batch, tokens, width)`` with their positions."""

    def __init__(self, width: int, *, depth: int, heads: int) -> None:
        super().__init__(*(Block(width, heads=heads) for _ in range(depth)), nn.LayerNorm(width, eps=_EPSILON))
        for module in self.modules():
            if isinstance(module, nn.Linear):  # as in MAE
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)


class PatchPredictor(nn.Module):
    """A transformer that predicts a vector of each target patch from the encoder's tokens of the visible patches.

    Tokens are mapped to ``width`` and get the fixed positions of their patches (`sincos_position_embedding`); prefix
    tokens have none. A target patch is a mask token, which is trained, with its position. Attention does not depend on
    the order of the tokens, so that the target patches follow the visible ones.

    Parameters
    ----------
    encoder : TokenEncoder
        Encoder of the visible patches.
    part : str
        Name of this part in the settings: ``method.PART_width`` and so on.
    width, depth, heads : int
        Length of a token, a multiple of 4 and of ``heads``; number of blocks; number of attention heads.
    out_features : int
        Length of a predicted vector.
    """

    positions: Tensor

    def __init__(
        self, encoder: TokenEncoder, *, part: str, width: int, depth: int, heads: int, out_features: int
    ) -> None:
        if width % 4 or width % heads:
            raise InputError(
                f"method.{part}_width={width} must be a multiple of 4 and of method.{part}_heads={heads}; change one"
            )
        super().__init__()
        self.embedding = nn.Linear(encoder.feature_dim, width)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.transformer = Transformer(width, depth=depth, heads=heads)
        self.output = nn.Linear(width, out_features)
        self.out_features = out_features
        for layer in (self.embedding, self.output):  # as in the transformer
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        positions = sincos_position_embedding(encoder.grid, width)[None]
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        """Predict the vectors of target patches, ``(batch, blocks, m, out_features)``.

        ``tokens`` are prefix tokens and tokens of the visible patches, ``(batch, prefix + n, feature_dim)``. The target
        blocks of an image are separate sequences, which do not attend to each other.
        """
        visible, targets = mask.indices
        batch, blocks, m = targets.shape
        positions = self._positions(mask.hidden.shape[1]).expand(batch, -1, -1)
        x = self.embedding(tokens)
        prefix, context = x.split([x.shape[1] - visible.shape[1], visible.shape[1]], dim=1)
        x = torch.cat((prefix, context + gather_patches(positions, visible)), dim=1)
        x = x[:, None].expand(-1, blocks, -1, -1).flatten(0, 1)
        masked = self.mask_token + gather_patches(positions, targets.flatten(1)).unflatten(1, (blocks, m)).flatten(0, 1)
        predicted: Tensor = self.output(self.transformer(torch.cat((x, masked), dim=1))[:, -m:])
        return predicted.view(batch, blocks, m, -1)

    def _positions(self, patches: int) -> Tensor:
        """Return the positions of all patches of an image or of a smaller view: ``(1, patches, width)``."""
        side = round(patches**0.5)
        return self.positions if patches == self.positions.shape[1] else interpolate_positions(self.positions, side)


def encode_visible(encoder: TokenEncoder, view: View) -> tuple[Tensor, Mask]:
    """Return prefix tokens and tokens of the visible patches, ``(batch, prefix + n, feature_dim)``, and the mask."""
    assert view.mask is not None  # see `AcceptedViews`
    return encoder.forward_tokens(encoder.embed_visible(view.images, view.mask.indices[0])), view.mask
