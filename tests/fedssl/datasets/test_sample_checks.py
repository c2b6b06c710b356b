"""Warnings about data sets whose images have hardly any content."""

import logging
from pathlib import Path

import imagecodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedssl.datasets import base
from fedssl.datasets.base import load_federated
from fedssl.datasets.decoding import Decoding
from fedssl.datasets.sample_checks import range_warnings
from tests.fedssl.datasets.dicom_files import FILES, opened
from tests.fedssl.datasets.made import encoded, png, settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def ramp(maximum: int) -> bytes:
    return png(Image.fromarray(np.linspace(0, maximum, 64).reshape(8, 8).astype(np.uint16)))


def warnings_of(*sources: bytes, **changes: object) -> tuple[str, ...]:
    return range_warnings(sources, Decoding(channels=1, size=8, **changes))


@pytest.mark.parametrize(("maximum", "bits"), [(4095, 12), (3987, 12), (1023, 10), (16383, 14), (255, 8)])
def test_a_small_range_of_16_bits_names_the_setting(maximum, bits):
    (warning,) = warnings_of(ramp(99), ramp(maximum), b"damaged")
    assert f"a sample of 2 images with more than 8 bits are 0 to {maximum:,} of 0 to 65,535" in warning
    assert warning.endswith(f"set dataset.window=[0,{2**bits - 1}]")
    assert warnings_of(ramp(maximum), window=[0, 2**bits - 1]) == ()
    assert Decoding(channels=1, size=8, window=[0, 2**bits - 1])(ramp(maximum)).max() >= 248


def test_a_folder_of_16_bits_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for number in range(3):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number}.png").write_bytes(ramp(4095))
    pq.write_table(pa.table({"image": [ramp(4095)] * 3, "label": [0, 1, 1]}), tmp_path / "train.parquet")
    of_table = settings_of("cifar10", path=str(tmp_path), image="image", size=8)
    for data in (settings_of("folder", path=str(tmp_path / "files"), size=8), of_table):
        for again in (False, True):
            caplog.clear()
            base.forget_images()
            load_federated(data)
            assert [line for line in caplog.messages if "dataset.window=[0,4095]" in line] == caplog.messages, again


def test_white_glyphs_without_background_are_a_warning(tmp_path: Path, caplog):
    caplog.set_level(logging.WARNING)
    glyph = np.full((8, 8, 4), 255, np.uint8)
    glyph[:, :4, 3] = 0
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(Image.fromarray(glyph)))
    assert load_federated(settings_of("folder", path=str(tmp_path), size=8)).images[:].min() == 255
    assert "4 of a sample of 4 images have a single color each" in caplog.text
    assert "set dataset.background, 0 is black" in caplog.text
    black = load_federated(settings_of("folder", path=str(tmp_path), size=8, background=0)).images[:]
    assert sorted(black.unique().tolist()) == [0, 255]


def test_avif_of_more_than_8_bits_is_named():
    values = np.linspace(0, 1023, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint16)
    deep = imagecodecs.avif_encode(values, bitspersample=10)
    plain = imagecodecs.avif_encode((values >> 2).astype(np.uint8))
    (warning,) = range_warnings([deep, plain], Decoding(channels=3, size=8))
    assert warning.startswith("1 of a sample of 2 images are AVIF or HEIC with more than 8 bits, of which 8 are used")


def test_frames_and_values_without_a_window_are_a_warning():
    decoding = Decoding(channels=1, size=8)
    frames, contrast = range_warnings([FILES["SC_rgb_rle_2frame"], FILES["CT_small"], FILES["MR_small"]], decoding)
    assert frames.startswith("1 of a sample of 3 images have several pages or frames, and only the first is used")
    assert contrast.endswith(
        "1 images with more than 8 bits are -896 to 1,167 of -33,792 to 31,743, so that they have hardly any contrast; "
        "set dataset.window=[-896,1167]"
    )
    assert range_warnings([FILES["CT_small"]], Decoding(channels=1, size=8, window=[-160, 240])) == ()


def test_a_warning_ignores_values_that_are_not_finite():
    for value in (np.inf, np.nan):
        content = encoded(Image.fromarray(np.array([[0, value]], np.float32)), "TIFF")
        found = range_warnings([content], Decoding(channels=1, size=2, window=[0, 1]))
        assert len(found) == np.isnan(value)
        expected = "1 images have pixels without a value (NaN, no data), which become black"
        assert all(expected in warning for warning in found)


def test_one_window_for_several_modalities_is_a_warning():
    files = [FILES["693_J2KI"], FILES["CT_small"], FILES["MR_small"]]
    (_, warning) = range_warnings(files, Decoding(channels=1, size=8, window=[-160, 240]))
    assert warning.startswith("dataset.window=[-160,240] is used for several modalities, and makes these shares of")
    assert "CT 54%, MR 79%; set dataset.window=null for the window of each file, or dataset.path to" in warning
    inside = [values[np.isfinite(values)] for values in (opened(str(file))[1] for file in files)]
    first, second, third = (np.mean((values < -160) | (values > 240)) for values in inside)
    assert ((first + second) / 2, third) == pytest.approx((0.54, 0.79), abs=0.005)
    assert range_warnings(files[1:], Decoding(channels=1, size=8, percentiles=[0.5, 99.5])) == ()
