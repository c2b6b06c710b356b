r"""Sums over the pixels of images: what a client sends in place of images, and what follows from the total.

A value x in [0, 1] is a stored value divided by 255 (uint8), 65535 (uint16) or 1 (float32). For each channel a client
sends the sums of x and of x squared as integers in the units `SUM_UNIT` and `SQUARE_UNIT`, of which values of both
integer dtypes are multiples, and a histogram. With N pixels:

$$
\mu = \frac{1}{N} \sum x \qquad \sigma = \sqrt{\frac{1}{N} \sum x^2 - \mu^2}
$$

Totals of integer images are exact, whatever clients have which image. Those of float32 images are sums in float64 per
image, rounded to a unit: 2^-41 at most. Integers travel as limbs of 22 bits, which secure aggregation adds exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch

from fedssl.datasets.images import ImageSource
from fedssl.datasets.raster import MAXIMA
from fedssl.errors import InputError

DTYPES = tuple(MAXIMA)
BINS = 1024  # of a histogram; values of uint8 fall into different ones
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

# Integers that are 1 in the sums of values and of squares: multiples of 255 and 65535, and of their squares.
SUM_UNIT, SQUARE_UNIT = 65535 << 24, 65535**2 << 8
LIMB_BITS = 22
LIMB = 1 << LIMB_BITS
_COUNT_LIMBS, _SUM_LIMBS = 2, 4  # of numbers up to 2^44 and 2^88
MAX_PIXELS = 1 << 44  # of a client: more do not fit
_CHUNK = 1 << 22  # values that are read at a time
_ROUNDING = 1e-9  # tolerance of checks, far above rounding and far below a wrong number


@dataclass(frozen=True, kw_only=True)
class ImageSums:
    """Sums of images of one or several clients, per channel. They can be added."""

    images: int
    clients: tuple[int, ...]  # with images of each of `DTYPES`
    sums: tuple[int, ...]  # of values, in `SUM_UNIT`
    squares: tuple[int, ...]  # of squared values, in `SQUARE_UNIT`
    histogram: np.ndarray  # int64, (channels, BINS)

    @classmethod
    def zero(cls, channels: int) -> "ImageSums":
        nothing = (0,) * channels
        histogram = np.zeros((channels, BINS), np.int64)
        return cls(images=0, clients=(0,) * len(DTYPES), sums=nothing, squares=nothing, histogram=histogram)

    def __add__(self, other: "ImageSums") -> "ImageSums":
        pairs = {name: (vars(self)[name], vars(other)[name]) for name in ("clients", "sums", "squares")}
        added = {name: tuple(map(sum, zip(*pair, strict=True))) for name, pair in pairs.items()}
        return ImageSums(images=self.images + other.images, histogram=self.histogram + other.histogram, **added)

    def to_limbs(self) -> np.ndarray:
        """Return all integers as limbs from 0 to 2^22 - 1, the lowest first, float64, as long as `num_limbs`."""
        counts = np.concatenate(([self.images, *self.clients], self.histogram.ravel()))
        sums = np.array([*self.sums, *self.squares], object)
        limbs = [(counts >> LIMB_BITS * place) % LIMB for place in range(_COUNT_LIMBS)]
        limbs += [(sums >> LIMB_BITS * place) % LIMB for place in range(_SUM_LIMBS)]
        return np.concatenate(limbs).astype(np.float64)

    @classmethod
    def from_limbs(cls, limbs: np.ndarray, *, channels: int) -> "ImageSums":
        """Return the integers of limbs, or of a sum of several clients' limbs."""
        num_kinds = len(DTYPES)
        count_limbs, sum_limbs = np.split(limbs.astype(np.int64), [_COUNT_LIMBS * (1 + num_kinds + channels * BINS)])
        counts = _joined(count_limbs.reshape(_COUNT_LIMBS, -1))
        sums = _joined(sum_limbs.reshape(_SUM_LIMBS, -1).astype(object)).tolist()
        return cls(
            images=int(counts[0]),
            clients=tuple(counts[1 : 1 + num_kinds].tolist()),
            sums=tuple(sums[:channels]),
            squares=tuple(sums[channels:]),
            histogram=counts[1 + num_kinds :].reshape(channels, BINS),
        )

    def problem(self, *, pixels: int, clients: int = 1) -> str:
        """Return why the sums are impossible for ``clients`` and images of ``pixels``, as a predicate; empty otherwise.

        The histogram bounds both sums, and the mean of the squares is at least the square of the mean.
        """
        if not min(self.images, 1) <= sum(self.clients) <= min(self.images, clients):
            return "counts its images in no dtype, or in several"
        if not (self.histogram.sum(axis=1) == self.images * pixels).all():
            return "sent histograms with another number of pixels than its images have"
        if not self.images:
            return "sent sums of no images" if any((*self.sums, *self.squares)) else ""
        low, high = (np.arange(BINS) + edge for edge in (0, 1))
        first, second = self.moments(pixels=pixels)
        share = self.histogram / (self.images * pixels)
        for mean, power in ((first, 1), (second, 2)):
            lowest, highest = (share @ (edge / BINS) ** power for edge in (low, high))
            if (mean < lowest - _ROUNDING).any() or (mean > highest + _ROUNDING).any():
                return "sent sums that contradict its histograms"
        return "sent squares that are too small for its sums" if (second < first**2 - _ROUNDING).any() else ""

    def moments(self, *, pixels: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the means of values and of squared values, float64, ``(channels,)`` each."""
        first, second = self._exact_moments(pixels)
        return np.array([float(value) for value in first]), np.array([float(value) for value in second])

    def mean_and_std(self, *, pixels: int) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation, of all pixels of all images, rounded once."""
        first, second = self._exact_moments(pixels)
        variances = [max(square - mean**2, Fraction(0)) for mean, square in zip(first, second, strict=True)]
        return [float(mean) for mean in first], [math.sqrt(variance) for variance in variances]

    def _exact_moments(self, pixels: int) -> tuple[list[Fraction], list[Fraction]]:
        number = self.images * pixels
        return (
            [Fraction(value, number * SUM_UNIT) for value in self.sums],
            [Fraction(value, number * SQUARE_UNIT) for value in self.squares],
        )

    def percentile(self, percent: float) -> list[float]:
        """Return a percentile of each channel to 1 / `BINS`; 0 is the lowest value, and 100 the highest."""
        cumulative = np.cumsum(self.histogram, axis=1)
        ranks = np.maximum(np.ceil(cumulative[:, -1] * percent / 100), 1)
        bins = [int(np.searchsorted(row, rank)) for row, rank in zip(cumulative, ranks, strict=True)]
        return [bin / (BINS - 1) for bin in bins]  # in the bin, and exact for 0 and 1


def num_limbs(channels: int) -> int:
    """Return the length of `ImageSums.to_limbs`."""
    return _COUNT_LIMBS * (1 + len(DTYPES) + channels * BINS) + _SUM_LIMBS * 2 * channels


def sums_of(images: ImageSource, rows: torch.Tensor, *, on_step_start: Callable[[], None] = lambda: None) -> ImageSums:
    """Return the sums of the images at ``rows``; raises `InputError` for values that are not scaled to [0, 1]."""
    _, channels, height, width = images.shape
    if len(rows) * height * width >= MAX_PIXELS:
        raise InputError(f"{len(rows)} images of {height} x {width} pixels are too many for dataset.mean=federated")
    total, dtype = ImageSums.zero(channels), ""
    chunks = rows.split(max(_CHUNK // (channels * height * width), 1))
    for chunk in images.prefetch(chunks if len(rows) else ()):
        on_step_start()
        pixels = chunk.cpu().numpy()
        dtype = str(pixels.dtype)
        total += _sums_of_array(pixels)
    return replace(total, clients=tuple(int(kind == dtype) for kind in DTYPES))


def _sums_of_array(images: np.ndarray) -> ImageSums:
    """Return the sums of images, ``(n, channels, height, width)``, without counting their client."""
    planes = images.swapaxes(0, 1).reshape(images.shape[1], -1)
    powers = ((1, SUM_UNIT), (2, SQUARE_UNIT))
    if images.dtype.kind == "f":
        if not 0 <= images.min() <= images.max() <= 1:  # NaN included
            raise InputError(
                "images have values that are not scaled to [0, 1]; set dataset.window to the lowest and the highest "
                "value"
            )
        bins = np.minimum((planes.astype(np.float64) * BINS).astype(np.int64), BINS - 1)
        histogram = np.stack([np.bincount(plane, minlength=BINS) for plane in bins])
        of_images = [
            ((images.astype(np.float64) ** power).sum(axis=(2, 3)).T * unit).tolist() for power, unit in powers
        ]
        sums, squares = ([sum(map(round, channel)) for channel in channels] for channels in of_images)
    else:
        largest = int(np.iinfo(images.dtype).max)
        values = np.arange(largest + 1)
        counts = np.stack([np.bincount(plane, minlength=largest + 1) for plane in planes])
        bins = np.minimum(values * BINS // largest, BINS - 1)
        histogram = np.stack([np.bincount(bins, weights=count, minlength=BINS) for count in counts]).astype(np.int64)
        sums, squares = (
            [int(count @ values**power) * (unit // largest**power) for count in counts] for power, unit in powers
        )
    return replace(
        ImageSums.zero(len(planes)), images=len(images), sums=tuple(sums), squares=tuple(squares), histogram=histogram
    )


def _joined(limbs: np.ndarray) -> np.ndarray:
    """Return the integers of limbs, ``(limbs, n)``."""
    integers: np.ndarray = sum(row << LIMB_BITS * place for place, row in enumerate(limbs))
    return integers
