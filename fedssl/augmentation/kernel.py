# mypy: ignore-errors
"""Views of small images on a GPU, one kernel per view: `view_transforms.apply_view` and the normalization.

A program computes one view of one image in registers, without intermediate results in memory: its planes, and the
matrices that crop, resize, flip and blur them, are small enough. Products use IEEE float32. The module is imported on
demand, because it requires Triton, which comes with CUDA builds of PyTorch.
"""

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fedssl.augmentation.recipe import ViewOptions
from fedssl.datasets.raster import maximum

ROWS = 16  # numbers per image and view: 12 `Parameters`, and the order of the 4 jitter operations


def apply_views(
    images: Tensor, numbers: Tensor, *, views: Sequence[ViewOptions], mean: Tensor, std: Tensor, out: Tensor
) -> None:
    """Compute views of one size of each image.

    ``images`` are ``(batch, channels, height, width)``, with 1 or 3 channels, contiguous, of a dtype of `MAXIMA`.
    ``numbers`` are float32, ``(ROWS, views, batch)``, contiguous. ``out`` receives view 1 of each image, then view 2
    and so on: float32, ``(views * batch, channels, size, size)``, in any layout.
    """
    batch, channels, height, width = images.shape
    size = out.shape[-1]
    side = max(16, triton.next_power_of_2(max(height, width, size)))
    for index, view in enumerate(views):
        color = channels == 3
        _view[(batch,)](
            images,
            numbers[:, index],
            mean,
            std,
            out[index * batch :],
            numbers.stride(0),
            *out.stride(),
            CHANNELS=channels,
            HEIGHT=height,
            WIDTH=width,
            SIZE=size,
            SIDE=side,
            PAD=view.pad,
            JITTER=view.jitter_prob > 0 and max(view.brightness, view.contrast, view.saturation, view.hue) > 0,
            HUE=color and view.jitter_prob > 0 and view.hue > 0,
            GRAY=color and view.gray_prob > 0,
            BLUR=view.blur_prob > 0,
            RADIUS=min(math.ceil(3 * view.blur_sigma[1]), size - 1),
            SOLARIZE=view.solarize_prob > 0,
            MAXIMUM=maximum(images.dtype),
            num_warps=side // 4,
        )


@triton.jit
def _triangle(pixel, length, center, step):
    """Unnormalized weights of pixels, counted from the crop's first pixel: a triangle around each center, 0 outside."""
    weight = tl.maximum(1 - tl.abs(pixel - center) / tl.maximum(step, 1.0), 0.0)
    return tl.where((pixel > 0) & (pixel < length), weight, 0.0)


@triton.jit
def _resize(start, length, flip, OUT: tl.constexpr, IN: tl.constexpr, PAD: tl.constexpr, SIDE: tl.constexpr):
    """Matrix of crop, resize and flip: `operations.crop_weights`, and with a border `operations.mirror`."""
    new = tl.arange(0, SIDE)[:, None]
    old = tl.arange(0, SIDE)[None, :]
    step = length / OUT
    center = (new + 0.5) * step
    center = tl.where(flip > 0, length - center, center)
    weight = _triangle(old + 0.5 - start, length, center, step)
    if PAD > 0:  # mirrored border: pixel p is also at -p and at 2 * last - p
        before = _triangle(0.5 - old - start, length, center, step)
        weight += tl.where((old >= 1) & (old <= PAD), before, 0.0)
        behind = _triangle(2 * IN - 1.5 - old - start, length, center, step)
        weight += tl.where((old <= IN - 2) & (old >= IN - 1 - PAD), behind, 0.0)
    weight = tl.where((new < OUT) & (old < IN), weight, 0.0)
    return weight / tl.maximum(tl.sum(weight, 1), 1e-20)[:, None]


@triton.jit
def _gauss(sigma, RADIUS: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Matrix of blur: `operations.blur_weights`."""
    new = tl.arange(0, SIDE)[:, None]
    old = tl.arange(0, SIDE)[None, :]
    weight = tl.zeros((SIDE, SIDE), tl.float32)
    total = 0.0
    last: tl.constexpr = SIZE - 1
    for offset in range(-RADIUS, RADIUS + 1):
        tap = offset / tl.maximum(sigma, 1e-3)
        tap = tl.exp(-0.5 * tap * tap)
        source = last - tl.abs(last - tl.abs(new + offset))
        weight += tl.where((source == old) & (new < SIZE) & (old < SIZE), tap, 0.0)
        total += tap
    return weight / total


@triton.jit
def _both_sides(rows, plane, columns):
    return tl.dot(tl.dot(rows, plane, input_precision="ieee"), tl.trans(columns), input_precision="ieee")


@triton.jit
def _clip(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _gray(red, green, blue, CHANNELS: tl.constexpr):
    return 0.2989 * red + 0.587 * green + 0.114 * blue if CHANNELS == 3 else red


@triton.jit
def _blend(plane, other, factor):
    return _clip(other + factor * (plane - other))


@triton.jit
def _of_hue(smallest, chroma, hue, own: tl.constexpr):
    distance = hue - own
    distance = tl.abs(distance - tl.floor(distance + 0.5))
    return smallest + chroma * _clip(2 - 6 * distance)


@triton.jit
def _inverted(plane, amount):
    return plane + amount * (tl.minimum(plane, 1 - plane) - plane)


@triton.jit
def _view(  # noqa: C901  # a kernel is one function
    images, numbers, mean, std, out, stride, out_image, out_channel, out_row, out_column,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr,
    PAD: tl.constexpr, JITTER: tl.constexpr, HUE: tl.constexpr, GRAY: tl.constexpr, BLUR: tl.constexpr,
    RADIUS: tl.constexpr, SOLARIZE: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """One view of one image; row k of its numbers is at ``numbers + k * stride``."""
    image = tl.program_id(0).to(tl.int64)
    numbers += image
    y = tl.arange(0, SIDE)[:, None]
    x = tl.arange(0, SIDE)[None, :]
    there = (y < HEIGHT) & (x < WIDTH)
    inside = (y < SIZE) & (x < SIZE)

    rows = _resize(tl.load(numbers), tl.load(numbers + 2 * stride), 0.0, SIZE, HEIGHT, PAD, SIDE)
    flip = tl.load(numbers + 4 * stride)
    columns = _resize(tl.load(numbers + stride), tl.load(numbers + 3 * stride), flip, SIZE, WIDTH, PAD, SIDE)
    source = images + image * CHANNELS * HEIGHT * WIDTH + y * WIDTH + x
    red = _both_sides(rows, tl.load(source, mask=there, other=0).to(tl.float32) / MAXIMUM, columns)
    green, blue = red, red
    if CHANNELS == 3:
        source += HEIGHT * WIDTH
        green = _both_sides(rows, tl.load(source, mask=there, other=0).to(tl.float32) / MAXIMUM, columns)
        source += HEIGHT * WIDTH
        blue = _both_sides(rows, tl.load(source, mask=there, other=0).to(tl.float32) / MAXIMUM, columns)

    if JITTER:
        for turn in range(4):
            operation = tl.load(numbers + (12 + turn) * stride).to(tl.int32)
            factor = tl.load(numbers + (5 + operation) * stride)
            if operation == 0:
                red, green, blue = _clip(red * factor), _clip(green * factor), _clip(blue * factor)
            elif operation == 1:
                gray = tl.where(inside, _gray(red, green, blue, CHANNELS), 0.0)
                mean_gray = tl.sum(tl.sum(gray, 1), 0) / (SIZE * SIZE)
                red, green, blue = (
                    _blend(red, mean_gray, factor), _blend(green, mean_gray, factor), _blend(blue, mean_gray, factor)
                )  # fmt: skip
            elif operation == 2:
                if CHANNELS == 3:
                    gray = _gray(red, green, blue, CHANNELS)
                    red, green, blue = (
                        _blend(red, gray, factor),
                        _blend(green, gray, factor),
                        _blend(blue, gray, factor),
                    )
            else:
                if HUE:
                    low = tl.minimum(tl.minimum(red, green), blue)
                    chroma = tl.maximum(tl.maximum(red, green), blue) - low
                    hue = (chroma + green + blue - red - low) / (6 * tl.maximum(chroma, 1e-12))
                    hue = tl.where(green < blue, -tl.abs(hue), tl.abs(hue)) + factor
                    red = _of_hue(low, chroma, hue, 0.0)
                    green = _of_hue(low, chroma, hue, 1 / 3)
                    blue = _of_hue(low, chroma, hue, 2 / 3)
    if GRAY:
        factor = tl.load(numbers + 9 * stride)
        gray = _gray(red, green, blue, CHANNELS)
        red, green, blue = _blend(red, gray, factor), _blend(green, gray, factor), _blend(blue, gray, factor)
    if BLUR:
        weight = _gauss(tl.load(numbers + 10 * stride), RADIUS, SIZE, SIDE)
        red = _both_sides(weight, red, weight)
        if CHANNELS == 3:
            green, blue = _both_sides(weight, green, weight), _both_sides(weight, blue, weight)
    if SOLARIZE:
        amount = tl.load(numbers + 11 * stride)
        red, green, blue = _inverted(red, amount), _inverted(green, amount), _inverted(blue, amount)

    out += image * out_image + y * out_row + x * out_column
    tl.store(out, (red - tl.load(mean)) / tl.load(std), mask=inside)
    if CHANNELS == 3:
        tl.store(out + out_channel, (green - tl.load(mean + 1)) / tl.load(std + 1), mask=inside)
        tl.store(out + 2 * out_channel, (blue - tl.load(mean + 2)) / tl.load(std + 2), mask=inside)
