"""Conversion of images of all modes to pixels."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from fedssl.datasets.decoding import Decoding
from fedssl.datasets.pixels import to_array
from fedssl.datasets.raster import PixelSettings
from fedssl.errors import InputError
from tests.fedssl.datasets import made
from tests.fedssl.datasets.made import encoded, png_chunk


def read(content: bytes, **changes: object) -> list:
    """Return the pixels of one channel."""
    form = {"channels": 1, "size": Image.open(io.BytesIO(content)).height, "dtype": "uint8", **changes}
    return Decoding(**form)(content)[0].tolist()


def tiff(values: np.ndarray, photometric: str = "minisblack") -> bytes:
    """Return a TIFF file of the values ``(height, width)``, in their byte order."""
    return made.tiff(values, photometric=photometric, byteorder=">" if values.dtype.byteorder == ">" else "<")


def test_another_size_scales_the_shorter_side_and_crops_the_center() -> None:
    three = np.repeat(np.array([[10, 20, 30]], dtype=np.uint8), 4, axis=0).repeat(4, axis=1)  # 4 high, 12 wide
    assert (to_array(Image.fromarray(three), PixelSettings(channels=1, size=4)) == 20).all()
    assert (to_array(Image.fromarray(three.T.copy()), PixelSettings(channels=1, size=4)) == 20).all()
    # Half the size: the filter reaches one pixel over the edge of the crop.
    assert np.abs(to_array(Image.fromarray(three), PixelSettings(channels=1, size=2)).astype(int) - 20).max() <= 2
    assert to_array(Image.fromarray(three), PixelSettings(channels=3, size=9)).shape == (3, 9, 9)


# Two pixels, the second transparent, in each mode's own form. They are black where the mode has a transparent black.
BLACK = {
    "RGBA": (Image.fromarray(np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8)), {}),
    "LA": (Image.fromarray(np.array([[[0, 255], [0, 0]]], np.uint8), "LA"), {}),
    "RGB": (Image.fromarray(np.array([[[0, 0, 0], [0, 0, 1]]], np.uint8)), {"transparency": (0, 0, 1)}),
    "L": (Image.fromarray(np.array([[0, 1]], np.uint8)), {"transparency": 1}),
    "1": (Image.fromarray(np.array([[255, 0]], np.uint8)).convert("1"), {"transparency": 0}),
    "I;16": (Image.fromarray(np.array([[0, 256]], np.uint16)), {"transparency": 256}),
    "P": (Image.fromarray(np.array([[0, 1]], np.uint8)), {"transparency": b"\xff\x00"}),
}
BLACK["P"][0].putpalette([0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("mode", BLACK)
def test_transparent_pixels_have_the_background(mode):
    image, options = BLACK[mode]
    first = 255 if mode == "1" else 0
    for background in (255, 0, 128):
        form = {"channels": 3, "size": 1, "background": background, "dtype": "uint8"}
        left, right = (encoded(image.crop((x, 0, x + 1, 1)), **options) for x in (0, 1))
        assert Decoding(**form)(left).ravel().tolist() == [first] * 3
        assert Decoding(**form)(right).ravel().tolist() == [background] * 3


def test_color_spaces_of_print_and_of_editors():
    """CMYK of JPEG, which Adobe stores inverted, LAB of TIFF, HSV, 1 bit and a palette of 16 entries."""
    color = Image.new("RGB", (16, 16), (200, 100, 50))
    profiles = (ImageCms.createProfile(name) for name in ("sRGB", "LAB"))
    lab = ImageCms.profileToProfile(color, *profiles, outputMode="LAB")
    sixteen = color.quantize(16)
    files = {
        "CMYK": encoded(color.convert("CMYK"), "JPEG", quality=100),
        "CMYK of TIFF": encoded(color.convert("CMYK"), "TIFF"),
        "LAB": encoded(lab, "TIFF"),
        "YCbCr": encoded(color, "JPEG", quality=100),
        "palette": encoded(sixteen, bits=4),
    }
    for name, content in files.items():
        for channels, expected in ((3, [200, 100, 50]), (1, [124])):
            found = Decoding(channels=channels, size=16)(content)[:, 8, 8]
            assert np.abs(found.astype(int) - expected).max() <= 3, (name, found)
    assert to_array(color.convert("HSV"), PixelSettings(channels=1, size=16))[0, 0, 0] in (123, 124)
    bits = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")
    assert read(encoded(bits)) == read(encoded(bits, "TIFF")) == [[0, 255], [255, 0]]


RAMP = np.array([[0, 255], [256, 65535]], np.uint16)


@pytest.mark.parametrize(
    "content",
    [
        encoded(Image.fromarray(RAMP)),
        encoded(Image.fromarray(RAMP), "TIFF"),
        tiff(RAMP.astype(">u2")),
        tiff(65535 - RAMP, photometric="miniswhite"),
        tiff((RAMP // 2).astype("<i2")),
        tiff((RAMP // 2).astype(">i2")),
        b"P5 2 2 65535\n" + RAMP.astype(">u2").tobytes(),
        b"P2 2 2 65535\n0 255 256 65535\n",
    ],
    ids=["PNG", "TIFF", "big-endian", "white is zero", "int16", "big-endian int16", "PGM", "plain PGM"],
)
def test_values_of_16_bits_become_their_upper_8(content):
    assert read(content) == [[0, 0], [1, 255]]


def test_values_are_divided_by_the_given_maximum():
    twelve = np.array([[0, 16], [2048, 4095]], ">u2")
    levels = [[0, 1], [128, 255]]
    for window in (None, [0, 4095], [0, 1023]):
        assert read(b"P5 2 2 4095\n" + twelve.tobytes(), window=window) == levels
        assert read(b"P2 2 2 4095\n0 16 2048 4095\n", window=window) == levels
    assert read(b"P5 2 2 65535\n" + twelve.tobytes(), window=[0, 4095]) == levels
    assert read(b"Pf 2 2 -1.0\n" + twelve[::-1].astype("<f4").tobytes(), window=[0, 4095]) == levels
    assert read(b"P6 2 2 4095\n" + twelve.repeat(3).tobytes()) == levels
    png = encoded(Image.fromarray(twelve.astype("<u2")))
    for content in (png, tiff(twelve), tiff(twelve.astype("<i4"))):
        assert read(content, window=[0, 4095]) == levels
    assert read(tiff((twelve / 4095).astype("<f4")), window=[0, 1]) == levels
    assert read(encoded(Image.fromarray(twelve.astype(np.uint8))), window=[0, 4095]) == [[0, 16], [0, 255]]  # 8 bits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tiff(np.array([[-1000, 5]], "<i2")), "its lowest value is -1000"),
        (
            tiff(np.array([[np.nan, 5]], "<f4")),
            "its values are float32, from 5 to 5, without a known range; set dataset.window=",
        ),
        (tiff(np.array([[-5, 5]], "i1")), "signed 8-bit values"),
    ],
    ids=["int16", "float", "int8"],
)
def test_values_without_a_range_are_refused(content, message):
    with pytest.raises(InputError, match=message):
        read(content)


def test_values_beyond_the_window_are_black_and_white():
    values = np.array([[-2000, -1000, -500], [0, 500, 999], [1000, 2000, 9000]])
    levels = [[0, 0, 63], [127, 191, 255], [255, 255, 255]]  # 255.999 (x + 1000) / 2000
    for kind in ("<i2", "<f4", "<i4"):
        assert read(tiff(values.astype(kind)), window=[-1000, 1000]) == levels
    assert read(tiff(np.array([[np.nan, 5]], "<f4")), window=[0, 10], size=1) == [
        [63]
    ]  # 255.999 (0 + 0.5) / 4, of both


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_transparent_value_of_few_bits(bits):
    """Pillow scales the gray values of PNG to 8 bits, but not the transparent one."""
    start = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, bits, 0, 0, 0, 0))
    start += png_chunk(b"tRNS", struct.pack(">H", 1))
    for value, expected in ((0, 0), (1, 99)):  # black, and the transparent value
        pixels = png_chunk(b"IDAT", zlib.compress(bytes([0, value << 8 - bits])))
        decoded = Decoding(channels=1, size=1, background=99)(start + pixels + png_chunk(b"IEND", b""))
        assert decoded.tolist() == [[[expected]]]


def test_gray_multiplied_by_opacity():
    image = Image.fromarray(np.array([[[100, 128]]], np.uint8), "LA").convert("La")
    form = {"channels": 1, "size": 1, "dtype": "uint8"}
    assert to_array(image, PixelSettings(**form, background=0)).ravel().tolist() == [50]
