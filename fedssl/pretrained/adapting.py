"""Adaption of single tensors to an encoder of another image size or another number of channels."""

import math

import torch
from torch import Tensor

from fedssl.encoders.base import Encoder
from fedssl.encoders.tokens import interpolate_positions

POSITIONS = ("pos_embed", "encoder.pos_embedding")  # names of position embeddings: timm's, and torchvision's


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Convert a kernel ``(out, in, height, width)`` to another number of input channels.

    One channel has the sum over all, so that a gray image has the same output as three equal channels. Otherwise the
    channels are repeated and multiplied by in / channels, which keeps the output for equal channels, too.
    """
    before = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeated = weight.repeat(1, math.ceil(channels / before), 1, 1)[:, :channels]
    return repeated * (before / channels)


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
    side, token, positions = _patches_per_side(encoder), values.get("cls_token"), values.get("pos_embed")
    if side is None or token is None or positions is None or positions.ndim != 3:
        return False
    count = positions.shape[1]
    if encoder.state_dict()["pos_embed"].shape[1] != side * side or _is_square(count) or not _is_square(count - 1):
        return False
    if token.shape != positions[:, :1].shape:
        return False
    values["cls_token"], values["pos_embed"] = token + positions[:, :1], positions[:, 1:]
    return True


def adapt_tensor(name: str, value: Tensor, encoder: Encoder, template: Tensor, *, first_kernel: str) -> Tensor | None:
    """Return the tensor of a checkpoint with the shape of the encoder's ``template``, or None if it does not fit.

    ``first_kernel`` is the name of the encoder's first convolution.
    """
    if value.shape == template.shape:
        return value
    if name == first_kernel and value.ndim == 4 and _without(value, 1) == _without(template, 1):
        return adapt_channels(value, template.shape[1])
    if name in POSITIONS and value.ndim == 3 and value.shape[2] == template.shape[2]:
        side = _patches_per_side(encoder)
        return None if side is None else adapt_positions(value, side=side, prefix=template.shape[1] - side * side)
    return None


def _patches_per_side(encoder: Encoder) -> int | None:
    if encoder.patch_embedding is None or encoder.image_size is None:
        return None
    kernels = [weight for weight in encoder.get_submodule(encoder.patch_embedding).parameters() if weight.ndim == 4]
    return encoder.image_size // kernels[0].shape[-1]


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _without(tensor: Tensor, axis: int) -> list[int]:
    return [length for number, length in enumerate(tensor.shape) if number != axis]
