"""Sums of images against pooled statistics in float64, their integers, and what no images have."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.statistics.sums import BINS, DTYPES, LIMB, ImageSums, num_limbs, sums_of

LARGEST = {"uint8": 255, "uint16": 65535, "float32": 1}


def images_of(dtype: str, *, number: int = 7, channels: int = 3, size: int = 5, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).beta(0.5, 2, size=(number, channels, size, size))
    return (values * LARGEST[dtype]).astype(dtype)


def summed(images: np.ndarray, rows: list[int] | None = None) -> ImageSums:
    chosen = torch.arange(len(images)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    return sums_of(TensorImages(torch.from_numpy(images)), chosen)


def test_numbers_by_hand():
    """Values 0, 1, 0.2, 0.2: mean 1.4 / 4 = 0.35, mean square 1.08 / 4 = 0.27, variance 0.27 - 0.1225 = 0.1475."""
    images = np.array([[[[0, 255]]], [[[51, 51]]]], np.uint8)
    sums = summed(images)
    mean, std = sums.mean_and_std(pixels=2)
    assert mean == [0.35]
    assert std == [math.sqrt(0.1475)]
    assert (sums.images, sums.clients) == (2, (1, 0, 0))
    assert np.flatnonzero(sums.histogram[0]).tolist() == [0, 204, BINS - 1]  # floor(0.2 * 1024)
    assert sums.percentile(0) == [0.0]
    assert sums.percentile(50) == [204 / (BINS - 1)]  # the second smallest of four
    assert sums.percentile(51) == [204 / (BINS - 1)]
    assert sums.percentile(100) == [1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_clients_are_the_pooled_ones(dtype):
    """However the images are divided; of batches of 1 the mean of the standard deviations is another number."""
    images = images_of(dtype)
    scaled = images.astype(np.float64) / LARGEST[dtype]
    parts = [[0], [6, 2], [], [1, 3, 4, 5]]
    total = ImageSums.zero(3)
    for part in parts:
        total += ImageSums.from_limbs(summed(images, part).to_limbs(), channels=3)
    assert total.problem(pixels=25, clients=4) == ""
    mean, std = total.mean_and_std(pixels=25)
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 2, 3)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 2, 3)), rtol=0, atol=1e-12)
    assert np.abs(scaled.std(axis=(2, 3)).mean(axis=0) - std).min() > 1e-3
    assert total.images == 7
    assert total.clients[DTYPES.index(dtype)] == 3
    for percent in (0, 1, 50, 99, 100):
        expected = [np.percentile(scaled[:, channel], percent, method="inverted_cdf") for channel in range(3)]
        np.testing.assert_allclose(total.percentile(percent), expected, atol=1 / BINS)


def test_a_value_has_the_same_sums_in_all_integer_dtypes():
    """255 * 257 = 65535: an 8-bit value v is the 16-bit value 257 v."""
    images = images_of("uint8")
    wide = summed(images.astype(np.uint16) * 257)
    narrow = summed(images)
    assert (wide.sums, wide.squares) == (narrow.sums, narrow.squares)
    np.testing.assert_array_equal(wide.histogram, narrow.histogram)


def test_sums_of_many_white_16_bit_images_are_exact():
    """Where int64 and float64 are not: 2^43 pixels of 65535 have squares of 2^75 in total."""
    pixels, images = 1 << 23, 1 << 20
    one = summed(np.full((1, 1, 1, 1), 65535, np.uint16))
    number = pixels * images
    sums = {"sums": (one.sums[0] * number,), "squares": (one.squares[0] * number,)}
    white = replace(one, images=images, histogram=one.histogram * number, **sums)
    back = ImageSums.from_limbs(white.to_limbs(), channels=1)
    assert (back.sums, back.squares) == (white.sums, white.squares)
    assert back.problem(pixels=pixels) == ""
    assert back.mean_and_std(pixels=pixels) == ([1.0], [0.0])


def test_limbs_of_many_clients_can_be_added():
    """Sums of 1,023 limbs below 2^22 are below 2^32, the modulus of secure aggregation."""
    one = summed(images_of("uint16"))
    limbs = one.to_limbs()
    assert len(limbs) == num_limbs(3)
    assert limbs.min() >= 0
    assert limbs.max() < LIMB
    total = ImageSums.from_limbs(limbs * 1023, channels=3)
    assert total.squares == tuple(1023 * square for square in one.squares)
    assert total.mean_and_std(pixels=25) == one.mean_and_std(pixels=25)


def test_clients_without_images_and_constant_images():
    empty = summed(images_of("uint8"), [])
    assert empty.problem(pixels=25) == ""
    assert empty.images == 0
    gray = summed(np.full((4, 1, 5, 5), 0.1, np.float32))
    assert gray.problem(pixels=25) == ""
    assert gray.mean_and_std(pixels=25)[1][0] < 1e-6


@pytest.mark.parametrize("value", [-0.5, 1.5, math.nan, math.inf])
def test_float_images_that_are_not_scaled_are_refused(value):
    images = images_of("float32")
    images[3, 1, 2, 2] = value
    with pytest.raises(InputError, match=r"not scaled to \[0, 1\]; set dataset.window to"):
        summed(images)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (lambda sums: {"images": sums.images + 1}, "another number of pixels"),
        (lambda sums: {"clients": (0, 0, 0)}, "in no dtype"),
        (lambda sums: {"clients": (5, 0, 0)}, "in no dtype, or in several"),
        (lambda sums: {"sums": tuple(2 * value for value in sums.sums)}, "contradict its histograms"),
        (lambda sums: {"squares": tuple(value // 2 for value in sums.squares)}, "contradict its histograms"),
        (lambda sums: {"squares": tuple(int(0.9999 * value) for value in sums.squares)}, "too small for its sums"),
        (lambda sums: {"histogram": sums.histogram[:, ::-1]}, "contradict its histograms"),
    ],
)
def test_sums_that_no_images_have(changes, reason):
    """Almost constant images, so that the mean square is barely above the square of the mean."""
    sums = summed(np.array([[[[200, 200], [200, 201]]]], np.uint8))
    assert sums.problem(pixels=4) == ""
    assert reason in replace(sums, **changes(sums)).problem(pixels=4)


def test_a_histogram_of_one_channel_that_lacks_a_pixel():
    sums = summed(images_of("uint8"))
    sums.histogram[1, np.flatnonzero(sums.histogram[1])[0]] -= 1
    assert "another number of pixels" in sums.problem(pixels=25)


def test_no_images_with_sums():
    sums = replace(summed(images_of("uint8"), []), sums=(1, 0, 0))
    assert sums.problem(pixels=25) == "sent sums of no images"


def test_a_deadline_ends_the_summation():
    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        sums_of(TensorImages(torch.from_numpy(images_of("uint8"))), torch.arange(3), on_step_start=stop)
