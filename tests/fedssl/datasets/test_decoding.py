"""Decoding of encoded images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.datasets import decoding, storage
from fedssl.datasets.stores import Pixels
from fedssl.errors import InputError
from tests.fedssl.datasets.made import Batches, first_pixels, make_image, png

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def test_exif_orientation_is_honoured(tmp_path: Path) -> None:
    stored = Image.fromarray(np.array([[1, 2], [3, 4]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored image must be turned by 90 degrees clockwise
    stored.save(tmp_path / "turned.png", exif=exif)
    assert decoding.Decoding(channels=1, size=2)(tmp_path / "turned.png").tolist() == [[[3, 1], [4, 2]]]


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
