"""Recipes of random views, and the random parameters of each image of a batch.

Distributions are those of torchvision's ``RandomResizedCrop``, ``ColorJitter`` (applied as a whole with one
probability), ``RandomGrayscale``, ``GaussianBlur`` and ``RandomSolarize``. All parameters are functions of uniform
random numbers, whose count per image does not depend on the recipe: changing one setting does not change the draws of
the others, and the parameters of an image do not depend on later images. `FURTHER` settings need `FURTHER_UNIFORMS`
more, which are drawn after these if a recipe uses one of them.

The exponent of ``gamma`` is drawn from a range, as in nnU-Net (0.7 to 1.5; Isensee et al., Nature Methods 2021) and
MONAI (0.5 to 4.5), and its logarithm is uniform, as in TorchIO: half and twice the exponent are equally probable. In
contrast to nnU-Net and MONAI, values are taken to be in [0, 1], not between the extremes of the image. The standard
deviation of noise is uniform in a range, as in TorchIO, and images are clipped, as by torchvision's ``GaussianNoise``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.augmentation.patch_masks import MaskRecipe, read_mask
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.views import GLOBAL

CANDIDATES = 10  # crop boxes tried per image before the center crop, as in torchvision
BOX_UNIFORMS = 2 * CANDIDATES + 2
UNIFORMS = BOX_UNIFORMS + 10  # random numbers per image and view
FURTHER = ("vertical_flip_prob", "transpose_prob", "rotation", "gamma_prob", "noise_prob")  # settings; 0 disables them
FURTHER_UNIFORMS = 8  # random numbers per image and view for these
RGB = ("saturation", "hue", "gray_prob")  # settings of operations on images with 3 channels
SEEDS = 2**24  # number of seeds of noise, all of which float32 represents


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Recipe of one view. Probabilities are per image; 0 disables an operation, and the defaults change nothing."""

    # Smallest and largest fraction of the image's area in a crop, in [0, 1]; ``[1, 1]`` keeps the whole image.
    crop_scale: Sequence[float] = (1.0, 1.0)
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)  # smallest and largest width / height of a crop
    # Width in pixels of the mirrored border, into which crops may extend. With ``crop_scale`` ``[1, 1]`` the image is
    # shifted by up to ``pad`` pixels in each direction.
    pad: int = 0
    flip_prob: float = 0.0  # of a left-right flip
    jitter_prob: float = 1.0  # of the color jitter as a whole
    brightness: float = 0.0  # the factor is uniform in [max(0, 1 - value), 1 + value]
    contrast: float = 0.0  # as for brightness
    saturation: float = 0.0  # as for brightness
    hue: float = 0.0  # largest rotation in either direction as a fraction of a full turn, in [0, 0.5]
    gray_prob: float = 0.0  # of grayscale
    blur_prob: float = 0.0  # of Gaussian blur
    blur_sigma: Sequence[float] = (0.1, 2.0)  # smallest and largest standard deviation of it, in pixels of the view
    solarize_prob: float = 0.0  # of inverting values of at least 0.5
    vertical_flip_prob: float = 0.0  # of an upside-down flip
    # Of exchanging rows and columns, after the flips. All three with 0.5 give the eight symmetries of a square.
    transpose_prob: float = 0.0
    rotation: float = 0.0  # largest rotation of the crop in either direction, in degrees, in [0, 180]; corners are 0
    gamma_prob: float = 0.0  # of raising values in [0, 1] to a power, after the color jitter
    gamma: Sequence[float] = (0.7, 1.5)  # smallest and largest exponent
    noise_prob: float = 0.0  # of Gaussian noise, the last operation
    noise_std: Sequence[float] = (0.0, 0.1)  # smallest and largest standard deviation of it, for values in [0, 1]

    @property
    def uses_further(self) -> bool:
        """Return whether a setting of `FURTHER` is above 0."""
        return any(vars(self)[name] > 0 for name in FURTHER)


RECIPE_KEYS = ("count", "size", "role", "mask")  # fields of a recipe, besides those of its view


@dataclass(frozen=True, kw_only=True)
class ViewRecipe:
    """Recipe of one or several views with equal settings."""

    view: ViewOptions  # random operations
    count: int = 1  # number of views, each with separate random parameters; 0 disables the recipe
    size: float = 1.0  # height and width of the views as a fraction of the size of the images, in (0, 1]
    role: str = GLOBAL  # see `fedssl.views.View`
    mask: MaskRecipe | None = None  # random masks; None masks nothing
    name: str = "augmentation.views"  # of the settings, for error messages


def read_recipe(recipe: Mapping[str, Any], *, name: str) -> ViewRecipe:
    """Build a `ViewRecipe` from all of its fields, after validation; ``name`` as in `read_view`."""
    own = {key: recipe[key] for key in RECIPE_KEYS if key in recipe}
    check_arguments("view", key=name, **own)
    if own.get("mask") is not None:
        own["mask"] = read_mask(own["mask"], name=f"{name}.mask")
    others = {key: value for key, value in recipe.items() if key not in own}
    return ViewRecipe(view=read_view(others, name=name, further_keys=RECIPE_KEYS), name=name, **own)


def read_view(recipe: Mapping[str, Any], *, name: str, further_keys: Sequence[str] = ()) -> ViewOptions:
    """Build a `ViewOptions` from some of its fields, after validation.

    ``name`` is that of the recipe, and ``further_keys`` are its other settings, for error messages.
    """
    defaults = asdict(ViewOptions())
    for key in recipe:
        if key not in defaults:
            known = [*defaults, *further_keys]
            near = get_close_matches(key, known) or known
            raise InputError(f"{name}.{key} is not a setting of a view; use one of: {', '.join(near)}")
    check_arguments("view", key=name, **recipe)
    return ViewOptions(**recipe)


class Parameters(NamedTuple):
    """Random parameters of one view, each ``(batch,)``; neutral values disable an operation for an image."""

    top: Tensor  # crop in pixels of the image; negative in the border
    left: Tensor  # crop in pixels of the image; negative in the border
    height: Tensor
    width: Tensor
    flip: Tensor  # 1 where the view is flipped, else 0
    brightness: Tensor  # factor; 1 changes nothing
    contrast: Tensor  # factor; 1 changes nothing
    saturation: Tensor  # factor; 1 changes nothing
    hue: Tensor  # rotation in full turns; 0 changes nothing
    color: Tensor  # saturation of the grayscale step; 0 is gray, 1 changes nothing
    sigma: Tensor  # standard deviation of the blur in pixels of the view; 0 changes nothing
    solarize: Tensor  # 1 where values of at least 0.5 are inverted, else 0
    vertical: Tensor  # 1 where the view is flipped upside down, else 0
    transpose: Tensor  # 1 where rows and columns are exchanged, else 0
    angle: Tensor  # rotation in degrees, counter-clockwise; 0 changes nothing
    gamma: Tensor  # exponent; 1 changes nothing
    noise: Tensor  # standard deviation of noise; 0 changes nothing
    seed: Tensor  # of the noise, an integer below `SEEDS`


def parameters(view: ViewOptions, uniform: Tensor, *, height: int, width: int) -> Parameters:
    """Map uniform numbers in [0, 1) to the parameters of a view of images of this size.

    ``uniform`` is ``(batch, UNIFORMS + FURTHER_UNIFORMS)``, or ``(batch, UNIFORMS)`` without settings in `FURTHER`.
    """
    if uniform.shape[1] == UNIFORMS:
        uniform = F.pad(uniform, (0, FURTHER_UNIFORMS))
    boxes, others = uniform[:, :BOX_UNIFORMS], uniform[:, BOX_UNIFORMS:].unbind(1)
    flip, jitter, brightness, contrast, saturation, hue, gray, blur, sigma, solarize, *further = others
    vertical, transpose, angle, gamma, exponent, noise, deviation, seed = further
    jittered = jitter < view.jitter_prob

    def factor(number: Tensor, strength: float) -> Tensor:
        return torch.where(jittered, _between(number, max(0.0, 1 - strength), 1 + strength), 1.0)

    return Parameters(
        *crop_boxes(boxes, height=height, width=width, scale=view.crop_scale, ratio=view.crop_ratio, pad=view.pad),
        flip=flip < view.flip_prob,
        brightness=factor(brightness, view.brightness),
        contrast=factor(contrast, view.contrast),
        saturation=factor(saturation, view.saturation),
        hue=torch.where(jittered, _between(hue, -view.hue, view.hue), 0.0),
        color=gray >= view.gray_prob,
        sigma=torch.where(blur < view.blur_prob, _between(sigma, *view.blur_sigma), 0.0),
        solarize=solarize < view.solarize_prob,
        vertical=vertical < view.vertical_flip_prob,
        transpose=transpose < view.transpose_prob,
        angle=_between(angle, -view.rotation, view.rotation),
        gamma=torch.where(gamma < view.gamma_prob, _between(exponent, *map(math.log, view.gamma)).exp(), 1.0),
        noise=torch.where(noise < view.noise_prob, _between(deviation, *view.noise_std), 0.0),
        seed=(seed * SEEDS).floor(),
    )


def crop_boxes(
    uniform: Tensor, *, height: int, width: int, scale: Sequence[float], ratio: Sequence[float], pad: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map uniform random numbers to boxes with the distribution of torchvision's ``RandomResizedCrop``.

    The area is uniform in ``scale`` and the logarithm of width / height is uniform in that of ``ratio``. The box is the
    first of ten candidates that fits, at a uniform position, or else the largest center crop with an allowed ratio.
    With a border of ``pad`` pixels, boxes have a uniform position in the padded image, as in ``RandomCrop``.

    ``uniform`` are numbers in [0, 1), ``(batch, BOX_UNIFORMS)``: areas, ratios, two positions. Return top, left, height
    and width in pixels, each ``(batch,)``, integers as floats.
    """
    area = height * width * _between(uniform[:, :CANDIDATES], *scale)
    aspect = _between(uniform[:, CANDIDATES:-2], math.log(ratio[0]), math.log(ratio[1])).exp()
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first, any_fits = fits.byte().argmax(1, keepdim=True), fits.any(1)
    allowed = min(max(width / height, ratio[0]), ratio[1])
    box_height = torch.where(any_fits, heights.gather(1, first)[:, 0], min(height, round(width / allowed)))
    box_width = torch.where(any_fits, widths.gather(1, first)[:, 0], min(width, round(height * allowed)))
    anywhere = any_fits | (pad > 0)
    top = torch.where(anywhere, uniform[:, -2] * (height + 2 * pad - box_height + 1), (height - box_height) / 2).floor()
    left = torch.where(anywhere, uniform[:, -1] * (width + 2 * pad - box_width + 1), (width - box_width) / 2).floor()
    return top - pad, left - pad, box_height, box_width


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform
