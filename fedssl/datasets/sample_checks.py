"""Warnings about a data set of which hardly anything would be seen, from a sample of its images."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from PIL.ImageFile import ImageFile

from fedssl.datasets.decoding import Decoding, Encoded, open_image
from fedssl.datasets.images import ImageSource
from fedssl.datasets.pixels import FILE_WINDOW, is_deep, states_maximum, value_limits

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
        "dataset.window), or the files are empty; check dataset.path",
    )


def range_warnings(sources: Iterable[Encoded], decoding: Decoding) -> tuple[str, ...]:
    """Return warnings about stacks of images, and about values of more than 8 bits in an unsuitable range.

    ``sources`` are encoded images, of which the first `SAMPLE` are read. Files of other formats than TIFF and DICOM are
    animations if they have several frames.
    """
    stacks, num_read, deep = 0, 0, list[_Values]()
    for source in islice(sources, SAMPLE):
        try:
            with open_image(source, max_pixels=decoding.max_pixels) as image:
                stacks += image.format in ("TIFF", "DICOM") and getattr(image, "n_frames", 1) > 1
                deep += _values(image, decoding.window)
                num_read += 1
        except Exception:  # unreadable images are in another warning
            continue
    found = f"{stacks} of a sample of {num_read} images have several pages or frames, and only the first is used"
    return ((f"{found}; save each of them as a file",) if stacks else ()) + _deep_warnings(deep, decoding.window)


class _Values(NamedTuple):
    """Values of an image with more than 8 bits."""

    lowest: float
    highest: float
    limits: tuple[float, float]  # which become black and white
    is_gray: bool
    is_certain: bool  # whether its file has a window, or DICOM is cut by one: values beyond it are expected


def _values(image: Image.Image, window: Sequence[float] | None) -> list[_Values]:
    """Return the values of an image that is not loaded yet, or nothing if it has 8 bits or states its maximum."""
    if states_maximum(image):
        return []
    if is_deep(image):
        limits = value_limits(image, window)
        if limits is None:
            return []
        pixels, is_dicom = np.asarray(image), image.format == "DICOM"
        certain = is_dicom and (window is not None or FILE_WINDOW in image.info)
        finite = pixels[np.isfinite(pixels)]
        if not finite.size:
            return []
        return [_Values(float(finite.min()), float(finite.max()), limits, True, certain)]
    if not any(";16" in str(tile.args) for tile in (image.tile if isinstance(image, ImageFile) else ())):
        return []
    return [_Values(0.0, 256.0 * np.asarray(image.convert("RGB")).max() + 255, (0.0, 65535.0), False, False)]


def _deep_warnings(deep: Sequence[_Values], window: Sequence[float] | None) -> tuple[str, ...]:
    if window is not None and not any(values.is_gray for values in deep):
        return (
            f"dataset.window={list(window)} is for gray images with more than 8 bits, and a sample of the images has "
            "none: nothing is scaled",
        )
    uncertain = [values for values in deep if not values.is_certain]
    if not uncertain:
        return ()
    lowest, highest = min(values.lowest for values in uncertain), max(values.highest for values in uncertain)
    (low, high), is_gray = max((values.limits, values.is_gray) for values in uncertain)
    found = f"the values in a sample of {len(uncertain)} images with more than 8 bits are {lowest:,g} to {highest:,g}"
    remedy = f"set dataset.window={_suggestion(lowest, highest)}"
    if highest > high:
        return (f"{found}: all above {high:,g} become white; {remedy}",)
    if not 0 < _SMALL_PART * (highest - min(lowest, 0)) < high - low:
        return ()
    if not is_gray:
        remedy = "scale them and save them with 8 bits, since Pillow reads the upper 8 bits of color images"
    return (f"{found} of {low:,g} to {high:,g}, so that they have hardly any contrast; {remedy}",)


def _suggestion(lowest: float, highest: float) -> str:
    """Return a window of the smallest number of bits that holds the values; negative values and fractions are kept."""
    if lowest < 0 or highest <= 1:
        return f"[{lowest:.9g},{highest:.9g}]"
    return f"[0,{2 ** math.ceil(math.log2(highest + 1)) - 1}]"
