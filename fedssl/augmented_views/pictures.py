"""Images and views of any number of channels and any dtype as PNG files in base64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedssl.augmentation import Augmentation
from fedssl.datasets.raster import unit_values
from fedssl.pages import base64_of
from fedssl.views import View

MAX_PIXELS = 256  # height and width of a picture; larger ones are reduced
HIDDEN = 0.85  # opacity of the gray over patches that a mask hides
_GRAY = 0.5


@dataclass(frozen=True)
class Display:
    """How values in [0, 1] become pictures.

    ``bands`` are the channels of red, green and blue, or the only one, for gray. Values from ``low`` to ``high`` are
    shown from black to white.
    """

    bands: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, images: Tensor, bands: Sequence[int] | None) -> "Display":
        """Choose for images ``(n, channels, height, width)``: the first three bands unless they are given.

        The range of images with more than 8 bits is that of their values, without the lowest and highest percent.
        """
        channels = images.shape[1]
        chosen = tuple(bands or ((0,) if channels == 1 else (0, 1, min(2, channels - 1))))
        if images.dtype == torch.uint8:
            return cls(chosen)
        low, high = np.percentile(unit_values(images)[:, list(chosen)].numpy(), (1, 99))
        return cls(chosen, float(low), float(high)) if high > low else cls(chosen)

    @property
    def text(self) -> str:
        """Return what differs from a plain picture; empty if nothing does."""
        of_bands = f"red, green and blue are channels {', '.join(str(band + 1) for band in self.bands)}"
        shown = f"values of {self.low:.3g} to {self.high:.3g} (of 0 to 1) are shown from black to white"
        is_plain = self.bands in ((0,), (0, 1, 2))
        parts = [*([] if is_plain else [of_bands]), *([shown] if (self.low, self.high) != (0, 1) else [])]
        return "; ".join(parts)

    def png(self, values: Tensor) -> str:
        """Return an image ``(channels, height, width)`` with values in [0, 1]."""
        scaled = (values[list(self.bands)] - self.low) / (self.high - self.low)
        pixels = (scaled.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        picture = Image.fromarray(pixels[:, :, 0] if len(self.bands) == 1 else pixels)
        picture.thumbnail((MAX_PIXELS, MAX_PIXELS), Image.Resampling.BOX)
        return base64_of(lambda stream: picture.save(stream, format="png"))


def view_values(view: View, augment: Augmentation, *, patch: int | None) -> Tensor:
    """Return the views of a batch as numbers in [0, 1]; patches of this size that are hidden are nearly gray."""
    values = augment.denormalize(view.images).clamp(0, 1)
    if view.mask is None or patch is None:
        return values
    side = values.shape[-1] // patch
    hidden = view.mask.hidden.view(-1, 1, side, side).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return torch.where(hidden, values.lerp(torch.tensor(_GRAY), HIDDEN), values)
