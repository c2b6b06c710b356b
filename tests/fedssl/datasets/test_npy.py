"""Arrays of NumPy as images: their axes, and damaged files."""

import io
import re

import numpy as np
import pytest

from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.npy import as_images

ANY = (ValueError, OSError, SyntaxError)  # exceptions can have any type


def npy(array: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("shape", "channels", "expected"),
    [
        ((32, 40), 1, (1, 32, 40, 1)),
        ((32, 40, 3), 3, (1, 32, 40, 3)),
        ((3, 32, 40), 3, (1, 32, 40, 3)),
        ((13, 13, 13), 13, (1, 13, 13, 13)),
        ((13, 70, 80), 13, (1, 70, 80, 13)),
        ((3, 64, 4), 4, (1, 3, 64, 4)),  # the data set's channels come first
        ((3, 64, 5), 1, (1, 64, 5, 3)),  # 3 of color before 5
        ((155, 240, 240), 1, (155, 240, 240, 1)),  # slices
        ((60000, 28, 28), 1, (60000, 28, 28, 1)),
        ((100, 28, 28), 3, (100, 28, 28, 1)),
        ((100, 28, 28), 28, (1, 100, 28, 28)),
        ((28, 28, 28), 1, (28, 28, 28, 1)),
        ((24, 80, 80), 1, (24, 80, 80, 1)),  # bands are not gray
        ((24, 80, 80, 1), 3, (24, 80, 80, 1)),
        ((24, 80, 3), 3, (1, 24, 80, 3)),
        ((3, 80, 80), 3, (1, 80, 80, 3)),
        ((500, 40, 48), 1, (500, 40, 48, 1)),
        ((24, 200, 80), 1, (24, 200, 80, 1)),
        ((64, 64, 13), 3, (1, 64, 64, 13)),  # the last axis is too short for an image
        ((24, 32, 4), 3, (1, 24, 32, 4)),
        ((9, 9, 5), 3, (1, 9, 9, 5)),
        ((100, 30, 28), 3, (1, 100, 30, 28)),  # or a stack
        ((9, 32, 40, 1), 1, (9, 32, 40, 1)),
        ((9, 1, 32, 40), 1, (9, 32, 40, 1)),
        ((9, 1, 4, 4), 3, (9, 4, 4, 1)),  # 1 of gray before 4
    ],
)
def test_axes_are_recognized_by_the_channels(shape, channels, expected):
    assert as_images(np.zeros(shape, np.uint8), channels).shape == expected


@pytest.mark.parametrize("shape", [(5,), (2, 2, 2, 2, 2), (0, 4, 4), (9, 70, 70, 70)])
def test_other_axes_are_refused(shape):
    with pytest.raises(ValueError, match=r"its shape is \("):
        as_images(np.zeros(shape, np.uint8), 3)


@pytest.mark.parametrize("order", ["C", "F"])
def test_values_are_those_of_the_file(order):
    values = np.random.default_rng(0).integers(0, 65536, (4, 4, 13), dtype=np.uint16)
    content = npy(np.array(values, order=order))
    assert np.array_equal(Decoding(channels=13, size=4)(content), values.transpose(2, 0, 1))
    assert np.array_equal(Decoding(channels=13, size=4)(npy(values.astype(">u2"))), values.transpose(2, 0, 1))


def test_a_stack_that_may_be_bands_is_refused():
    with pytest.raises(ValueError, match=re.escape("for 13 gray images save array[..., None], for an image of 13")):
        as_images(np.zeros((13, 80, 80), np.uint8), 3)


def test_pages_of_a_stack(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (70, 80, 80), dtype=np.uint8)
    (tmp_path / "stack.npy").write_bytes(npy(values))
    decoding = Decoding(channels=1, size=80)
    pages = [Page(tmp_path / "stack.npy", number) for number in (3, 0, 69, 70)]
    *found, beyond = decoding.each(pages)
    assert all(np.array_equal(image[0], values[page.number]) for image, page in zip(found, pages[:3], strict=True))
    assert isinstance(beyond, IndexError)
    assert np.array_equal(decoding(pages[2])[0], values[69])
    missing = list(decoding.each([Page(tmp_path / "none.npy", 0), Page(tmp_path / "none.npy", 1)]))
    assert [type(error) for error in missing] == [FileNotFoundError] * 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy(np.array([{}], object)), "it is an array of object"),
        (npy(np.array(["a"])), "it is an array of <U1"),
        (npy(np.zeros((4, 4), complex)), "it is an array of complex128"),
        (npy(np.zeros((64, 64), np.uint8))[:-1], "it has been cut"),
        (npy(np.zeros((2, 2, 100, 100), np.uint8).repeat(40, 1).repeat(40, 0)), "no axis has at most 64 channels"),
        (b"\x93NUMPY\x01\x00" + b"\xff" * 8, ""),
        (b"\x93NUMPY\x01\x00\x76\x00{'descr': '|u1', 'fortran_order': False, 'shape': (9" + b"9" * 12 + b", 9)}", ""),
    ],
    ids=["object", "text", "complex", "cut", "axes", "header", "bomb"],
)
def test_malicious_files_have_a_reason(content, reason):
    with pytest.raises(ANY) as raised:
        Decoding(channels=3, size=8)(content)
    assert reason in unreadable_reason(raised.value)


@pytest.mark.parametrize(
    ("shape", "fortran", "percentiles", "reason"),
    [
        ((40_000, 40_000), False, None, "it has 40,000 x 40,000 pixels"),
        ((2_000, 100, 100), True, None, "save its images"),
        ((2_000, 100, 100), False, (1, 99), "save its images"),
        ((2_000, 100, 100), False, None, None),
    ],
)
def test_large_files_are_not_read_as_a_whole(tmp_path, shape, fortran, percentiles, reason):
    """Images in Fortran's order and percentiles need the whole file, whose size is limited by ``max_pixels``."""
    file = tmp_path / "large.npy"
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": fortran, "shape": shape})
        stream.truncate(stream.tell() + 2 * int(np.prod(shape)))
        stream.seek(-1, 2)
        stream.write(b"\xff")
    decoding = Decoding(channels=1, size=100, max_pixels=10_000, percentiles=percentiles)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            decoding(file)
    else:
        assert [image.max() for image in decoding.each([Page(file, 0), Page(file, 1999)])] == [0, 0xFF00]
