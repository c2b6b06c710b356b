"""DICOM files: those of pydicom, which scanners made, and synthetic ones with known values."""

import io
import struct
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import write_dataset
from pydicom.sequence import Sequence
from pydicom.uid import RLELossless

from fedssl.datasets import dicom, formats
from fedssl.datasets.decoding import Decoding, Page, unreadable_reason
from fedssl.datasets.folder import read
from fedssl.datasets.listing import list_files
from fedssl.datasets.pages import open_pages
from fedssl.datasets.pixels import deep_raster
from fedssl.export.preprocess import Preprocess
from tests.fedssl.datasets.dicom_files import FILES, RAMP, item, levels, make, opened, stack, windows

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def test_color_of_16_bits_keeps_every_value():
    rgb = np.random.default_rng(0).integers(0, 65536, (2, 2, 3), dtype=np.uint16)
    content = make(rgb, bits=16)
    assert np.array_equal(Decoding(channels=3, size=2)(content), rgb.transpose(2, 0, 1))
    reduced = Decoding(channels=3, size=2, dtype="uint8")(content)
    assert np.array_equal(reduced, rgb.transpose(2, 0, 1) // 256)
    with Image.open(io.BytesIO(content)) as image:  # for others than this package, as before
        assert np.array_equal(np.asarray(image), rgb // 256)
        cropped = image.crop((0, 0, 1, 1))
    assert Decoding(channels=3, size=2)(make(rgb // 16, bits=12)).max() <= 65535
    assert deep_raster(cropped) is None


def test_frames_are_pages_in_any_order(tmp_path: Path):
    frames = np.random.default_rng(0).integers(0, 4096, (5, 4, 4), dtype=np.uint16)
    (tmp_path / "a.dcm").write_bytes(stack(frames))
    numbers = (4, 0, 1, 1, 3, 5)
    decoding = Decoding(channels=1, size=4, window=[0, 65535])
    *found, beyond = decoding.each(Page(tmp_path / "a.dcm", number) for number in numbers)
    assert all(np.array_equal(image[0], frames[number]) for image, number in zip(found, numbers, strict=False))
    assert isinstance(beyond, EOFError)


@pytest.mark.parametrize("name", ["SC_rgb_rle_2frame", "SC_rgb_rle_16bit_2frame", "SC_rgb_rle_32bit_2frame"])
def test_frames_of_real_files(name):
    expected = pydicom.dcmread(FILES[name]).pixel_array
    kind = {1: "uint8", 2: "uint16", 4: "float32"}[expected.itemsize]
    found = list(Decoding(channels=3, size=100).each(Page(FILES[name], number) for number in (0, 1, 0)))
    for image, number in zip(found, (0, 1, 0), strict=True):
        values = expected[number].transpose(2, 0, 1)
        assert image.dtype == kind
        np.testing.assert_allclose(image, values / (2**32 - 1) if kind == "float32" else values, rtol=1e-6)
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize("undefined", [False, True])
def test_every_frame_has_its_own_window(tmp_path: Path, undefined):
    frames = np.stack([np.full((4, 4), value) for value in (0, 1000, 2000)])
    groups = windows(0, 1000, 2000)
    groups.is_undefined_length = undefined
    shared = windows(5)[0]
    shared.PixelValueTransformationSequence = Sequence([item(RescaleSlope="1", RescaleIntercept="0")])
    content = stack(frames, PerFrameFunctionalGroupsSequence=groups, SharedFunctionalGroupsSequence=Sequence([shared]))
    (tmp_path / "a.dcm").write_bytes(content)
    found = Decoding(channels=1, size=4, dtype="float32").each(Page(tmp_path / "a.dcm", n) for n in (0, 2, 1, 0))
    assert all(np.allclose(image, 200.5 / 400) for image in found)  # center - (center - 200.5), by the width
    with open_pages(content, max_pixels=100, channels=1) as pages:
        assert pages.count == 3
        assert [pages.page(number).info["window"][0] for number in (1, 0, 2)] == [799.5, -200.5, 1799.5]


def test_frames_without_groups_have_the_common_window():
    shared, own = windows(5), windows(1000)
    content = stack(np.zeros((3, 4, 4)), SharedFunctionalGroupsSequence=shared, PerFrameFunctionalGroupsSequence=own)
    with open_pages(content, max_pixels=100, channels=1) as pages:
        assert [pages.page(number).info["window"][0] for number in range(3)] == [799.5, -195.5, -195.5]


def test_time_is_not_quadratic_in_the_number_of_frames(tmp_path: Path, monkeypatch):
    reads = []
    read = dicom.read_sequence_item
    monkeypatch.setattr(dicom, "read_sequence_item", lambda *arguments: reads.append(1) or read(*arguments))
    encoded = [struct.pack("<16I", 1, 64, *[0] * 14) + bytes([253, number]) for number in range(200)]  # 4 repeats
    content = make(
        np.zeros((2, 2)),
        bits=8,
        NumberOfFrames=200,
        TransferSyntaxUID=RLELossless,
        PixelData=encapsulate(encoded),
        PerFrameFunctionalGroupsSequence=windows(*range(200)),
    )
    (tmp_path / "a.dcm").write_bytes(content)
    pages = [Page(tmp_path / "a.dcm", number) for number in range(200)]
    found = list(Decoding(channels=1, size=2, dtype="float32").each(pages))
    np.testing.assert_allclose([image.mean() for image in found], 200.5 / 400, rtol=1e-6)
    assert len(reads) <= 2 * 200 + 2  # each frame's group and its window, and the first frame's again


@pytest.mark.parametrize(
    ("name", "corner"),
    [
        ("CT_small", 175 - 1024),  # stored value and intercept
        ("MR_small", 905),
        ("MR_small_RLE", 905),
        ("MR_small_jp2klossless", 905),
        ("MR_small_bigendian", 905),
    ],
)
def test_values_of_real_files(name, corner):
    image, values = opened(FILES[name])
    assert (image.mode, values[0, 0]) == ("F", corner)
    expected = pydicom.dcmread(FILES[name])
    slope, intercept = (
        float(expected.get(f"Rescale{name}", value)) for name, value in (("Slope", 1), ("Intercept", 0))
    )
    expected = expected.pixel_array.astype(float) * slope + intercept
    assert (values == expected).all()


def test_every_file_of_pydicom_is_read_or_has_a_reason():
    reasons, read = {}, set()
    for name, file in FILES.items():
        try:
            assert Decoding(channels=3, size=16)(file).shape == (3, 16, 16)
            read.add(name)
        except Exception as error:
            reasons[name] = unreadable_reason(error)
    assert len(read) >= 45
    assert {"examples_palette", "examples_ybr_color", "SC_rgb_rle_32bit", "693_J2KI", "rtdose"} <= read
    assert {"rtplan", "test-SR", "waveform_ecg"} <= {name for name, why in reasons.items() if why == "it has no pixels"}
    assert reasons["MR_small_jpeg_ls_lossless"].startswith("JPEG-LS Lossless Image Compression needs a decoder")


def test_a_folder_of_a_disc(tmp_path: Path):
    (tmp_path / "DICOMDIR").write_bytes(make())
    (tmp_path / "README").write_text("x" * 200)
    for name in ("IM0001", "1.2.840.113619.2.5", "slice.DCM", "a.ima"):
        (tmp_path / name).write_bytes(make())
    (tmp_path / "1.5").write_text("2.5")
    listing = list_files(tmp_path, formats.SUFFIXES)
    assert listing.paths == ["1.2.840.113619.2.5", "IM0001", "a.ima", "slice.DCM"]
    assert dict(listing.ignored) == {"": 2, ".5": 1}
    settings = {"channels": 1, "size": 2, "dtype": "uint8", "limit": None, "folders": "none", "test_fraction": 0.0}
    data = read("train", path=str(tmp_path), **settings)
    assert data.images[:].tolist() == [[[[0, 0], [62, 255]]]] * 4


def test_threads_leave_the_filter_of_warnings_alone():
    before, decode = list(warnings.filters), Decoding(channels=1, size=8)
    files = [FILES[name] for name in ("CT_small", "MR_small_RLE", "MR_small_padded")] * 20
    with ThreadPoolExecutor(8) as pool:
        pixels = list(pool.map(decode, files))
    assert all((one == decode(file)).all() for one, file in zip(pixels, files, strict=True))
    assert list(warnings.filters) == before


def test_nothing_else_of_the_file_is_read():
    with open_pages(make(), max_pixels=100, channels=1) as pages:
        image = pages.page(0)
        assert isinstance(image, dicom.DicomImageFile)
        assert "PatientName" not in image._dataset


def test_an_encoder_reads_them_as_in_training():
    preprocess = Preprocess(size=2, mean=(0.0,), std=(1.0,), window=[-1000, 1000])
    content = make(RAMP, RescaleIntercept="-1024", RescaleSlope="1")
    with Image.open(io.BytesIO(content)) as image:
        assert (preprocess(image)[0, 0] * 255).round().tolist() == levels(content, window=[-1000, 1000])


@pytest.mark.parametrize("is_implicit", [False, True])
def test_old_files_without_a_magic_number_are_read(tmp_path: Path, is_implicit):
    dataset = pydicom.dcmread(FILES["CT_small"])
    del dataset.file_meta
    buffer = DicomBytesIO()
    buffer.is_implicit_VR, buffer.is_little_endian = is_implicit, True
    write_dataset(buffer, dataset)
    (tmp_path / "a.dcm").write_bytes(buffer.getvalue())
    decode = Decoding(channels=1, size=32)
    assert np.array_equal(decode(tmp_path / "a.dcm"), decode(FILES["CT_small"]))
    with pytest.raises(Exception, match="no pixels|no image of|No tag"):
        decode(b"\x08\0\x05\0" + bytes(200))


def test_only_the_requested_frame_is_read(tmp_path: Path):
    frames = np.arange(1000 * 64 * 64, dtype=np.uint16).reshape(1000, 64, 64) % 4096
    (tmp_path / "a.dcm").write_bytes(stack(frames))
    tracemalloc.start()
    with open_pages(tmp_path / "a.dcm", max_pixels=64 * 64, channels=1) as pages:  # of 8 MB; 1 MB would be the maximum
        found = [np.asarray(pages.page(number))[0, 0] for number in (999, 0, 500)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [frames[number, 0, 0] for number in (999, 0, 500)]
    assert peak < 2**20
