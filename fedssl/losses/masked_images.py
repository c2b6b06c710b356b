"""Losses that predict hidden parts of an image: its pixels (MAE) or its features (I-JEPA)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses.precision import at_least_float32


def patchify(images: Tensor, patch: int) -> Tensor:
    """Divide images ``(batch, channels, height, width)`` into squares of ``patch`` pixels, row by row.

    Return ``(batch, patches, patch * patch * channels)``. Values of a patch are ordered by row, column and channel, as
    in MAE. Raise `InputError` if ``patch`` does not divide height and width.
    """
    batch, channels, height, width = images.shape
    if patch < 1 or height % patch or width % patch:
        raise InputError(f"patch={patch} but images have {height} x {width} pixels; pass a divisor of both")
    grid = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def masked_reconstruction(prediction: Tensor, patches: Tensor, *, normalize: bool = True) -> Tensor:
    """Return MAE's loss (arXiv 2111.06377): the mean squared error of the pixels of the masked patches, a scalar >= 0.

    Predicted pixels and the true ones (see `patchify`, without gradient) are ``(batch, masked, pixels)``. ``normalize``
    standardizes the true pixels of each patch: its variance has divisor ``pixels - 1`` and 1e-6 added, as in the
    authors' code.
    """
    target = standardize_patches(patches.detach()) if normalize else at_least_float32(patches.detach())
    return F.mse_loss(at_least_float32(prediction), target)


def standardize_patches(patches: Tensor) -> Tensor:
    """Standardize the pixels of each patch ``(..., pixels)``, see `masked_reconstruction`."""
    patches = at_least_float32(patches)
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) * torch.rsqrt(variance + 1e-6)


def ijepa(prediction: Tensor, target: Tensor) -> Tensor:
    """Return I-JEPA's loss (arXiv 2301.08243): the distance of predicted and true features of the target blocks.

    The paper has the squared distance. This is the authors' code: the smooth L1 distance, ``d^2 / 2`` for a difference
    d of less than 1 and ``|d| - 1/2`` for others, its mean over all features, and targets standardized over the
    features of each patch (layer normalization without weights). Predictions, and features of the target encoder
    (without gradient), are ``(batch, blocks, n, dim)``. The result is a scalar >= 0.
    """
    target = at_least_float32(target.detach())
    return F.smooth_l1_loss(at_least_float32(prediction), F.layer_norm(target, target.shape[-1:]))
