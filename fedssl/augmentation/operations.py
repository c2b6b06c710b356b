"""Image operations on batches, with separate parameters for each image.

Images are float *planes* ``(channels, batch, height, width)`` with values in [0, 1]: the plane of a channel is one
contiguous block, which makes color operations fast on a CPU. Each operation returns new planes and equals, image by
image, the function of ``torchvision.transforms.v2.functional`` that its docstring names, on float tensors. Cropping,
resizing, flipping and blurring are linear and separable: each is a pair of matrix products (`separable`). Their cost is
cubic in the size; `resized_crops` and `blur` do the same to large images, one at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.machine.devices import is_gpu

TILE = 16  # rows or columns that `blur` computes in one product; larger tiles multiply more zeros
LUMINANCE = (0.2989, 0.587, 0.114)  # red, green and blue in the gray value (ITU-R BT.601)


def separable(planes: Tensor, *, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply one linear map to the rows and one to the columns of each image, ``(channels, batch, height, width)``.

    ``rows`` are ``(batch, new height, height)``, ``columns`` ``(batch, new width, width)``; the result is ``(channels,
    batch, new height, new width)``.
    """
    if is_gpu(planes.device):  # all channels in two products, to save launches
        channels, batch, _, width = planes.shape
        by_rows = rows @ planes.permute(1, 2, 0, 3).reshape(batch, -1, channels * width)
        made = by_rows.reshape(batch, -1, width) @ columns.mT
        return made.view(batch, -1, channels, columns.shape[1]).permute(2, 0, 1, 3)
    result = planes.new_empty(*planes.shape[:2], rows.shape[1], columns.shape[1])
    for plane, made in zip(planes, result, strict=True):  # broadcasting would copy matrices, torch.stack results
        torch.matmul(rows @ plane, columns.mT, out=made)
    return result


def crop_weights(start: Tensor, length: Tensor, *, size: int, out: int, flip: Tensor | None = None) -> Tensor:
    """Return the weights of crop, bilinear resize and flip along one axis, ``(batch, out, size)``; rows sum to 1.

    Applied to both axes it equals ``resized_crop`` with its defaults (bilinear, antialias=True) and
    ``horizontal_flip``. An output pixel is the mean of the crop's pixels, weighted by a triangle that extends one pixel
    of the coarser grid to each side. Without downscaling the result equals antialias=False.

    The crop has the first pixel ``start`` and ``length`` pixels, ``(batch,)``, integers as floats. ``size`` and ``out``
    are the numbers of pixels before and after. ``flip``, ``(batch,)``, is 1 where the axis is reversed and 0 elsewhere;
    None: no flips.
    """
    step = (length / out)[:, None]
    center = (torch.arange(out, device=start.device) + 0.5) * step
    if flip is not None:
        center = torch.lerp(center, length[:, None] - center, flip[:, None])
    pixel = (torch.arange(size, device=start.device) + 0.5) - start[:, None]
    weights = (1 - (pixel[:, None] - center[:, :, None]).abs_() / step.clamp(min=1)[:, :, None]).clamp_(min=0)
    weights *= ((pixel > 0) & (pixel < length[:, None])).float()[:, None]
    return weights / weights.sum(2, keepdim=True)


def mirror(weights: Tensor, *, pad: int) -> Tensor:
    """Fold weights of a mirrored border, ``(batch, out, size + 2 * pad)``, into ``(batch, out, size)`` of the image.

    Together with `separable` it equals ``pad`` with ``padding_mode="reflect"``: the outermost pixel is not repeated.
    ``pad`` is from 1 to ``size - 1`` pixels.
    """
    inner = weights[:, :, pad:-pad].clone()
    inner[:, :, 1 : pad + 1] += weights[:, :, :pad].flip(2)
    inner[:, :, -pad - 1 : -1] += weights[:, :, -pad:].flip(2)
    return inner


def blur_weights(sigma: Tensor, *, size: int, radius: int) -> Tensor:
    """Return the weights of Gaussian blur along one axis, with reflected borders, ``(batch, size, size)``.

    Rows sum to 1. Equals ``gaussian_blur`` with ``kernel_size = 2 * radius + 1``, for a ``radius`` less than ``size``.
    ``sigma``, ``(batch,)``, is the standard deviation in pixels; 0 disables blur.
    """
    pixel = torch.arange(size, device=sigma.device)
    offset = torch.arange(-radius, radius + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma.clamp(min=1e-3)[:, None]).square())  # a thousandth of a pixel: no blur
    kernel /= kernel.sum(1, keepdim=True)
    last = size - 1
    source = last - (last - (pixel + offset[:, None]).abs()).abs()  # reflect at both borders
    taps = (source[:, :, None] == pixel).to(kernel.dtype)  # (kernel, size, size): which pixel each tap reads
    return (kernel @ taps.flatten(1)).reshape(len(sigma), size, size)


def resized_crops(planes: Tensor, boxes: Tensor, *, size: int) -> Tensor:
    """Crop, resize and flip each image as `crop_weights` does, ``(channels, batch, size, size)``.

    ``boxes`` are top, left, height and width in pixels, and 1 where the image is flipped, ``(5, batch)``.
    """
    result = planes.new_empty(*planes.shape[:2], size, size)
    for index, (top, left, height, width, flip) in enumerate(boxes.T.int().tolist()):
        crop = planes[None, :, index, top : top + height, left : left + width]
        made = F.interpolate(crop, (size, size), mode="bilinear", antialias=True)[0]
        result[:, index] = made.flip(2) if flip else made
    return result


def blur(image: Tensor, sigma: float, *, radius: int) -> Tensor:
    """Blur one image, ``(channels, height, width)``, as `blur_weights` does; ``sigma`` is above 0.

    Height and width exceed ``radius``. Tiles of `TILE` rows, then columns, are products of overlapping windows with the
    same banded matrix.
    """
    (channels, height, width), window = image.shape, TILE + 2 * radius
    offset = torch.arange(window) - torch.arange(TILE)[:, None] - radius
    weights = torch.exp(-0.5 * (offset / max(sigma, 1e-3)).square()) * (offset.abs() <= radius)
    weights /= weights.sum(1, keepdim=True)
    padded = F.pad(F.pad(image, [radius] * 4, mode="reflect"), (0, -width % TILE, 0, -height % TILE))
    rows = []
    for plane in padded:
        windows = plane.unfold(0, window, TILE).mT
        rows.append(weights.expand(len(windows), -1, -1) @ windows)
    windows = torch.stack(rows).view(-1, padded.shape[2]).unfold(1, window, TILE).transpose(0, 1)
    columns = windows @ weights.T.expand(len(windows), -1, -1)
    return columns.transpose(0, 1).reshape(channels, -1, len(windows) * TILE)[:, :height, :width]


def turn(planes: Tensor, turned: Tensor, chosen: Tensor) -> Tensor:
    """Replace the images by those of ``turned`` where ``chosen`` ``(batch,)`` is 1; 0 elsewhere."""
    return torch.lerp(planes, turned, chosen[:, None, None])


def rotate(planes: Tensor, degrees: Tensor) -> Tensor:
    """Rotate square images counter-clockwise by ``degrees`` ``(batch,)``: ``rotate`` with bilinear interpolation.

    The size stays; what comes from outside of the image is 0.
    """
    cosine, sine = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    zero = torch.zeros_like(sine)
    maps = torch.stack((torch.stack((cosine, -sine, zero), 1), torch.stack((sine, cosine, zero), 1)), 1)
    images = planes.transpose(0, 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False).transpose(0, 1).contiguous()


def luminance(planes: Tensor) -> Tensor:
    """Return gray values ``(...)`` of planes ``(channels, ...)``: weighted for 3 channels, otherwise the mean."""
    if len(planes) != 3:
        return planes.mean(0)
    red, green, blue = planes
    gray: Tensor = LUMINANCE[0] * red
    return gray.add_(green, alpha=LUMINANCE[1]).add_(blue, alpha=LUMINANCE[2])


def brightness(planes: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor`` ``(batch,)`` and clip: ``adjust_brightness``. 1 changes nothing, 0 is black."""
    return (planes * factor[:, None, None]).clamp_(0, 1)


def contrast(planes: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray by ``factor`` ``(batch,)``: ``adjust_contrast``. 1 changes nothing, 0 is flat gray.

    The mean gray is one number for all channels of an image.
    """
    mean = luminance(planes.mean((2, 3), keepdim=True))  # luminance is linear: its mean is that of the means
    return (planes * factor[:, None, None]).add_(mean * (1 - factor[:, None, None])).clamp_(0, 1)


def saturation(planes: Tensor, factor: Tensor) -> Tensor:
    """Blend 3 channels with their gray value by ``factor`` ``(batch,)``, as ``adjust_saturation``; 1: unchanged."""
    return torch.lerp(luminance(planes), planes, factor[:, None, None]).clamp_(0, 1)


def hue(planes: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue of 3 channels by ``turns`` ``(batch,)``, in full turns from -0.5 to 0.5: ``adjust_hue``.

    0 changes nothing. The implementation avoids HSV and pixelwise selection (``torch.where`` is thirty times slower
    than a product on a CPU). With the largest and smallest channel M and m and the chroma C = M - m, the hue in full
    turns from red is

            H = sign(green - blue) * (1 + (green + blue - red - m) / C) / 6

    and a channel with hue h (0, 1/3, 2/3) has the value m + C * clip(2 - 6 * d, 0, 1), where d is the circular distance
    between H and h.
    """
    red, green, blue = planes
    smallest = torch.minimum(torch.minimum(red, green), blue)
    chroma = torch.maximum(torch.maximum(red, green), blue).sub_(smallest)
    hues = (chroma + green).add_(blue).sub_(red).sub_(smallest).div_(6 * chroma.clamp(min=1e-12))
    hues = hues.copysign_(green - blue).add_(turns[:, None, None])
    distance = hues - torch.arange(3, device=planes.device, dtype=planes.dtype).div_(3)[:, None, None, None]
    distance = distance.sub_(distance.round()).abs_()
    return torch.addcmul(smallest, chroma, distance.mul_(-6).add_(2).clamp_(0, 1))


def solarize(planes: Tensor, amount: Tensor) -> Tensor:
    """Invert the values from 0.5 up where ``amount`` ``(batch,)`` is 1: ``solarize``, threshold 0.5. 0: no change."""
    return torch.lerp(planes, torch.minimum(planes, 1 - planes), amount[:, None, None])


def gamma(planes: Tensor, exponent: Tensor) -> Tensor:
    """Raise values in [0, 1] to the power ``exponent`` ``(batch,)``: ``adjust_gamma``. 1 changes nothing."""
    return planes.clamp(min=0).pow_(exponent[:, None, None])  # a negative value would become NaN


def add_noise(planes: Tensor, deviation: Tensor, seed: Tensor) -> Tensor:
    """Add Gaussian noise with these standard deviations, and clip: ``gaussian_noise``. 0 changes nothing.

    The noise of a pixel is a function of the ``seed`` ``(batch,)`` of its image, integers as floats, and of its index
    in the image, so that it is the same in every batch and on every device. Two rounds of a hash give 24 random bits,
    of which the inverse of the normal distribution makes a number with absolute value below 5.5.
    """
    channels, _, height, width = planes.shape
    pixel = torch.arange(channels * height * width, device=planes.device).view(channels, 1, height, width)
    bits = _hash(_hash(pixel) ^ _hash(seed.long() + 2**31)[:, None, None]) >> 8  # 2^31: no seed is a pixel's index
    odd = 2 * bits + (1 - 2**24)  # float32 represents it, and its fraction of 2^24 in (-1, 1)
    normal = (odd.to(planes.dtype) / 2**24).erfinv_().mul_(2**0.5)
    return normal.mul_(deviation[:, None, None]).add_(planes).clamp_(0, 1)


def _hash(x: Tensor) -> Tensor:
    """Map integers below 2^32 to others, one to one, as the finalizer of MurmurHash3; no product overflows 64 bits."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 15)
