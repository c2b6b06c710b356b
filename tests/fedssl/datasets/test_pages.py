"""Files with color of 16 bits, many channels or several pages."""

import io
import struct
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.pages import Successive, open_pages, stacked
from fedssl.datasets.raster import PixelSettings
from fedssl.errors import InputError
from fedssl.export import Preprocess
from tests.fedssl.datasets.dicom_files import stack, windows
from tests.fedssl.datasets.made import encoded, png_chunk, tiff

ANY = (ValueError, OSError, InputError, RuntimeError, SyntaxError)
RANDOM = np.random.default_rng(0)
BANDS = {"photometric": "minisblack", "planarconfig": "contig"}
COLOR = RANDOM.integers(0, 65536, (6, 6, 3), dtype=np.uint16)


def png(values: np.ndarray) -> bytes:
    """A PNG file of 16 bits with 2, 3 or 4 channels."""
    return bytes(imagecodecs.png_encode(values))


@pytest.mark.parametrize(
    "content",
    [
        png(COLOR),
        b"P6 6 6 65535\n" + COLOR.astype(">u2").tobytes(),
        tiff(COLOR, photometric="rgb"),
        tiff(COLOR, photometric="rgb", compression="lzw"),
        tiff(COLOR, photometric="rgb", compression="zlib", predictor=True),
        tiff(COLOR, photometric="rgb", byteorder=">", bigtiff=True),
        tiff(COLOR.transpose(2, 0, 1).copy(), photometric="rgb", planarconfig="separate"),
    ],
    ids=["PNG", "PPM", "TIFF", "LZW", "deflate", "BigTIFF", "planes"],
)
def test_color_of_16_bits_keeps_every_value(content):
    assert np.array_equal(Decoding(channels=3, size=6)(content), COLOR.transpose(2, 0, 1))


def test_later_frames_of_animated_png_of_16_bits_are_refused():
    start, content = png(COLOR)[:33], png(COLOR)[33:]  # signature and IHDR
    count, frame = png_chunk(b"acTL", struct.pack(">2I", 2, 0)), struct.pack(">4IHH2B", 6, 6, 0, 0, 1, 10, 0, 0)
    second = struct.pack(">I", 2) + zlib.compress(bytes(6 * 37))
    frames = [png_chunk(b"fcTL", struct.pack(">I", 0) + frame), content[:-12]]
    frames += [png_chunk(b"fcTL", struct.pack(">I", 1) + frame), png_chunk(b"fdAT", second), content[-12:]]
    with open_pages(start + count + b"".join(frames), max_pixels=36, channels=3) as pages:
        assert pages.count == 2
        assert np.array_equal(pages.page(0).load(), COLOR)
        with pytest.raises(ValueError, match="animated PNG with color of 16 bits"):
            pages.page(1)


def test_tiff_is_read_by_its_path(tmp_path):
    file = tmp_path / "image.tif"
    for values in (COLOR, COLOR[..., [0, 1, 2, 1, 0]]):
        file.write_bytes(tiff(values, photometric="rgb"))
        found = Decoding(channels=values.shape[2], size=6)(file)
        assert np.array_equal(found, values.transpose(2, 0, 1))


def test_opacity_of_16_bits():
    clear, opaque = np.zeros((6, 6, 1), np.uint16), np.full((6, 6, 1), 65535, np.uint16)
    decoding = Decoding(channels=3, size=6, background=0)
    for make in (png, lambda values: tiff(values, photometric="rgb", extrasamples=["unassalpha"])):
        assert decoding(make(np.concatenate([COLOR, clear], axis=2))).max() == 0
        assert np.array_equal(decoding(make(np.concatenate([COLOR, opaque], axis=2))), COLOR.transpose(2, 0, 1))
    gray = np.concatenate([COLOR[..., :1], opaque], axis=2)
    assert np.array_equal(Decoding(channels=1, size=6)(png(gray))[0], COLOR[..., 0])


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("config", ["contig", "separate"])
def test_thirteen_channels(kind, config):
    values = RANDOM.integers(0, 200, (6, 6, 13)).astype(kind)
    stored = values if config == "contig" else values.transpose(2, 0, 1).copy()
    content = tiff(stored, photometric="minisblack", planarconfig=config)
    settings = {"window": [0, 200]} if kind == "float32" else {}
    found = Decoding(channels=13, size=6, **settings)(content)
    assert found.dtype == kind
    expected = (values / 200).astype(np.float32) if kind == "float32" else values
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), rtol=1e-6)
    with pytest.raises(InputError, match="it has 13 channels but dataset.channels=3"):
        Decoding(channels=3, size=6, **settings)(content)


def test_pages_instead_of_channels():
    """As tifffile writes an array of more than four channels by default."""
    decoding = Decoding(channels=13, size=6)
    for shape, message in (
        ((13, 6, 6), "13 pages of 1 channel, 6 x 6 pixels, but dataset.channels=13; set dataset.pages=channels"),
        ((6, 6, 13), r"6 pages of 1 channel, 13 x 6 pixels, .*save it with photometric='minisblack', planarconfig="),
        ((5, 6, 6), "5 pages of 1 channel, .*set dataset.channels=1"),
    ):
        with pytest.raises(InputError, match=message):
            decoding(tiff(np.zeros(shape, np.uint16)))


@pytest.mark.parametrize(("bands", "kind", "others"), [(4, "u2", 3), (4, "u1", 3), (2, "u1", 4), (4, "RGBA", 2)])
def test_bands_are_no_opacity_and_opacity_may_be_a_band(bands, kind, others):
    values = RANDOM.integers(0, 65536, (6, 6, bands)).astype("u1" if kind == "RGBA" else kind)
    content = encoded(Image.fromarray(values)) if kind == "RGBA" else tiff(values, **BANDS)
    assert np.array_equal(Decoding(channels=bands, size=6)(content), values.transpose(2, 0, 1))
    with pytest.raises(InputError, match=f"it has {bands} channels but dataset.channels={others}"):
        Decoding(channels=others, size=6)(content)


@pytest.mark.parametrize("make", [tiff, lambda values: tiff(values, compression="zlib")], ids=["raw", "deflate"])
def test_pages_of_tiff(tmp_path, make):
    stack = RANDOM.integers(0, 65536, (5, 8, 8), dtype=np.uint16)
    (tmp_path / "stack.tif").write_bytes(make(stack))
    found = list(Decoding(channels=1, size=8).each(Page(tmp_path / "stack.tif", number) for number in (4, 0, 2, 5)))
    assert all(np.array_equal(image[0], stack[number]) for image, number in zip(found, (4, 0, 2), strict=False))
    assert isinstance(found[3], IndexError)


def test_a_mixture_has_the_widest_dtype_of_a_sample():
    eight, sixteen = encoded(Image.fromarray(np.full((6, 6, 3), 200, np.uint8))), png(COLOR)
    decoding = Decoding(channels=3, size=6).with_found_dtype([eight, b"damaged", sixteen])
    assert (decoding.pixel_dtype, decoding(eight).max(), decoding(sixteen).dtype) == ("uint16", 200 * 257, np.uint16)
    narrow = Decoding(channels=3, size=6).with_found_dtype([eight])
    assert narrow(eight).dtype == np.uint8
    message = "it needs dtype uint16, and a sample of the images uint8; set dataset.dtype=u"
    with pytest.raises(InputError, match=message):
        narrow(sixteen)
    reduced = Decoding(channels=3, size=6, dtype="uint8")(sixteen)
    assert np.array_equal(reduced, (COLOR.transpose(2, 0, 1) // 256))


def test_color_of_16_bits_needs_a_path(tmp_path):
    (tmp_path / "deep.png").write_bytes(png(COLOR))
    preprocess = Preprocess(size=6, mean=(0.0,) * 3, std=(1.0,) * 3)
    with pytest.raises(InputError, match="Pillow reduces color of 16 bits to 8; give the path"):
        preprocess(Image.open(tmp_path / "deep.png"))
    np.testing.assert_allclose(preprocess(tmp_path / "deep.png")[0], COLOR.transpose(2, 0, 1) / 65535, rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tiff(np.zeros((6, 6, 65), np.uint16), **BANDS), "it has 65 channels, and 64 are the maximum"),
        (tiff(np.zeros((6, 6, 13), np.complex64), **BANDS), "its values are not those of an image"),
        (b"P3 1 1 4095\n1 2 3\n", "it is plain PPM with more than 8 bits"),
        (png(COLOR)[:60], ""),
        (tiff(COLOR, photometric="rgb")[:-20], ""),
    ],
    ids=["channels", "complex", "plain PPM", "cut PNG", "cut TIFF"],
)
def test_unsuitable_files_have_a_reason(content, reason):
    with pytest.raises(ANY) as raised:
        Decoding(channels=3, size=6)(content)
    assert reason in unreadable_reason(raised.value)


def test_a_declared_size_is_checked_before_decoding():
    content = bytearray(tiff(np.zeros((6, 6, 13), np.uint16), **BANDS))
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        tags = file.pages[0].tags
        offsets = [tags[name].valueoffset for name in ("ImageWidth", "ImageLength")]
    for offset in offsets:
        struct.pack_into("<H", content, offset, 60_000)
    with pytest.raises(ValueError, match="it has 60,000 x 60,000 pixels, more than dataset.max_pixels"):
        Decoding(channels=13, size=6)(bytes(content))
    for offset in offsets:
        struct.pack_into("<H", content, offset, 3_900)
    with pytest.raises(ValueError, match="its pixels are not in the file"):
        Decoding(channels=13, size=6)(bytes(content))


def test_successive_values_repeat_what_was_raised():
    started = []

    def values():
        started.append(1)
        yield from range(10)
        raise ValueError("damaged")

    successive = Successive(values)
    assert [successive[number] for number in (0, 1, 1, 5, 9, 2)] == [0, 1, 1, 5, 9, 2]
    assert len(started) == 2
    for number in (10, 10, 11, 12):
        with pytest.raises(ValueError, match="damaged"):
            successive[number]
    assert (successive[3], len(started)) == (3, 3)
    assert Successive(lambda: iter([7]))[1] is None


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_orientation_of_every_tiff_is_that_of_pillow(orientation, channels):
    values = RANDOM.integers(0, 256, (6, 6, channels), dtype=np.uint8)
    tags = [(274, "H", 1, orientation, True)]
    options = {**BANDS, "extratags": tags} if channels > 1 else {"photometric": "minisblack", "extratags": tags}
    deep = values if channels > 1 else values[..., 0]
    found = Decoding(channels=channels, size=6)(tiff(deep.astype(np.uint16) * 257, **options))
    for plane, band in zip(found, values.transpose(2, 0, 1), strict=True):
        content = tiff(band.copy(), photometric="minisblack", extratags=tags)
        assert np.array_equal(plane // 257, np.asarray(Image.open(io.BytesIO(content)).copy()))


@pytest.mark.parametrize("extra", ["unspecified", "assocalpha", "unassalpha"])
@pytest.mark.parametrize("bands", [4, 5])
def test_bands_of_8_bits_beside_red_green_and_blue(extra, bands):
    """Near infrared is neither dropped nor taken for opacity."""
    values = RANDOM.integers(0, 256, (6, 6, bands), dtype=np.uint8)
    content = tiff(values, photometric="rgb", extrasamples=[extra] * (bands - 3))
    assert np.array_equal(Decoding(channels=bands, size=6)(content), values.transpose(2, 0, 1))


def test_unsigned_values_of_32_bits():
    values = np.uint32(3_000_000_000) + RANDOM.integers(0, 1000, (6, 6), dtype=np.uint32)
    window = [3_000_000_000, 3_000_001_000]
    found = Decoding(channels=1, size=6, window=window)(tiff(values, photometric="minisblack"))
    np.testing.assert_allclose(found[0], (values - np.uint32(3_000_000_000)) / 1000, atol=1e-6)


def test_a_transparent_color_of_16_bits():
    values = COLOR.copy()
    values[0, 0] = values[2, 3]
    content = png(values)
    content = content[:33] + png_chunk(b"tRNS", values[2, 3].astype(">u2").tobytes()) + content[33:]
    expected = np.where((values == values[2, 3]).all(axis=2), 0, values.transpose(2, 0, 1))
    assert np.array_equal(Decoding(channels=3, size=6, background=0)(content), expected)


def test_colors_that_would_be_misread():
    palette = np.zeros((3, 65536), np.uint16)
    with pytest.raises(ValueError, match="it has colors PALETTE; save it as RGB"):
        Decoding(channels=3, size=6)(tiff(COLOR[..., 0].copy(), photometric="palette", colormap=palette))
    with pytest.raises(ValueError, match="it has colors CIELAB; save it as RGB"):
        Decoding(channels=3, size=6)(tiff(COLOR, photometric="cielab"))
    with pytest.raises(ValueError, match="it is JPEG 2000 with 16 bits of color; save it as TIFF or PNG"):
        Decoding(channels=3, size=6)(imagecodecs.jpeg2k_encode(COLOR, level=0))


@pytest.mark.parametrize("depth", [1, 64])
def test_channels_of_large_images_are_limited(tmp_path, depth):
    """A file of kilobytes would need gigabytes."""
    file = tmp_path / "image.tif"
    stored = np.zeros((64, 20, 20), np.uint16)
    options = {"planarconfig": "separate"} if depth == 1 else {}
    tifffile.imwrite(file, stored, photometric="minisblack", compression="zlib", **options)
    source = Page(file, 0, depth) if depth > 1 else file
    assert Decoding(channels=64, size=4, max_pixels=6400)(source).shape == (64, 4, 4)  # 64 * 20 * 20 / 4
    with pytest.raises(ValueError, match="64 channels of 20 x 20 pixels, more than 4 times dataset.max_pixels=6399"):
        Decoding(channels=64, size=4, max_pixels=6399)(source)


def test_images_inside_tiff_may_declare_any_size():
    content = tiff(RANDOM.integers(0, 9, (16, 16, 5), dtype=np.uint16), compression="jpegxl", **BANDS)
    with pytest.raises(ValueError, match="it has JPEGXL; save it as RGB, with deflate, LZW or zstd"):
        Decoding(channels=5, size=6)(content)


def test_the_last_class_is_in_the_sample_of_dtypes():
    gray = [np.zeros((6, 6), np.uint8), np.zeros((6, 6), np.uint16)]
    first, last = (tiff(values, photometric="minisblack") for values in gray)
    assert Decoding(channels=1, size=6).with_found_dtype([first] * 60 + [last] * 4).found_dtype == "uint16"


def test_color_of_16_bits_multiplied_by_opacity():
    """Kind 1 of TIFF's extra samples; kind 2 is not multiplied."""
    values = np.array([[[10000, 20000, 30000, 32768]]], np.uint16).repeat(2, axis=1)
    decoding = Decoding(channels=3, size=1, background=255)
    for kind, factor in (("assocalpha", 1), ("unassalpha", 32768 / 65535)):
        found = decoding(tiff(values, photometric="rgb", extrasamples=[kind])).ravel()
        assert np.abs(found - (np.array([10000, 20000, 30000]) * factor + 65535 - 32768)).max() <= 1


def pages_of_tiff(*pages: tuple[np.ndarray, str]) -> bytes:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        for values, photometric in pages:
            file.write(values, photometric=photometric, contiguous=False)
    return stream.getvalue()


NARROW, WIDE = (np.random.default_rng(1).integers(0, 256, (6, 6), dtype=kind) for kind in (np.uint8, np.uint16))


@pytest.mark.parametrize(
    "content",
    [
        stack(np.stack([WIDE, WIDE]), PerFrameFunctionalGroupsSequence=windows(100, 300)),
        pages_of_tiff((NARROW, "minisblack"), (WIDE, "minisblack")),
        pages_of_tiff((NARROW, "minisblack"), (NARROW, "miniswhite")),
        pages_of_tiff((WIDE, "minisblack"), (WIDE, "miniswhite")),
    ],
    ids=["windows", "bits", "polarity", "polarity of 16 bits"],
)
def test_pages_as_channels_are_scaled_one_by_one(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    one, two = (Decoding(channels=channels, size=6, dtype="float32") for channels in (1, 2))
    expected = np.concatenate([one(Page(tmp_path / "file", number)) for number in range(2)])
    np.testing.assert_allclose(two(Page(tmp_path / "file", 0, 2)), expected, atol=1e-6)


def test_pages_as_channels_have_common_percentiles(tmp_path):
    frames = np.stack([WIDE, 3 * WIDE])
    low, high = np.percentile(frames, (10, 90))
    for name, content in (
        ("a.tif", tiff(frames)),
        ("b.dcm", stack(frames, PerFrameFunctionalGroupsSequence=windows(100, 300))),
    ):
        (tmp_path / name).write_bytes(content)
        found = Decoding(channels=2, size=6, dtype="float32", percentiles=[10, 90])(Page(tmp_path / name, 0, 2))
        np.testing.assert_allclose(found, ((frames - low) / (high - low)).clip(0, 1), atol=1e-6)


def test_pages_of_1_bit_as_channels(tmp_path):
    (tmp_path / "stack.tif").write_bytes(tiff(COLOR.transpose(2, 0, 1) > 30000, photometric="minisblack"))
    found = Decoding(channels=3, size=6)(Page(tmp_path / "stack.tif", 0, 3))
    assert np.array_equal(found, (COLOR.transpose(2, 0, 1) > 30000) * 255)


@pytest.mark.parametrize(("axes", "shape"), [("ZCYX", (2, 4, 6, 6)), ("CYX", (4, 6, 6)), ("CZYX", (4, 2, 6, 6))])
@pytest.mark.parametrize("channels", [4, 2])
def test_pages_of_ome_are_channels_in_their_order(tmp_path: Path, axes: str, shape: tuple[int, ...], channels: int):
    file = tmp_path / "1.ome.tif"
    values = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    tifffile.imwrite(file, values, ome=True, metadata={"axes": axes}, photometric="minisblack")
    with open_pages(file, max_pixels=100, channels=channels) as pages:
        if axes == "CZYX":
            with pytest.raises(ValueError, match="in the order XYZCT, channel by channel; save it with axes ZCYX"):
                stacked(pages, 0, channels, PixelSettings(channels=channels, size=6), max_pixels=100)
            return
        found = stacked(pages, 0, channels, PixelSettings(channels=channels, size=6), max_pixels=100).load()
    assert np.array_equal(np.moveaxis(found, -1, 0), values.reshape(-1, 6, 6)[:channels])
