"""Warnings about a data set whose images have hardly any content, from a sample of them."""

import math
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch

from fedssl.datasets.decoding import Decoding, Encoded, open_image
from fedssl.datasets.images import ImageSource
from fedssl.datasets.pixels import is_deep, states_maximum, white_value

SAMPLE = 64  # images at most
_SMALL_PART = 4  # the maximum is small if it is below 1/4 of the range


def constant_warnings(images: ImageSource) -> tuple[str, ...]:
    """Return one warning if more than half of a sample of the images have a single color, else none."""
    if images.shape[-1] == 1:
        return ()
    rows = torch.linspace(0, len(images) - 1, min(SAMPLE, len(images))).long()
    pixels = images[rows].flatten(2)
    constant = int((pixels.amax(dim=2) == pixels.amin(dim=2)).all(dim=1).sum())
    if 2 * constant <= len(rows):
        return ()
    return (
        f"{constant} of a sample of {len(rows)} images have a single color each: their transparent parts may have the "
        "color of the others (set dataset.background, 0 is black), or their values a small part of the range (set "
        "dataset.max_value), or the files are empty; check dataset.path",
    )


def range_warnings(sources: Iterable[Encoded], decoding: Decoding) -> tuple[str, ...]:
    """Return a warning if images with more than 8 bits use a small part of their range, or exceed it, else none.

    ``sources`` are encoded images, of which the first `SAMPLE` are read.
    """
    peaks = [peak for source in islice(sources, SAMPLE) if (peak := _peak(source, decoding)) is not None]
    if not peaks:
        if decoding.max_value is None:
            return ()
        return (
            f"dataset.max_value={decoding.max_value:g} is for gray images with more than 8 bits, and a sample of the "
            "images has none: nothing is scaled",
        )
    value, limit, is_gray = max(peaks)
    found = f"the largest value in a sample of {len(peaks)} images with more than 8 bits is {value:,g}"
    if value > limit:
        return (f"{found}: all above dataset.max_value={limit:g} become white; set it to {_suggestion(value)}",)
    if not 0 < _SMALL_PART * value < limit:
        return ()
    remedy = (
        f"scale them with dataset.max_value={_suggestion(value)}"
        if is_gray
        else "scale them and save them with 8 bits, since Pillow reads the upper 8 bits of color images"
    )
    return (f"{found} of {limit:,g}, so that they are nearly black; {remedy}",)


def _peak(source: Encoded, decoding: Decoding) -> tuple[float, float, bool] | None:
    """Return the largest value of an image with more than 8 bits, that of white, and whether it is gray; else None."""
    try:
        with open_image(source, max_pixels=decoding.max_pixels) as image:
            if states_maximum(image):
                return None
            if is_deep(image):
                limit = white_value(image, decoding.max_value)
                return None if limit is None else (float(np.asarray(image).max()), limit, True)
            if not any(";16" in str(tile.args) for tile in image.tile):
                return None
            return 256.0 * np.asarray(image.convert("RGB")).max() + 255, 65535, False
    except Exception:  # unreadable images are in another warning
        return None


def _suggestion(value: float) -> str:
    """Return the maximum of the smallest number of bits that holds a value; fractions are unchanged."""
    return f"{2 ** math.ceil(math.log2(value + 1)) - 1}" if value > 1 else f"{value:g}"
