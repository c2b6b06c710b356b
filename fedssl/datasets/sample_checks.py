"""Warnings about a data set of which hardly anything would be seen, from a sample of its images."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from fedssl.datasets.decoding import Bands, Decoding, Encoded, Page
from fedssl.datasets.pages import Pages
from fedssl.datasets.pixels import FILE_BITS, MODALITY, deep_raster
from fedssl.datasets.raster import Raster, limits_of, unit_values

if TYPE_CHECKING:  # it needs torch, which devices may lack
    import torch

    from fedssl.datasets.images import ImageSource

SAMPLE = 64  # images at most
_BITS = 8  # of most images
_SMALL_PART = 4  # the maximum is small if it is below 1/4 of the range


def sample_of(images: "ImageSource") -> "torch.Tensor":
    """Return at most `SAMPLE` images, evenly from all."""
    import torch

    return images[torch.linspace(0, len(images) - 1, min(SAMPLE, len(images))).long()]


def constant_warnings(images: "ImageSource") -> tuple[str, ...]:
    """Return one warning if more than half of a sample of the images have a single color, else none."""
    if images.shape[-1] == 1:
        return ()
    pixels = unit_values(sample_of(images)).flatten(2)
    constant = int((pixels.amax(dim=2) == pixels.amin(dim=2)).all(dim=1).sum())
    if 2 * constant <= len(pixels):
        return ()
    return (
        f"{constant} of a sample of {len(pixels)} images have a single color each: their transparent parts may have "
        "the color of the others (set dataset.background, 0 is black), or their values a small part of the range (set "
        "dataset.window), or the files are empty; check dataset.path",
    )


def range_warnings(sources: Iterable[Encoded], decoding: Decoding) -> tuple[str, ...]:
    """Return warnings about images of which only the first page is used, and about values in an unsuitable range.

    ``sources`` are encoded images, of which the first `SAMPLE` are read.
    """
    stacks, num_read, reduced, deep = 0, 0, 0, list[_Values]()
    files = chain.from_iterable(
        source.files if isinstance(source, Bands) else (source,) for source in islice(sources, SAMPLE)
    )
    sample = list(islice(files, SAMPLE))
    for source, read in zip(sample, decoding.each_opened(sample, partial(_counted, decoding=decoding)), strict=True):
        if isinstance(read, Exception):  # unreadable images are in another warning
            continue
        count, bits, values = read
        reduced += bits > _BITS
        stacks += not isinstance(source, Page) and count > 1
        deep += values
        num_read += 1
    found = f"{stacks} of a sample of {num_read} images have several pages or frames, and only the first is used"
    remedy = (
        "write each to an image" if any(isinstance(source, bytes) for source in sample) else "set dataset.pages=all"
    )
    lines: tuple[str, ...] = (f"{found}; to use all, {remedy}",) if stacks else ()
    found = f"{reduced} of a sample of {num_read} images are AVIF or HEIC with more than 8 bits, of which 8 are used"
    lines += (f"{found}; save them as 16-bit PNG or TIFF to use all",) if reduced else ()
    return lines + _deep_warnings(deep, decoding)


class _Values(NamedTuple):
    """Values of an image with more than 8 bits."""

    lowest: float
    highest: float
    limits: tuple[float, float]  # which become black and white
    is_certain: bool  # whether there are values beyond them as expected: of a window of the file, of percentiles
    has_nan: bool
    modality: str  # of DICOM
    cut: float  # share of the values beyond the limits


def _counted(pages: Pages, image: Image.Image | Raster, decoding: Decoding) -> tuple[int, int, list[_Values]]:
    """Return the number of images in a file, the bits of one that Pillow reduces to 8, and its values."""
    raster = image if isinstance(image, Raster) else deep_raster(image)
    about = {} if isinstance(image, Raster) else image.info
    values = [] if raster is None else _values(raster, decoding, about.get(MODALITY, ""))
    return pages.count, about.get(FILE_BITS, _BITS), values


def _values(raster: Raster, decoding: Decoding, modality: str) -> list[_Values]:
    """Return the values of an image, or nothing if it has 8 bits or states its maximum."""
    pixels = raster.load()
    limits = limits_of(raster, pixels, decoding)
    finite = pixels[np.isfinite(pixels)]
    if raster.is_fixed or limits is None or pixels.dtype.itemsize == 1 or not finite.size:
        return []
    certain = decoding.percentiles is not None or raster.is_window or (decoding.window is not None and raster.is_wide)
    cut = float(np.mean((finite < limits[0]) | (finite > limits[1])))
    with_nan = bool(np.isnan(pixels).any())
    return [_Values(float(finite.min()), float(finite.max()), limits, certain, with_nan, modality, cut)]


def _deep_warnings(deep: Sequence[_Values], decoding: Decoding) -> tuple[str, ...]:
    window = decoding.window
    if not deep:
        if window is None and decoding.percentiles is None:
            return ()
        name = "percentiles" if window is None else "window"
        return (f"dataset.{name} is for images with more than 8 bits, and a sample of the images has none",)
    num_nan = sum(values.has_nan for values in deep)
    found = (
        f"{num_nan} of a sample of {len(deep)} images have pixels without a value (NaN, no data), which become black"
    )
    lines = ((found,) if num_nan else ()) + (() if window is None else _modality_warning(deep, window))
    return lines + _range_warning([values for values in deep if not values.is_certain])


def _modality_warning(deep: Sequence[_Values], window: Sequence[float]) -> tuple[str, ...]:
    """Return a warning if one window is used for images of several modalities, whose values have different units."""
    names = sorted({values.modality for values in deep})
    cuts = [np.mean([values.cut for values in deep if values.modality == name]) for name in names]
    shares = ", ".join(f"{name or 'others'} {cut:.0%}" for name, cut in zip(names, cuts, strict=True))
    line = (
        f"dataset.window=[{window[0]:g},{window[1]:g}] is used for several modalities, and makes these shares of their "
        f"values black or white: {shares}; set dataset.window=null for the window of each file, or dataset.path to the "
        "files of one modality"
    )
    return (line,) if len(names) > 1 else ()


def _range_warning(deep: Sequence[_Values]) -> tuple[str, ...]:
    if not deep:
        return ()
    lowest, highest = min(values.lowest for values in deep), max(values.highest for values in deep)
    low, high = max(values.limits for values in deep)
    found = f"the values in a sample of {len(deep)} images with more than 8 bits are {lowest:,g} to {highest:,g}"
    remedy = f"set dataset.window={_suggestion(lowest, highest)}"
    if highest > high:
        return (f"{found}: all above {high:,g} become white; {remedy}",)
    if not 0 < _SMALL_PART * (highest - min(lowest, 0)) < high - low:
        return ()
    return (f"{found} of {low:,g} to {high:,g}, so that they have hardly any contrast; {remedy}",)


def _suggestion(lowest: float, highest: float) -> str:
    """Return a window of the smallest number of bits that holds the values; negative values and fractions are kept."""
    if lowest < 0 or highest <= 1:
        return f"[{lowest:.9g},{highest:.9g}]"
    return f"[0,{2 ** math.ceil(math.log2(highest + 1)) - 1}]"
