"""The geometry of all images: their centered square, as large as the shorter side, scaled to the data set's size.

Training, evaluation and `fedssl.export.Preprocess` share it. The filter is bilinear with antialiasing, and reaches over
the edges of the square. Other programs do the same in two steps that they round: they resize the shorter side and crop
the center.
"""

from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:  # devices may lack it
    from torch import Tensor


def center_square(width: int, height: int) -> tuple[float, float, int]:
    """Return the left edge, the upper edge and the side of the centered square, in pixels."""
    side = min(width, height)
    return (width - side) / 2, (height - side) / 2, side


def fit_image(image: Image.Image, size: int) -> Image.Image:
    """Scale the centered square of an image to ``size``; the image itself if it has this size."""
    if image.size == (size, size):
        return image
    left, top, side = center_square(*image.size)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def fit_tensor(images: "Tensor", size: int) -> "Tensor":
    """Scale the centered squares of images ``(n, channels, height, width)``, floating-point, to ``size``."""
    import torch.nn.functional as F

    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    if height == width:
        return F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    left, top, side = center_square(width, height)
    rows, columns = (
        _weights(length, start=start, side=side, size=size).to(images)
        for length, start in ((height, top), (width, left))
    )
    return rows @ images @ columns.T


def _weights(length: int, *, start: float, side: int, size: int) -> "Tensor":
    """Return the share of each of ``length`` pixels in each of ``size`` scaled ones, float64 ``(size, length)``.

    The filter is a triangle around the center of a scaled pixel, as wide as two scaled pixels and at least two pixels.
    """
    import torch

    scale = side / size
    centers = start + scale * (torch.arange(size, dtype=torch.float64) + 0.5)
    distances = (torch.arange(length, dtype=torch.float64) + 0.5 - centers[:, None]).abs()
    weights = (1 - distances / max(scale, 1)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)
