"""Malicious images: reported and left out, without delay, memory use or programs."""

import os
import socket
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from fedssl.datasets import folder as reader
from fedssl.datasets.stores import Pixels
from fedssl.errors import InputError
from fedssl.machine import memory
from tests.fedssl.datasets.made import Batches, encoded, png_chunk


def make_image(value: int = 7, *, mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("L", size, value).convert(mode)


def declared(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares this size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


def with_text(megabytes: int) -> bytes:
    """A PNG with a compressed comment that expands to this size."""
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 2**20 * megabytes, zip=True)
    return encoded(make_image(), "PNG", pnginfo=info)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) print\n"
HARMFUL = {
    "eps.jpg": (EPS, "it is no image of JPEG"),
    "pdf.png": (b"%PDF-1.4\n", "it is no image of JPEG"),
    "svg.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is no image of JPEG"),
    "tga.jpg": (encoded(make_image(), "TGA"), "it is no image of JPEG"),
    "ico.png": (encoded(make_image(), "ICO"), "it is no image of JPEG"),
    "large.png": (declared(13_300, 13_300), "13,300 x 13,300 pixels, more than dataset.max_pixels=50000000"),
    "long.png": (declared(2**31 - 1, 2**31 - 1), ""),
    "cut.png": (encoded(make_image(size=(64, 64)), "PNG")[:-30], ""),
    "text.png": (with_text(2), "Decompressed data too large"),
    "float.tif": (encoded(make_image(mode="F"), "TIFF"), "without a known range"),
    "integer.tif": (encoded(make_image(mode="I"), "TIFF"), "without a known range"),
    "empty.png": (b"", "it is no image of JPEG"),
}
HARMLESS = {
    "wrong_suffix.png": encoded(make_image(), "JPEG", quality=100),
    "animated.gif": encoded(make_image(), "GIF", save_all=True, append_images=[make_image(90), make_image(200)]),
    "animated.webp": encoded(make_image(), "WEBP", save_all=True, append_images=[make_image(90)], lossless=True),
    "cmyk.jpg": encoded(make_image(mode="CMYK"), "JPEG", quality=100),
    "sixteen.png": encoded(Image.fromarray(np.full((8, 8), 7 * 256 + 9, dtype=np.uint16)), "PNG"),
    "palette.bmp": encoded(make_image(mode="P"), "BMP"),
    "plain.ppm": encoded(make_image(), "PPM"),
    "progressive.jpg": encoded(make_image(), "JPEG", quality=100, progressive=True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (content, _) in HARMFUL.items():
        (tmp_path / name).write_bytes(content)
    for name, content in HARMLESS.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read(path: Path, **settings: object):
    fixed = {"channels": 3, "size": 8, "dtype": "uint8", "limit": None, "test_fraction": 0}
    return reader.read("train", path=str(path), **fixed, **settings)


def test_malicious_images_are_left_out(folder, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *overrides, **how: pytest.fail(f"{overrides} was started"))
    start = time.monotonic()
    result = read(folder)
    assert time.monotonic() - start < 20
    assert len(result.images) == len(HARMLESS)
    assert (result.images[:].int() - 7).abs().max() <= 2
    notice, frames, dark = result.warnings
    assert notice.startswith(f"{len(HARMFUL)} of {len(HARMFUL) + len(HARMLESS)} images cannot be read, the rest is ")
    assert f"and {len(HARMFUL) - 5} more" in notice
    assert frames.startswith("2 of a sample of 11 images have several pages or frames, and only the first is")
    assert "1 images with more than 8 bits are 1,801 to 1,801 of 0 to 65,535" in dark  # sixteen.png: 7 * 256 + 9


def test_malicious_images_in_parquet_files_are_left_out(tmp_path):
    harmful = [content for content, _ in HARMFUL.values()]
    rows = [*harmful, *HARMLESS.values(), None]
    pq.write_table(pa.table({"img": rows, "label": list(range(len(rows)))}), tmp_path / "train.parquet")
    settings = {"path": str(tmp_path), "hub": "x", "image": "img", "label": "label"}
    result = reader.read("train", channels=3, size=8, dtype="uint8", limit=None, **settings)
    kept = range(len(harmful), len(rows) - 1)
    assert result.labels.tolist() == list(kept)
    assert result.warnings[0].startswith(f"{len(harmful) + 1} of {len(rows)} images cannot be read, the rest is used: ")
    assert ".parquet[0]" in result.warnings[0]
    assert result.warnings[1].endswith("only the first is used; to use all, write each to an image")


def test_only_regular_files_are_opened(tmp_path):
    """Also if it replaces an image after the folder has been listed: opening does not block."""
    places = [tmp_path / name for name in ("pipe.png", "socket.png", "folder.png", "loop.png", "zero.png")]
    os.mkfifo(places[0])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(places[1]))
    places[2].mkdir()
    places[3].symlink_to(places[3])
    places[4].symlink_to("/dev/zero")
    (tmp_path / "one.png").write_bytes(encoded(make_image(), "PNG"))
    start = time.monotonic()
    assert len(read(tmp_path).images) == 1
    pixels = Pixels(Batches([places], channels=3, size=8), None)
    with pytest.raises(InputError, match="none of the 5 images can be read"):
        pixels.make(required=True)
    assert list(pixels.unreadable) == list(range(len(places)))
    assert time.monotonic() - start < 5


def test_the_limit_is_a_setting(tmp_path):
    for side in (8, 9):
        (tmp_path / f"{side}.png").write_bytes(encoded(make_image(size=(side, side)), "PNG"))
    assert len(read(tmp_path, max_pixels=64).images) == 1
    assert len(read(tmp_path, max_pixels=81).images) == 2
    for wrong, allowed in ((0, "an integer of at least 1"), (2 * 10**8, "at most 178,956,970")):
        with pytest.raises(InputError, match=f"dataset.max_pixels={wrong} must be {allowed}"):
            read(tmp_path, max_pixels=wrong)


def test_large_images_wait_for_room_in_all_threads(tmp_path, monkeypatch):
    """Memory for two large images: further ones wait, small ones do not."""
    monkeypatch.setattr(memory.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(memory, "available_memory", lambda: 2 * memory._SHARE * 2**30)
    lock, inside, most = threading.Lock(), [0], [0]

    def work():
        with memory.decode_slot(2**29, largest=2**30):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.03)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    with memory.decode_slot(memory.SMALL, largest=2**30):
        pass
    for thread in threads:
        thread.join()
    assert most[0] == 2
    assert len(list(tmp_path.iterdir())) == 2
