"""Decoding of encoded images."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from fedssl.datasets import decoding, storage
from fedssl.datasets.stores import Pixels
from fedssl.errors import InputError
from tests.fedssl.datasets.made import Batches, first_pixels, make_image, png

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_that_of_pillow(tmp_path: Path, orientation: int) -> None:
    exif, file = Image.Exif(), tmp_path / "turned.png"
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(file, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    assert decoding.Decoding(channels=1, size=4)(file)[0].tolist() == upright.tolist()


@pytest.mark.parametrize("options", [{}, {"dpi": (72, 72)}])
@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_damaged_exif_does_not_make_an_image_unreadable(tmp_path: Path, ending: str, options: dict[str, Any]) -> None:
    file = tmp_path / f"damaged.{ending}"
    make_image(9).save(file, exif=b"Exif\0\0garbage!", **options)
    assert decoding.Decoding(channels=3, size=4)(file).shape == (3, 4, 4)


def test_an_image_is_turned_though_pillow_cannot_write_its_exif(tmp_path: Path) -> None:
    # Little-endian: two entries of tag, type, number and value. The unit should be an integer (3), but is a text (2).
    unit = (ExifTags.Base.ResolutionUnit, 2, 1, ord("2"))
    entries = struct.pack("<HHHIIHHII", 2, ExifTags.Base.Orientation, 3, 1, 6, *unit)
    file = tmp_path / "turned.png"
    exif = b"Exif\0\0II*\0\x08\0\0\0" + entries + bytes(4)
    Image.fromarray(np.array([[1, 2], [3, 4]], dtype=np.uint8)).save(file, exif=exif)
    assert decoding.Decoding(channels=1, size=2)(file).tolist() == [[[3, 1], [4, 2]]]


def test_decode_keeps_order_and_reports_what_it_cannot_read() -> None:
    batches = [[png(make_image(value)) for value in range(start, start + 3)] for start in range(0, 60, 3)]
    batches[4][1] = b"not an image"
    pixels = Pixels(Batches(batches, channels=1, size=4), None)
    images = pixels.make(required=True)
    assert pixels.done == 60
    unreadable = pixels.unreadable
    assert list(unreadable) == [13]
    assert unreadable[13].startswith("it is no image of JPEG, PNG, ")
    rest = [value for value in range(60) if value != 13]
    assert pixels.readable.tolist() == rest
    assert first_pixels(images) == rest


def test_images_beyond_memory_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "available_memory", lambda: 8 * 10**9)
    # 10^6 * 3 * 64 * 64 = 12.288 * 10^9 bytes
    with pytest.raises(InputError, match=r"1,000,000 images of 3 x 64 x 64 need 12\.3 GB of memory, and 8\.0 GB are"):
        # 10^6 * 3 * 64 * 64 = 12.288 * 10^9 bytes
        Pixels(Batches([range(10**6)], channels=3, size=64), None).make(required=True)
