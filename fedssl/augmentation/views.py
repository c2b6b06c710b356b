"""Random views of images for parameters that are drawn: how they are computed, one by one or both at once.

The views of SimCLR (Chen et al. 2020, appendix A) and BYOL (Grill et al. 2020, appendix B): random resized crop, flip,
color jitter, gray, Gaussian blur and solarization, in this order. Every image has parameters of its own
(`fedssl.augmentation.recipe`), and for equal parameters the pixels are torchvision's within 1e-5
(`fedssl.augmentation.operations`). Differences from a torchvision pipeline of one image at a time:

- the order of the four jitter operations is drawn once per view and batch, not once per image;
- blur reaches 3 of the recipe's largest sigma in place of a kernel size that is a setting of its own;
- saturation, hue and gray are left out unless there are 3 channels.

`apply_view` is how a CPU does it: one view after the other, a few images at a time, as caches like it. `apply_both` is
for a GPU, where every operation costs a launch: all images at once and, as far as the order of the jitter allows,
both views. `fedssl.augmentation.kernel` does all of it in one launch per view. The cost of the matrix products grows
with the cube of the image size: right for images up to about 100 pixels wide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedssl.augmentation import operations
from fedssl.augmentation.recipe import Parameters, View

HUE = 3  # among the jitter operations


class Matrices(NamedTuple):
    """Linear maps that depend on nothing but the parameters of a view.

    Attributes
    ----------
    rows, columns : Tensor
        Of crop, resize and flip, ``(batch, size, height)`` and ``(batch, size, width)``.
    blur : Tensor or None
        Of blur, ``(batch, size, size)``, for rows and columns; None if the recipe has none.
    """

    rows: Tensor
    columns: Tensor
    blur: Tensor | None


@dataclass(frozen=True)
class AugmentationParams:
    """What chance says about a batch.

    Attributes
    ----------
    parameters : Tensor
        The numbers of `Parameters` for both views, ``(12, 2, batch)``, on the device of the images.
    jitter_orders : sequence of sequence of int
        Of the jitter operations, for each view: 0 is brightness, 1 contrast, 2 saturation, 3 hue.
    matrices : tuple of Matrices
        Of each view if they are made ahead, else empty.
    """

    parameters: Tensor
    jitter_orders: Sequence[Sequence[int]]
    matrices: tuple[Matrices, ...] = ()

    def of(self, view: int, part: slice = slice(None)) -> Parameters:
        """Parameters of one view, of some of the images."""
        return Parameters(*self.parameters[:, view, part])


def crop_matrices(view: View, params: Parameters, *, height: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Matrices of rows and columns that crop, resize and flip."""
    pad = view.pad
    rows = operations.crop_weights(params.top + pad, params.height, size=height + 2 * pad, out=size)
    columns = operations.crop_weights(params.left + pad, params.width, size=width + 2 * pad, out=size, flip=params.flip)
    return (operations.mirror(rows, pad=pad), operations.mirror(columns, pad=pad)) if pad else (rows, columns)


def blur_matrices(view: View, sigma: Tensor, *, size: int) -> Tensor:
    """Matrices of blur."""
    return operations.blur_weights(sigma, size=size, radius=min(math.ceil(3 * view.blur_sigma[1]), size - 1))


def jitter(planes: Tensor, *, view: View, params: Parameters, order: Sequence[int]) -> Tensor:
    """Those of the jitter operations that are in ``order`` and turned on."""
    color = len(planes) == 3
    steps = (
        (view.brightness > 0, operations.brightness, params.brightness),
        (view.contrast > 0, operations.contrast, params.contrast),
        (view.saturation > 0 and color, operations.saturation, params.saturation),
        (view.hue > 0 and color, operations.hue, params.hue),
    )
    for used, operation, factor in (steps[index] for index in order):
        if used and view.jitter > 0:
            planes = operation(planes, factor)
    return planes


def apply_view(planes: Tensor, *, view: View, params: Parameters, order: Sequence[int], size: int) -> Tensor:
    """Make one view of every image; operations that the recipe turns off for all of them are left out.

    Parameters
    ----------
    planes : Tensor
        Images ``(channels, batch, height, width)`` with values in [0, 1].
    view : View
        The recipe.
    params : Parameters
        Random parameters of every image.
    order : sequence of int
        Order of the jitter operations, see `AugmentationParams`.
    size : int
        Height and width of the views in pixels.

    Returns
    -------
    Tensor
        ``(channels, batch, size, size)``.
    """
    rows, columns = crop_matrices(view, params, height=planes.shape[2], width=planes.shape[3], size=size)
    planes = operations.separable(planes, rows=rows, columns=columns)
    planes = jitter(planes, view=view, params=params, order=order)
    if view.gray > 0 and len(planes) == 3:
        planes = operations.saturation(planes, params.color)
    if view.blur > 0:
        chosen = params.sigma.nonzero()[:, 0]
        weights = blur_matrices(view, params.sigma[chosen], size=size)
        planes[:, chosen] = operations.separable(planes[:, chosen], rows=weights, columns=weights)
    if view.solarize > 0:
        planes = operations.solarize(planes, params.solarize)
    return planes


def apply_both(planes: Tensor, *, views: Sequence[View], params: AugmentationParams) -> Tensor:
    """Make both views at once, with matrices made ahead: what `apply_view` makes of each, in few launches.

    Images of which an operation is off have neutral parameters; nothing is chosen, which one would have to wait for.

    Returns
    -------
    Tensor
        First view 1 of every image, then view 2, ``(channels, 2 * batch, size, size)``.
    """
    color = len(planes) == 3
    both = Parameters(*params.parameters.flatten(1))
    made = [operations.separable(planes, rows=maps.rows, columns=maps.columns) for maps in params.matrices]
    turns = [order.index(HUE) for order in params.jitter_orders]
    each = list(zip(views, (params.of(0), params.of(1)), params.jitter_orders, turns, strict=True))
    made = [jitter(x, view=v, params=d, order=o[:at]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    if color and any(view.hue > 0 and view.jitter > 0 for view in views):
        made = list(operations.hue(torch.cat(made, 1), both.hue).chunk(2, 1))
    made = [jitter(x, view=v, params=d, order=o[at + 1 :]) for x, (v, d, o, at) in zip(made, each, strict=True)]
    planes = torch.cat(made, 1)
    if color and any(view.gray > 0 for view in views):
        planes = operations.saturation(planes, both.color)
    if any(view.blur > 0 for view in views):
        planes = _blur(planes, params.matrices)
    if any(view.solarize > 0 for view in views):
        planes = operations.solarize(planes, both.solarize)
    return planes


def _blur(planes: Tensor, matrices: Sequence[Matrices]) -> Tensor:
    """Blur those views whose recipes have it."""
    parts = [
        part if maps.blur is None else operations.separable(part, rows=maps.blur, columns=maps.blur)
        for part, maps in zip(planes.chunk(2, 1), matrices, strict=True)
    ]
    return torch.cat(parts, 1)
