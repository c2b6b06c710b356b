"""Checks of encoded DICOM data: real frames pass them, and sizes are those of the encoder."""

import io
import struct
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.encaps import get_frame

from fedssl.datasets.dicom_checks import check_run_lengths, check_segments, codestream_sizes

FILES = Path(pydicom.__file__).parent / "data" / "test_files"


@pytest.mark.parametrize(
    ("form", "settings"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG2000", {}), ("JPEG2000", {"no_jp2": True})],
)
def test_sizes_are_those_of_the_encoder(form, settings):
    for height, width in ((1, 300), (40, 7)):
        stream = io.BytesIO()
        Image.fromarray(np.zeros((height, width), np.uint8)).save(stream, form, **settings)
        assert codestream_sizes(stream.getvalue()) == {(height, width)}
        assert codestream_sizes(stream.getvalue()[:12]) == set()
    assert codestream_sizes(b"") == set()


@pytest.mark.parametrize("name", ["MR_small_RLE", "SC_rgb_rle", "SC_rgb_rle_16bit", "SC_rgb_rle_32bit", "rtdose_rle"])
def test_run_lengths_of_real_files_pass(name):
    dataset = pydicom.dcmread(FILES / f"{name}.dcm")
    frame = get_frame(dataset.PixelData, 0, number_of_frames=int(dataset.get("NumberOfFrames", 1)))
    check_run_lengths(frame, dataset.Rows * dataset.Columns, dataset.SamplesPerPixel)


def test_run_lengths_that_expand_beyond_the_pixels_are_refused():
    runs = struct.pack("<16I", 1, 64, *[0] * 14)
    check_run_lengths(runs + b"\x81\0" * 2**10, 2**17, 1)  # 2**10 runs of 128 values, as long as the pixels
    with pytest.raises(ValueError, match="expand to more than its pixels"):
        check_run_lengths(runs + b"\x81\0" * 2**20, 2**20, 1)  # 2**27 values
    with pytest.raises(ValueError, match="bytes of run lengths, more than 4,104"):
        check_run_lengths(bytes(2**13), 1, 1)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([0, 2, 5, 6, 1, 3, 9], None),  # two values, then three on a line to 9
        ([0, 2, 5, 6, 2, 1, 0, 0], "indirect or too long"),
        ([1, 65535, 9, 1, 2, 7], "indirect or too long"),
    ],
)
def test_segments_of_a_palette(values, error):
    table = np.array(values, "<u2").tobytes()
    if error is None:
        check_segments(table, wide=True)
    else:
        with pytest.raises(ValueError, match=error):
            check_segments(table, wide=True)
