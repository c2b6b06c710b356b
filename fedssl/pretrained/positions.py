"""Position embeddings of weights from elsewhere: other squares of patches, and other tokens before them."""

import math

import torch
from torch import Tensor

from fedssl.encoders.base import Encoder
from fedssl.encoders.tokens import interpolate_positions, sincos_position_embedding

LEARNED = "encoder.pos_embedding"  # of this project's vision transformers
POSITIONS = ("pos_embed", LEARNED)  # names of position embeddings: timm's, and torchvision's
_HALF = 2**-8  # largest error of fixed positions, which are at most 1, in bfloat16


def adapt_positions(positions: Tensor, *, side: int, prefix: int) -> Tensor | None:
    """Interpolate position embeddings ``(1, tokens, width)`` to ``prefix`` tokens and ``side * side`` patches.

    The source's patches are a square, and the tokens before it are class and register tokens, which keep their
    positions. Those without positions in the source get zeros: all, or the registers. None if the source has other
    tokens.
    """
    count = positions.shape[1]
    known = [number for number in dict.fromkeys((prefix, min(prefix, 1), 0)) if _is_square(count - number)]
    if not known:
        return None
    before = known[0]
    grid = math.isqrt(count - before)
    missing = positions.new_zeros(1, prefix - before, positions.shape[2])
    tokens, patches = torch.cat((positions[:, :before], missing), dim=1), positions[:, before:]
    return torch.cat((tokens, interpolate_positions(patches, side) if side != grid else patches), dim=1)


def fold_class_position(values: dict[str, Tensor], encoder: Encoder) -> bool:
    """Add the position of the class token to the token where the encoder has positions of patches alone.

    The official DINOv2 with registers has one; timm's network has positions of patches alone. ``values`` are tensors by
    timm's names, which are replaced. Return whether they were.
    """
    side, token, positions = patches_per_side(encoder), values.get("cls_token"), values.get("pos_embed")
    if side is None or token is None or positions is None or positions.ndim != 3:
        return False
    count = positions.shape[1]
    if encoder.state_dict()["pos_embed"].shape[1] != side * side or _is_square(count) or not _is_square(count - 1):
        return False
    if token.shape != positions[:, :1].shape:
        return False
    values["cls_token"], values["pos_embed"] = token + positions[:, :1], positions[:, 1:]
    return True


def fold_register_positions(values: dict[str, Tensor], encoder: Encoder) -> bool:
    """Add the positions of registers, which timm's networks have, to the registers of an encoder without them.

    Where the number of positions has two meanings, that of the encoder's own square of patches counts. ``values`` are
    tensors by the encoder's names, which are replaced. Return whether they were.
    """
    side, tokens, positions = patches_per_side(encoder), values.get("register_tokens"), values.get(LEARNED)
    if side is None or tokens is None or positions is None or positions.ndim != 3:
        return False
    before = encoder.state_dict()[LEARNED].shape[1] - side * side
    end, count = before + tokens.shape[1], positions.shape[1]
    is_without = _is_square(count - before) or _is_square(count)
    if count - end != side * side and (is_without or not _is_square(count - end)):
        return False
    if tokens.shape != positions[:, before:end].shape:
        return False
    values["register_tokens"] = tokens + positions[:, before:end]
    values[LEARNED] = torch.cat((positions[:, :before], positions[:, end:]), dim=1)
    return True


def has_fixed_positions(tensor: Tensor, encoder: Encoder) -> bool:
    """Return whether a tensor has the fixed positions that the encoder computes, with zeros for prefix tokens."""
    from fedssl.encoders.torchvision_networks import ViTEncoder  # here: slow import

    if not isinstance(encoder, ViTEncoder) or tensor.ndim != 3 or tensor.shape[2] != encoder.feature_dim:
        return False
    for before in {encoder.num_prefix_tokens, 0, 1}:  # of a source with another class token
        if _is_square(tensor.shape[1] - before):
            fixed = sincos_position_embedding(math.isqrt(tensor.shape[1] - before), encoder.feature_dim)
            expected = torch.cat((fixed.new_zeros(before, encoder.feature_dim), fixed))[None]
            if tensor.shape == expected.shape and torch.allclose(tensor.float(), expected, atol=_HALF):
                return True
    return False


def patches_per_side(encoder: Encoder) -> int | None:
    """Return the number of patches along a side of an image; None for an encoder without patches."""
    if encoder.patch_embedding is None or encoder.image_size is None:
        return None
    kernels = [weight for weight in encoder.get_submodule(encoder.patch_embedding).parameters() if weight.ndim == 4]
    return encoder.image_size // kernels[0].shape[-1]


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count
