"""Preprocessing of images for an encoder, with the pixels and the geometry of its training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.geometry import fit_tensor
from fedssl.datasets.pages import open_pages
from fedssl.datasets.pixels import is_deep_color, to_array
from fedssl.datasets.raster import BACKGROUND, PIXELS, Raster, percentiles_of, unit_values
from fedssl.errors import InputError

Picture = Tensor | Image.Image | str | Path


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of an encoder's images: scaled to [0, 1], fitted to a size, standardized per channel.

    Images of another size are fitted as in training: the shorter side is scaled, and the center cropped
    (`fedssl.datasets.geometry`).
    """

    size: int  # height and width in pixels
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]  # per channel, of pixels in [0, 1]
    background: int = BACKGROUND  # this and the following: see `fedssl.datasets.raster.PixelSettings`
    window: Sequence[float] | None = None
    percentiles: Sequence[float] | None = None
    dtype: str = "auto"

    @property
    def takes_bytes(self) -> bool:
        """Return whether tensors are uint8 or uint16; with a window or percentiles they have the values of files."""
        return self.window is None and self.percentiles is None

    def __call__(self, images: Picture | list[Picture]) -> Tensor:
        """Convert images to float32 ``(batch, channels, size, size)``.

        ``images`` are tensors ``(batch, channels, height, width)``, one image ``(channels, height, width)``, one of
        Pillow, the path of a file, or a list of images of any sizes. Tensors are uint8 or uint16; with a window or
        percentiles they may have any numbers, which are scaled as those of files.
        """
        if isinstance(images, list | tuple) and images:
            return torch.cat([self(image) for image in images])
        return self.standardized(self._unit_values(images))

    def standardized(self, images: Tensor) -> Tensor:
        """Fit and standardize float32 images in [0, 1], ``(batch, channels, height, width)``."""
        pixels = fit_tensor(images, self.size)
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def scaled(self, images: Tensor) -> Tensor:
        """Return images ``(batch, channels, height, width)`` as float32 in [0, 1]."""
        if images.dtype == torch.uint8 or self.takes_bytes:
            return unit_values(images)
        values = images.double()
        lowest, highest = self.percentiles or (0, 100)
        limits = [self.window or percentiles_of(image.cpu().numpy(), (lowest, highest)) for image in values]
        low, high = values.new_tensor(limits).T[..., None, None, None]
        unit = torch.where(high > low, (values - low) / (high - low), 0.0)  # as of files with equal percentiles
        return unit.nan_to_num(0).clamp(0, 1).float()

    def _unit_values(self, images: Any) -> Tensor:
        """Return images as float32 in [0, 1], ``(batch, channels, height, width)``; files in the encoder's size."""
        channels = len(self.mean)
        decoding = Decoding(channels=channels, size=self.size, **{name: getattr(self, name) for name in PIXELS})
        if isinstance(images, Image.Image | str | Path):
            if isinstance(images, Image.Image) and is_deep_color(images):
                raise InputError("Pillow reduces color of 16 bits to 8; give the path of the file")
            pixels = to_array(images, decoding) if isinstance(images, Image.Image) else _decoded(images, decoding)
            return unit_values(torch.tensor(pixels)[None])
        found, remedy = f"a {type(images).__name__}", "give PIL.Image.open(FILE), or convert them first"
        if isinstance(images, np.ndarray):
            found, remedy = f"an array of {images.dtype} and shape {images.shape}", "convert it with torch.from_numpy"
            last = images.ndim in (3, 4) and images.shape[-1] == channels != images.shape[-3]
            remedy += "(images).movedim(-1, -3)" if last else ""
        if isinstance(images, list | tuple):
            found, remedy = f"an empty {type(images).__name__}", "give one image or more"
        if isinstance(images, Tensor):
            allowed = not self.takes_bytes or images.dtype in (torch.uint8, torch.uint16)
            if allowed and images.ndim in (3, 4) and images.shape[-3] == channels:
                return self.scaled(images if images.ndim == 4 else images[None])
            found = f"{images.dtype} of shape {tuple(images.shape)}"
            if images.is_floating_point():
                remedy = "convert values in [0, 1] with (255 * images).round().to(torch.uint8)"
        raise InputError(
            f"images are {found}, but this encoder takes torch.uint8 or torch.uint16 of shape (batch, {channels}, "
            f"height, width), a single image, one of Pillow, the path of a file, and a list of images; {remedy}"
        )


def _decoded(file: str | Path, decoding: Decoding) -> np.ndarray:
    try:
        return decoding(_source(file, decoding))
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{file} cannot be read ({unreadable_reason(error)}); give another file") from error


def _source(file: str | Path, decoding: Decoding) -> str | Path | Page:
    """Return all pages of a file as an image if they are its channels, as with ``dataset.pages=channels``."""
    if decoding.channels not in (1, 3):
        with open_pages(file, max_pixels=decoding.max_pixels, channels=decoding.channels) as pages:
            if pages.count == decoding.channels:
                page = pages.page(0)
                if (page.shape[2] if isinstance(page, Raster) else len(page.getbands())) == 1:
                    return Page(file, 0, decoding.channels)
    return file
