"""Computation of random views from drawn parameters, one view at a time or all at once.

The views are those of SimCLR (Chen et al. 2020, appendix A) and BYOL (Grill et al. 2020, appendix B): random resized
crop, flip, color jitter, grayscale, Gaussian blur and solarization, in this order. If a recipe has them, an upside-down
flip, transposition and rotation follow the flip, gamma follows the jitter, and noise is last. Each image has separate
parameters (`fedssl.augmentation.recipe`). For equal parameters the pixels equal torchvision's within 1e-5, or within
1e-4 after a rotation (`fedssl.augmentation.operations`). Differences from a torchvision pipeline of one image at a
time:

- The order of the four jitter operations is drawn once per view and batch, not once per image.
- Blur extends to 3 times the recipe's largest sigma; there is no separate kernel size.
- Saturation, hue and grayscale are skipped for 1 channel; `fedssl.augmentation.Augmentation` rejects other numbers.
- Brightness, contrast and gamma have one factor for all channels of an image.

`apply_view` is the CPU version: one view after the other, a few images at a time, to stay in the cache; it crops and
blurs large images one by one, because the cost of the matrix products is cubic in the image size. `apply_all` is
the GPU version, where each operation costs a launch: all images at once and, as far as the order of the jitter allows,
all views of one size. `fedssl.augmentation.kernel` computes a view in one launch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.augmentation import operations
from fedssl.augmentation.recipe import Parameters, ViewOptions
from fedssl.views import Mask

HUE = 3  # index among the jitter operations
LARGE = 128  # height or width in pixels from which a CPU crops and blurs faster without matrices of the whole width


class Matrices(NamedTuple):
    """Linear maps that depend only on the parameters of a view."""

    rows: Tensor  # crop, resize and flip, ``(batch, size, height)``
    columns: Tensor  # crop, resize and flip, ``(batch, size, width)``
    blur: Tensor | None  # blur of rows and columns, ``(batch, size, size)``; None if the recipe has no blur


@dataclass(frozen=True)
class AugmentationParams:
    """Random parameters of a batch."""

    parameters: Tensor  # values of `Parameters` of each view, ``(18, views, batch)``, on the device of the images
    jitter_orders: Sequence[Sequence[int]]  # of each view; 0 is brightness, 1 contrast, 2 saturation, 3 hue
    masks: Sequence[Mask | None]  # of each view
    matrices: tuple[Matrices, ...] = ()  # matrices of each view if they are precomputed, else empty

    def of(self, view: int, part: slice = slice(None)) -> Parameters:
        """Return the parameters of one view, for some of the images."""
        return Parameters(*self.parameters[:, view, part])

    def subset(self, views: Sequence[int]) -> "AugmentationParams":
        """Return the parameters of some of the views, with their matrices."""
        if len(views) == len(self.masks):
            return self
        parameters = torch.stack([self.parameters[:, k] for k in views], 1)  # a list of indices would synchronize
        matrices = tuple(self.matrices[k] for k in views) if self.matrices else ()
        return AugmentationParams(
            parameters, [self.jitter_orders[k] for k in views], [self.masks[k] for k in views], matrices
        )


def are_large(*sizes: int) -> bool:
    """Return whether images and views of these heights and widths are cropped and blurred one at a time on a CPU."""
    return max(sizes) >= LARGE


def crop_matrices(
    view: ViewOptions, params: Parameters, *, height: int, width: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return the matrices that crop, resize and flip rows and columns."""
    pad = view.pad
    rows = operations.crop_weights(params.top + pad, params.height, size=height + 2 * pad, out=size)
    columns = operations.crop_weights(params.left + pad, params.width, size=width + 2 * pad, out=size, flip=params.flip)
    return (operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)) if pad else (rows, columns)


def blur_matrices(view: ViewOptions, sigma: Tensor, *, size: int) -> Tensor:
    """Return the matrices of blur."""
    return operations.blur_weights(sigma, size=size, radius=blur_radius(view, size))


def blur_radius(view: ViewOptions, size: int) -> int:
    """Return the pixels to each side that blur reads."""
    return min(math.ceil(3 * view.blur_sigma[1]), size - 1)


def jitter(planes: Tensor, *, view: ViewOptions, params: Parameters, order: Sequence[int]) -> Tensor:
    """Apply the enabled jitter operations in this order."""
    color = len(planes) == 3
    steps = (
        (view.brightness > 0, operations.brightness, params.brightness),
        (view.contrast > 0, operations.contrast, params.contrast),
        (view.saturation > 0 and color, operations.saturation, params.saturation),
        (view.hue > 0 and color, operations.hue, params.hue),
    )
    for used, operation, factor in (steps[index] for index in order):
        if used and view.jitter_prob > 0:
            planes = operation(planes, factor)
    return planes


def turn(planes: Tensor, *, view: ViewOptions, params: Parameters) -> Tensor:
    """Flip views upside down, transpose and rotate them."""
    if view.vertical_flip_prob > 0:
        planes = operations.turn(planes, planes.flip(2), params.vertical)
    if view.transpose_prob > 0:
        planes = operations.turn(planes, planes.mT, params.transpose)
    if view.rotation > 0:
        planes = operations.rotate(planes, params.angle)
    return planes


def apply_view(planes: Tensor, *, view: ViewOptions, params: Parameters, order: Sequence[int], size: int) -> Tensor:
    """Compute one view of each image, ``(channels, batch, size, size)``; skip operations that the recipe disables.

    ``planes`` are ``(channels, batch, height, width)`` with values in [0, 1]. ``order`` is that of the jitter
    operations, see `AugmentationParams`.
    """
    if are_large(size, *planes.shape[2:]):
        pad = [view.pad] * 4
        boxes = torch.stack((params.top + view.pad, params.left + view.pad, params.height, params.width, params.flip))
        planes = operations.resized_crops(F.pad(planes, pad, mode="reflect") if view.pad else planes, boxes, size=size)
    else:
        rows, columns = crop_matrices(view, params, height=planes.shape[2], width=planes.shape[3], size=size)
        planes = operations.separable(planes, rows=rows, columns=columns)
    planes = turn(planes, view=view, params=params)
    planes = jitter(planes, view=view, params=params, order=order)
    if view.gamma_prob > 0:
        planes = operations.gamma(planes, params.gamma)
    if view.gray_prob > 0 and len(planes) == 3:
        planes = operations.saturation(planes, params.color)
    if view.blur_prob > 0:
        chosen = params.sigma.nonzero()[:, 0]
        if are_large(size):
            radius = blur_radius(view, size)
            for index, sigma in zip(chosen.tolist(), params.sigma[chosen].tolist(), strict=True):
                planes[:, index] = operations.blur(planes[:, index], sigma, radius=radius)
        else:
            weights = blur_matrices(view, params.sigma[chosen], size=size)
            planes[:, chosen] = operations.separable(planes[:, chosen], rows=weights, columns=weights)
    if view.solarize_prob > 0:
        planes = operations.solarize(planes, params.solarize)
    if view.noise_prob > 0:
        chosen = params.noise.nonzero()[:, 0]
        planes[:, chosen] = operations.add_noise(planes[:, chosen], params.noise[chosen], params.seed[chosen])
    return planes


def apply_all(planes: Tensor, *, views: Sequence[ViewOptions], params: AugmentationParams) -> Tensor:
    """Compute views of one size with precomputed matrices; equals `apply_view` of each, in few launches.

    Images without an operation have neutral parameters; selecting images would synchronize with the device. Return view
    1 of each image, then view 2 and so on, ``(channels, views * batch, size, size)``.
    """
    color = len(planes) == 3
    joined = Parameters(*params.parameters.flatten(1))
    made = [operations.separable(planes, rows=maps.rows, columns=maps.columns) for maps in params.matrices]
    turns = [order.index(HUE) for order in params.jitter_orders]
    drawn = [params.of(index) for index in range(len(views))]
    made = [turn(x, view=v, params=d) for x, v, d in zip(made, views, drawn, strict=True)]
    each = list(zip(views, drawn, params.jitter_orders, turns, strict=True))
    made = [jitter(x, view=v, params=d, order=o[:at]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    if color and any(view.hue > 0 and view.jitter_prob > 0 for view in views):
        made = list(operations.hue(torch.cat(made, 1), joined.hue).chunk(len(views), 1))
    made = [jitter(x, view=v, params=d, order=o[at + 1 :]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    planes = torch.cat(made, 1)
    if any(view.gamma_prob > 0 for view in views):
        planes = operations.gamma(planes, joined.gamma)
    if color and any(view.gray_prob > 0 for view in views):
        planes = operations.saturation(planes, joined.color)
    if any(view.blur_prob > 0 for view in views):
        planes = _blur(planes, params.matrices)
    if any(view.solarize_prob > 0 for view in views):
        planes = operations.solarize(planes, joined.solarize)
    if any(view.noise_prob > 0 for view in views):
        planes = operations.add_noise(planes, joined.noise, joined.seed)
    return planes


def _blur(planes: Tensor, matrices: Sequence[Matrices]) -> Tensor:
    parts = [
        part if maps.blur is None else operations.separable(part, rows=maps.blur, columns=maps.blur)
        for part, maps in zip(planes.chunk(len(matrices), 1), matrices, strict=True)
    ]
    return torch.cat(parts, 1)
