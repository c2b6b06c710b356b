"""Preprocessing of images for an encoder, with the pixels and the geometry of its training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedssl.config.constraints import check_arguments
from fedssl.datasets.formats import register_formats
from fedssl.datasets.geometry import fit_tensor
from fedssl.datasets.pixels import BACKGROUND, check_window, to_array
from fedssl.errors import InputError

register_formats()  # users open their images themselves

Picture = Tensor | Image.Image

_DEFAULTS: Mapping[str, Any] = {"background": BACKGROUND, "window": None}  # settings of the pixels


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of an encoder's images: scaled to [0, 1], fitted to a size, standardized per channel.

    Images of another size are fitted as in training: the shorter side is scaled, and the center cropped
    (`fedssl.datasets.geometry`). Images of Pillow become pixels by `fedssl.datasets.pixels.to_array`.
    """

    size: int  # height and width in pixels
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]  # per channel, of pixels in [0, 1]
    background: int = BACKGROUND  # of images of Pillow, as in `to_array`
    window: Sequence[float] | None = None  # of images of Pillow, as in `to_array`

    def __call__(self, images: Picture | list[Picture]) -> Tensor:
        """Convert images to float32 ``(batch, channels, size, size)``.

        ``images`` are uint8 ``(batch, channels, height, width)``, one image ``(channels, height, width)``, one of
        Pillow, or a list of images of any sizes.
        """
        if isinstance(images, list | tuple) and images:
            return torch.cat([self(image) for image in images])
        pixels = self._pixels(images).float() / 255
        pixels = fit_tensor(pixels, self.size)
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def _pixels(self, images: Any) -> Tensor:
        """Return images as uint8 ``(batch, channels, height, width)``, those of Pillow in the encoder's size."""
        channels = len(self.mean)
        if isinstance(images, Image.Image) and channels in (1, 3):
            pixels = to_array(images, channels=channels, size=self.size, background=self.background, window=self.window)
            return torch.tensor(pixels)[None]
        found, remedy = f"a {type(images).__name__}", "give PIL.Image.open(FILE), or convert them first"
        if isinstance(images, Tensor):
            if images.dtype == torch.uint8 and images.ndim in (3, 4) and images.shape[-3] == channels:
                return images if images.ndim == 4 else images[None]
            found = f"{images.dtype} of shape {tuple(images.shape)}"
            if images.is_floating_point():
                remedy = "convert values in [0, 1] with (255 * images).round().to(torch.uint8)"
        raise InputError(
            f"images are {found}, but this encoder was trained on torch.uint8 of shape (batch, {channels}, height, "
            f"width) and also takes a single image, one of Pillow, and a list of images; {remedy}"
        )


def pixel_metadata(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a data set's pixels that differ from the default, for the metadata of an encoder."""
    return {f"dataset.{key}": settings[key] for key, value in _DEFAULTS.items() if settings.get(key, value) != value}


def pixel_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``background`` and ``window`` of an encoder's metadata; `InputError` if they are invalid."""
    settings = {key: metadata.get(f"dataset.{key}", value) for key, value in _DEFAULTS.items()}
    check_arguments("dataset", **settings)
    check_window(settings["window"])
    return settings
