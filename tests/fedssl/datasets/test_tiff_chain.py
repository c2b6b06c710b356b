"""Pages of TIFF files: images in full size, damaged chains, and many pages."""

import io
import struct
import time

import numpy as np
import pytest
import tifffile

from fedssl.datasets.decoding import Decoding, Page
from fedssl.datasets.tiff_chain import image_pages
from tests.fedssl.datasets.made import tiff

STACK = np.random.default_rng(0).integers(0, 65536, (4, 16, 16), dtype=np.uint16)


def written(**options: object) -> io.BytesIO:
    """A pyramid of two images: each in full size, at half of it, and a mask."""
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream, **options) as file:
        for image in STACK[:2]:
            file.write(image, contiguous=False)
            file.write(image[::2, ::2], subfiletype=1, contiguous=False)
            file.write(image > 9, subfiletype=4, contiguous=False)
    return stream


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"byteorder": ">"}, {"byteorder": ">", "bigtiff": True}])
def test_reduced_pages_and_masks_are_no_images(tmp_path, options):
    assert image_pages(written(**options)) == [0, 3]
    (tmp_path / "pyramid.tif").write_bytes(written(**options).getvalue())
    found = list(Decoding(channels=1, size=16).each(Page(tmp_path / "pyramid.tif", number) for number in (1, 0)))
    assert np.array_equal(found[0][0], STACK[1])
    assert np.array_equal(found[1][0], STACK[0])


@pytest.mark.parametrize(
    ("channels", "kind", "photometric"),
    [(1, "uint16", "minisblack"), (3, "uint8", "rgb"), (3, "uint16", "rgb"), (5, "uint8", "minisblack")],
)
def test_a_thumbnail_before_the_image_is_not_read(channels, kind, photometric):
    values = np.random.default_rng(0).integers(0, 256, (16, 16, channels)).astype(kind)
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        for image, subfiletype in ((values[::2, ::2], 1), (values, 0)):
            options = {"photometric": photometric, "planarconfig": "contig" if channels > 1 else None}
            file.write(image.squeeze(), subfiletype=subfiletype, contiguous=False, **options)
    assert np.array_equal(Decoding(channels=channels, size=16)(stream.getvalue()), values.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("is_big", [False, True])
@pytest.mark.parametrize("is_beyond", [False, True])
def test_a_damaged_second_page_leaves_the_first_readable(channels, is_big, is_beyond):
    values = np.broadcast_to(STACK[0, ..., None], (16, 16, channels)).squeeze()
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream, bigtiff=is_big) as file:
        for _ in range(2):
            file.write(values, photometric="minisblack", planarconfig="contig", contiguous=False)
    place, form = tifffile.TiffFile(io.BytesIO(stream.getvalue())).pages[1].offset, "<Q" if is_big else "<I"
    content = stream.getvalue()
    if is_beyond:
        content = content.replace(struct.pack(form, place), b"\xff" * struct.calcsize(form))
    else:
        content = content[:place] + b"\xff" * len(content[place:])
    assert np.array_equal(Decoding(channels=channels, size=16)(content)[0], STACK[0])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"II*\0\x08\0\0\0", [0]),
        (b"II*\0\x08\0\0\0\0\0\x08\0\0\0" + bytes(8), [0]),  # a loop
        (b"II*\0\xff\xff\xff\xff" + bytes(8), [0]),  # beyond the end
        (b"II*\0\x08\0\0\0\xff\xff" + bytes(40), [0]),  # more entries than bytes
        (b"II+\0\x08\0\0\0" + b"\xff" * 8, [0]),  # beyond all files
    ],
    ids=["cut", "loop", "beyond", "entries", "far"],
)
def test_damaged_chains_end(content, expected):
    assert image_pages(io.BytesIO(content.ljust(16, b"\0"))) == expected


def test_a_hundred_thousand_pages_are_counted_at_once():
    empty = b"".join(struct.pack("<HI", 0, 8 + 6 * number) for number in range(1, 100_000))
    stream, start = io.BytesIO(b"II*\0\x08\0\0\0" + empty + bytes(6)), time.process_time()
    assert len(image_pages(stream)) == 100_000
    assert time.process_time() - start < 5
    assert image_pages(stream, limit=1) == [0]
    assert stream.tell() == 14  # after the first


@pytest.mark.parametrize("kind", ["uint16", "int16", "float32"])
def test_pixels_without_data_are_black_and_no_part_of_percentiles(kind):
    values = (STACK[0] // 64).astype(kind)
    missing = 65535 if kind == "uint16" else -9999
    values[:4] = missing
    content = tiff(values, extratags=[(42113, "s", 0, str(missing), True)])
    found = Decoding(channels=1, size=16, percentiles=[0, 100], dtype="float32")(content)
    low, high = values[4:].min(), values[4:].max()
    assert not found[0, :4].any()
    np.testing.assert_allclose(found[0, 4:], (values[4:].astype(float) - low) / (float(high) - low), atol=1e-6)


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
@pytest.mark.parametrize("photometric", ["rgb", "minisblack"])
def test_all_channels_of_color_without_data_have_its_value(kind, photometric):
    values = np.full((4, 4, 3), 10, kind)
    values[0], values[1, :, 0] = 255, 255
    options = {"photometric": photometric, "planarconfig": "contig", "extratags": [(42113, "s", 0, "255", True)]}
    found = Decoding(channels=3, size=4)(tiff(values, **options)).transpose(1, 2, 0)
    first = 255 if photometric == "rgb" else 0
    assert [found[row, 0].tolist() for row in range(3)] == [[0, 0, 0], [first, 10, 10], [10, 10, 10]]
