"""Sheets of thumbnails: the place of every image, sizes, bands, and values of 16 bits and of float32."""

import io
from base64 import b64decode
from functools import cache

import numpy as np
import pytest
from PIL import Image

from fedssl.explore.images import MAX_PIXELS, SHEET, SIZES, Sheets, thumbnail_size


@cache
def pixels(encoded: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(b64decode(encoded))))


def thumbnail(sheets: Sheets, row: int) -> np.ndarray:
    """Cut an image out of its sheet, as the script does."""
    sheet = pixels(sheets.encoded[row // sheets.per_sheet])
    place = row % sheets.per_sheet
    top, left = (sheets.size * index for index in divmod(place, sheets.columns))
    return sheet[top : top + sheets.size, left : left + sheets.size]


@pytest.mark.parametrize("count", [1, 22, 441, 442])
def test_every_image_is_at_its_place(count: int):
    levels = np.arange(count) * 251 // count
    sheets = Sheets(count, 96, (0,))
    for part in np.array_split(levels.astype(np.uint8), 3):
        sheets.add(np.broadcast_to(part[:, None, None, None], (len(part), 1, 8, 8)))
    sheets.finish()
    assert len(sheets.encoded) == -(-count // 441)  # 21 * 21 of 96 pixels on 2048
    means = [thumbnail(sheets, row).mean() for row in range(count)]
    assert np.abs(means - levels).max() < 6


def test_colors_of_neighbors_do_not_mix():
    images = np.zeros((64, 3, 16, 16), np.uint8)
    images[::2, 0], images[1::2, 2] = 255, 255
    sheets = Sheets(64, 16, (0, 1, 2))
    sheets.add(images)
    sheets.finish()
    for row in range(64):
        found = thumbnail(sheets, row)[1:-1, 1:-1]  # colors are stored for pairs of pixels
        assert (found[..., 0].min() > 190) == (row % 2 == 0)
        assert found[..., 2 if row % 2 == 0 else 0].max() < 60


def test_size_falls_with_the_number_of_images():
    assert thumbnail_size(1) == 96
    assert thumbnail_size(10_000) == 48  # 10,000 * 48 ** 2 = 23 million
    assert thumbnail_size(10**6) == 16
    for count in (1, 2604, 2605, 5859, 10_416, 23_437):
        assert count * thumbnail_size(count) ** 2 <= MAX_PIXELS
    assert all(size % 16 == 0 and size <= SHEET for size in SIZES)


@pytest.mark.parametrize(("dtype", "white"), [("uint8", 255), ("uint16", 65535), ("float32", 1.0)])
def test_stored_values_become_levels(dtype: str, white: float):
    images = np.zeros((2, 5, 4, 4), dtype)
    images[0, 3] = white
    sheets = Sheets(2, 16, (3, 1, 0))
    sheets.add(images)
    sheets.finish()
    red, black = (thumbnail(sheets, row).mean(axis=(0, 1)) for row in range(2))
    assert red[0] > 230
    assert max(*red[1:], *black) < 25


def test_photos_and_noise_have_a_bounded_size():
    noise = np.random.default_rng(0).integers(256, size=(200, 3, 96, 96), dtype=np.uint8)
    sheets = Sheets(200, 96, (0, 1, 2))
    sheets.add(noise)
    sheets.finish()
    bytes_per_pixel = sum(map(len, sheets.encoded)) / (200 * 96**2)
    assert bytes_per_pixel * MAX_PIXELS < 30e6
