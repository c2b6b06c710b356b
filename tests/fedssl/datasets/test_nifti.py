"""Slices of NIfTI volumes: those of nibabel's tests, which scanners made, and synthetic ones with known values."""

import gzip
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from fedssl.datasets import formats
from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.listing import list_files
from fedssl.datasets.pages import Pages, open_pages
from fedssl.datasets.sample_checks import range_warnings
from fedssl.errors import InputError

FOLDER = Path(nibabel.__file__).parent / "tests" / "data"
ANY = (ValueError, OSError, EOFError, IndexError, InputError, nibabel.spatialimages.HeaderDataError)
RANDOM = np.random.default_rng(0)
LPS = np.diag([-1.0, -1, 1, 1])  # the first axis goes to the left, the second to posterior: the axes of DICOM
WINDOW = {"window": [0, 65535]}  # keeps every value of 16 bits


def nifti(values: np.ndarray, affine: np.ndarray = LPS, **fields: object) -> bytes:
    image = nibabel.Nifti1Image(values, affine)
    for name, value in fields.items():
        image.header[name] = value
    return image.to_bytes()


def pages_of(content: bytes | Path, use, channels: int = 1):
    with open_pages(content, max_pixels=10**6, channels=channels) as pages:
        return use(pages)


def values_of(pages: Pages, number: int) -> np.ndarray:
    page = pages.page(number)
    return np.asarray(page) if isinstance(page, Image.Image) else page.load()


@pytest.mark.parametrize("name", ["anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "functional.nii"])
def test_values_of_real_files(name):
    expected = nibabel.load(FOLDER / name)
    # all of these go to the left, anterior and superior, so that rows are turned to go to posterior
    assert nibabel.aff2axcodes(expected.affine) == ("L", "A", "S")
    data = expected.get_fdata()
    slices = data.reshape(*data.shape[:2], -1, order="F")  # the slices of each volume in order

    def check(pages: Pages) -> None:
        assert pages.count == slices.shape[2]
        for number in (0, 5, pages.count - 1, 1):
            assert np.array_equal(values_of(pages, number), slices[:, ::-1, number].T)

    pages_of(FOLDER / name, check)
    pages_of((FOLDER / name).read_bytes(), check)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"])
def test_every_number_in_either_byte_order(kind, order, dtype):
    values = RANDOM.integers(0, 100, (4, 5, 3)).astype(dtype)
    header = kind.header_class(endianness=order)
    header.set_data_dtype(np.dtype(dtype).newbyteorder(order))
    content = kind(values, LPS, header).to_bytes()
    for whole in (content, gzip.compress(content)):
        found = pages_of(whole, lambda pages: [values_of(pages, number) for number in range(3)])
        assert np.array_equal(np.stack(found, axis=2), values.swapaxes(0, 1))


@pytest.mark.parametrize("axes", ["LPS", "RAS", "LAS", "PIR", "SAL", "IPR", "ASL", "RSA"])
def test_slices_are_upright_for_every_order_of_axes(axes):
    # A body whose place x mm to the left, y mm to posterior and z mm to inferior has the value 100 z + 10 y + x.
    letters = {"R": (0, -1), "L": (0, 1), "A": (1, -1), "P": (1, 1), "S": (2, -1), "I": (2, 1)}
    body = np.fromfunction(lambda x, y, z: 100 * z + 10 * y + x, (4, 4, 4)).astype(np.int16)
    order = [letters[letter][0] for letter in axes]
    values = body.transpose(order)[tuple(slice(None, None, letters[letter][1]) for letter in axes)]
    affine = np.eye(4)
    affine[:3, :3] = 0
    for axis, letter in enumerate(axes):
        place, sign = letters[letter]
        affine[place, axis] = -sign  # the world is right, anterior, superior
    assert "".join(nibabel.aff2axcodes(affine)) == axes
    step = {0: 1, 1: 10, 2: 100}
    right, down = (step[place] for place in sorted(order[:2]))  # the steps from left to right, and downward
    found = pages_of(nifti(values, affine), lambda pages: values_of(pages, 0).astype(int))
    assert np.array_equal(found - found[0, 0], np.fromfunction(lambda row, column: down * row + right * column, (4, 4)))


def test_volumes_are_channels_or_further_slices():
    values = RANDOM.integers(0, 65536, (4, 4, 3, 13), dtype=np.uint16)
    content = gzip.compress(nifti(values))
    assert pages_of(content, lambda pages: pages.count) == 39
    assert pages_of(content, lambda pages: pages.count, channels=13) == 3
    found = Decoding(channels=13, size=4, **WINDOW)(content)
    assert found.dtype == np.uint16
    assert np.array_equal(found, values[:, :, 0].transpose(2, 1, 0))
    assert pages_of(nifti(values[:, :, :, None]), lambda pages: pages.count, channels=13) == 3  # a vector, in axis 5
    assert pages_of(nifti(values[:, :, 0, 0]), lambda pages: pages.count) == 1  # an image


@pytest.mark.parametrize("names", ["RGB", "RGBA"])
def test_colors(names):
    values = RANDOM.integers(0, 256, (4, 4, 3, len(names)), dtype=np.uint8)
    packed = values.view([(name, "u1") for name in names])[..., 0]
    found = Decoding(channels=len(names), size=4)(nifti(packed))
    assert np.array_equal(found, values[:, :, 0].transpose(2, 1, 0))
    if names == "RGBA":
        clear = nifti((packed.view("u4") & 0xFFFFFF).view(packed.dtype))  # opacity is the last byte
        assert Decoding(channels=3, size=4, background=0)(clear).max() == 0


def test_slope_and_intercept():
    stored = np.array([[[0], [1]], [[2], [4000]]], np.int16)
    for slope, intercept, expected in [(1, -1024, stored - 1024.0), (0.5, 3, stored / 2 + 3), (0, 7, stored)]:
        content = nifti(stored, scl_slope=slope, scl_inter=intercept)
        assert np.array_equal(pages_of(content, lambda pages: values_of(pages, 0)), expected[:, :, 0].T)
    content = nifti(stored, scl_slope=np.nan)
    assert np.array_equal(pages_of(content, lambda pages: values_of(pages, 0)), stored[:, :, 0].T)
    # -1024 to 2976 HU in a window of -1024 to 3071: 65535 * 4000 / 4095 = 64014.7
    content = nifti(stored, scl_slope=1, scl_inter=-1024)
    found = Decoding(channels=1, size=2, window=[-1024, 3071])(content)
    assert (found.dtype, found[0, 1, 1]) == (np.uint16, 64015)


def test_the_user_or_the_file_gives_the_range():
    stored = np.arange(16, dtype=np.int16).reshape(4, 4, 1) - 4
    with pytest.raises(InputError, match=r"int16, from -4 to 11, without a known range; set dataset.window="):
        Decoding(channels=1, size=4)(nifti(stored))
    found = Decoding(channels=1, size=4, dtype="float32")(nifti(stored, cal_min=0, cal_max=10))
    np.testing.assert_allclose(found[0], (stored[:, :, 0].T / 10).clip(0, 1), rtol=1e-6)
    assert range_warnings([nifti(stored, cal_min=0, cal_max=5)], Decoding(channels=1, size=4)) == ()
    assert range_warnings([nifti(stored)], Decoding(channels=1, size=4, window=[0, 5])) == ()


def test_percentiles_are_those_of_the_volume():
    stored = np.zeros((8, 8, 5), np.float32)
    stored[..., 4] = np.arange(64).reshape(8, 8)  # 256 zeros and one of each to 63
    decoding = Decoding(channels=1, size=8, percentiles=[0, 90])
    content = gzip.compress(nifti(stored))
    low, high = np.percentile(stored, [0, 90])
    assert (low, high) == (0, pytest.approx(31.1))  # place 0.9 * 319 = 287.1; the value k is at place 256 + k
    assert decoding(content).max() == 0
    raster = pages_of(content, lambda pages: pages.page(4).file_percentiles((0, 90)))
    assert raster == (low, pytest.approx(high))


def test_pages_in_any_order(tmp_path):
    values = RANDOM.integers(0, 65536, (16, 16, 300), dtype=np.uint16)
    for name, content in (("a.nii", nifti(values)), ("b.nii.gz", gzip.compress(nifti(values)))):
        (tmp_path / name).write_bytes(content)
        numbers = (299, 0, 150, 151, 300)
        *found, beyond = Decoding(channels=1, size=16).each(Page(tmp_path / name, number) for number in numbers)
        assert all(np.array_equal(one[0], values[..., n].T) for one, n in zip(found, numbers, strict=False))
        assert isinstance(beyond, IndexError)
    assert list_files(tmp_path, formats.SUFFIXES).paths == ["a.nii", "b.nii.gz"]


def changed(content: bytes, *, place: int, kind: str, value: object) -> bytes:
    copy = bytearray(content)
    struct.pack_into(kind, copy, place, value)
    return bytes(copy)


PLAIN = nifti(RANDOM.integers(0, 99, (8, 8, 4), dtype=np.int16))
DIM, BITS, OFFSET = 40, 70, 108  # places in the header of NIfTI-1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PLAIN[:-1], "it has been cut"),
        (gzip.compress(PLAIN[:-1]), "it has been cut"),
        (gzip.compress(PLAIN)[:-40], "it has been cut"),
        (PLAIN[:300], ""),
        (gzip.compress(b"x" * 999), "it is no NIfTI file that holds its values"),
        (changed(PLAIN, place=344, kind="3s", value=b"ni1"), "convert .hdr and .img to .nii"),
        (changed(PLAIN, place=DIM + 6, kind="<h", value=32767), "it has been cut"),
        (gzip.compress(changed(PLAIN, place=DIM + 6, kind="<h", value=32767)), "its header declares"),
        (changed(PLAIN, place=DIM + 2, kind="<h", value=-1), "its shape is"),
        (changed(PLAIN, place=DIM, kind="<h", value=9), ""),
        (changed(PLAIN, place=70, kind="<h", value=32), ""),  # complex
        (changed(PLAIN, place=70, kind="<h", value=9999), ""),
        (changed(PLAIN, place=OFFSET, kind="<f", value=1e30), ""),
        (changed(PLAIN, place=OFFSET, kind="<f", value=np.nan), ""),
        (changed(PLAIN, place=OFFSET, kind="<f", value=-5000), ""),
        (changed(PLAIN, place=116, kind="<f", value=np.inf), ""),  # intercept
        (nifti(np.zeros((1, 1, 2**15 - 1, 40), np.uint8)), "it has 1,310,680 images, and 1,048,576 are the maximum"),
    ],
    ids=range(17),
)
def test_malicious_files_have_a_reason(content, reason):
    with pytest.raises(ANY) as raised:
        Decoding(channels=1, size=8, **WINDOW)(content)
    assert reason in unreadable_reason(raised.value)


def test_a_bomb_costs_little():
    header = bytearray(nibabel.Nifti2Header().binaryblock)
    struct.pack_into("<8q", header, 16, 3, 2000, 2000, 250, 1, 1, 1, 1)  # 4 GB of float32
    content = gzip.compress(bytes(header) + bytes(2**22))
    with pytest.raises(ValueError, match=r"it has .* bytes, and its header declares 4,000,000,"):
        Decoding(channels=1, size=8, **WINDOW)(content)
    with pytest.raises(ValueError, match="more than dataset.max_pixels"):
        Decoding(channels=1, size=8, max_pixels=100, **WINDOW)(nifti(np.zeros((11, 11, 2), np.int16)))


def test_affine_transformations_that_are_no_numbers_are_ignored():
    values = RANDOM.integers(0, 255, (4, 4, 2), dtype=np.uint8)
    for place in (280, 284):  # of the first row
        content = changed(nifti(values), place=place, kind="<f", value=np.nan)
        assert Decoding(channels=1, size=4)(content).shape == (1, 4, 4)


def test_extensions_of_the_header_are_not_read():
    image = nibabel.Nifti1Image(np.full((4, 4, 1), 7, np.uint8), LPS)
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"x" * 999))
    assert (Decoding(channels=1, size=4)(image.to_bytes()) == 7).all()
