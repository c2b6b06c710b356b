"""One geometry for images of Pillow and for tensors: the centered square, scaled."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fedssl.datasets.geometry import center_square, fit_image, fit_tensor

# Height, width, size: wide, high, odd margins, one row, enlarged, square.
SHAPES = [(8, 32, 8), (32, 8, 8), (7, 20, 8), (97, 64, 32), (481, 640, 224), (1, 1000, 16), (5, 6, 32), (33, 33, 32)]


def drawn(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_square_is_centered():
    assert center_square(20, 7) == (6.5, 0, 7)
    assert center_square(7, 20) == (0, 6.5, 7)


@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
def test_images_have_the_pixels_of_fit(height, width, size):
    image = Image.fromarray(drawn(height, width))
    expected = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(fit_image(image, size)), np.asarray(expected))


@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
def test_tensors_have_the_pixels_of_images(height, width, size):
    """Pillow rounds to integers after each of its two passes, by at most a half."""
    pixels = drawn(height, width)
    expected = np.asarray(fit_image(Image.fromarray(pixels), size)).transpose(2, 0, 1).astype(float)
    found = fit_tensor(torch.from_numpy(pixels).permute(2, 0, 1)[None].float(), size)[0]
    assert np.abs(found.numpy() - expected).max() < 1.001
