"""Values of more than 8 bits, scaled to [0, 1] and stored in three dtypes."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.datasets.raster import MAXIMA, PixelSettings, Raster, convert, percentiles_of, raster_to_array, unit_values
from fedssl.errors import InputError


def raster(values: np.ndarray, **own: object) -> Raster:
    height, width = values.shape[:2]
    return Raster(shape=(height, width, 1 if values.ndim == 2 else values.shape[2]), load=lambda: values, **own)


def made(values: list | np.ndarray, dtype: str, *, settings: dict | None = None, **own: object) -> np.ndarray:
    array = np.array(values, dtype)
    form = {"channels": 1, "size": len(array), **(settings or {})}
    return raster_to_array(raster(array, **own), PixelSettings(**form))


def scaled(values: np.ndarray, low: float, high: float, size: int) -> np.ndarray:
    """Transcribe in float64: min(max((v - low) / (high - low), 0), 1), NaN is 0; then the mean of squares of pixels."""
    unit = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1)
    unit[np.isnan(unit)] = 0
    side = len(values) // size
    return unit.reshape(size, side, size, side).mean(axis=(1, 3))


def test_integers_of_16_bits_keep_every_value():
    values = np.arange(65536).reshape(256, 256)
    assert np.array_equal(made(values, "uint16")[0], values)
    # 12 bits: 65535 v / 4095, rounded; distinct values stay distinct.
    twelve = np.arange(4096).reshape(64, 64)
    found = made(twelve, "uint16", settings={"window": [0, 4095]})[0]
    np.testing.assert_allclose(found, twelve * 65535 / 4095, atol=0.51)
    assert len(np.unique(found)) == 4096


@pytest.mark.parametrize("kind", ["int32", "uint32", "float32", "float64"])
def test_other_numbers_are_floats_of_the_window(kind):
    values = np.random.default_rng(0).integers(0, 3000, (8, 8)).astype(kind)
    found = made(values, kind, settings={"window": [100, 2000]})
    assert (found.dtype, found.shape) == (np.float32, (1, 8, 8))
    np.testing.assert_allclose(found[0], scaled(values, 100, 2000, 8), atol=1e-6)


def test_signed_integers_keep_every_value_of_16_bits():
    values = np.arange(-1024, 3072).reshape(64, 64)
    found = made(values, "int16", settings={"window": [-1024, 3071]})
    assert found.dtype == np.uint16
    np.testing.assert_allclose(found[0] / 65535, scaled(values, -1024, 3071, 64), atol=0.51 / 65535)


def test_large_integers_are_not_rounded_before_scaling():
    base = 2**31  # float32 has 24 bits
    assert made(
        [[base, base + 10], [base + 5, base + 1]], "uint32", settings={"window": [base, base + 10]}
    ).tolist() == [[[0, 1], [0.5, np.float32(0.1)]]]


def test_values_that_are_not_finite_are_black_or_white():
    found = made([[np.nan, np.inf], [-np.inf, 5]], "float32", settings={"window": [0, 10]})
    assert found.tolist() == [[[0, 1], [0, 0.5]]]


def test_percentiles_are_those_of_the_file():
    values = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    low, high = np.percentile(values.astype(np.float64), [10, 90])
    found = made(values, "float32", settings={"percentiles": [10, 90]})
    np.testing.assert_allclose(found[0], scaled(values, low, high, 16), atol=1e-5)
    of_file = made(values, "float32", settings={"percentiles": [10, 90]}, file_percentiles=lambda _: (-4, 4))
    np.testing.assert_allclose(of_file[0], scaled(values, -4, 4, 16), atol=1e-6)
    assert made(np.full((2, 2), 7.0), "float32", settings={"percentiles": [1, 99]}).tolist() == [[[0, 0], [0, 0]]]
    assert percentiles_of(np.array([np.nan, np.inf, 1, 3]), (0, 100)) == (1, 3)
    assert percentiles_of(np.array([np.nan]), (0, 100)) == (0, 1)


def test_a_smaller_image_averages_scaled_values():
    values = np.random.default_rng(0).integers(0, 65536, (32, 32))
    found = made(values, "uint16", settings={"size": 1, "dtype": "float32"})  # a triangle over all, not a square
    rows = np.minimum(np.arange(32) + 0.5, 31.5 - np.arange(32)) + 16
    weights = rows / rows.sum()
    np.testing.assert_allclose(found[0, 0, 0], weights @ (values / 65535) @ weights, rtol=1e-5)


def test_channels_of_any_number():
    values = np.random.default_rng(0).integers(0, 65536, (4, 4, 13))
    found = made(values, "uint16", settings={"channels": 13})
    assert np.array_equal(found, values.transpose(2, 0, 1))
    with pytest.raises(InputError, match="it has 13 channels but dataset.channels=3; set dataset.channels=13"):
        made(values, "uint16", settings={"channels": 3})
    gray = made(values[..., 0], "uint16", settings={"channels": 3})
    assert np.array_equal(gray, np.stack([values[..., 0]] * 3))
    # ITU-R 601: 0.299 red + 0.587 green + 0.114 blue
    luma = made(values[..., :3], "uint16", settings={"dtype": "float32"})
    np.testing.assert_allclose(luma[0], values[..., :3] @ [0.299, 0.587, 0.114] / 65535, atol=1e-6)


def test_opacity_mixes_with_the_background():
    values = [[[65535, 0, 0, 0]], [[65535, 0, 0, 65535]]]
    pixels, background = np.array(values).repeat(2, axis=1), {"channels": 3, "background": 51}
    found = made(pixels, "uint16", settings=background, has_alpha=True)
    assert found[:, 0, 0].tolist() == [13107] * 3  # 65535 * 51 / 255
    assert found[:, 1, 0].tolist() == [65535, 0, 0]
    four = made(np.array(values).repeat(2, axis=1), "uint16", settings={"channels": 4}, has_alpha=True)
    assert four[:, 0, 0].tolist() == values[0][0]


def test_unknown_ranges_and_lower_values_are_refused():
    with pytest.raises(InputError, match=r"int16, from -5 to 7, without a known range; set dataset.window=\[LOWEST"):
        made([[-5, 7], [0, 1]], "int16")
    with pytest.raises(InputError, match="its lowest value is -5; set dataset.window"):
        made([[-5, 7], [0, 1]], "int16", limits=(0, 32767))
    assert made([[-5, 7], [0, 1]], "int16", limits=(0, 7), is_window=True).min() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"percentiles": [99, 1]}, r"dataset.percentiles=\[99, 1\] must be \[LOWEST,HIGHEST\]"),
        *(({"window": one}, r"dataset.window=\[.* two ascending values") for one in ([5], [5, 5], [9, 1], [0, 1, 2])),
        ({"percentiles": [-1, 50]}, "dataset.percentiles"),
        ({"percentiles": [1, 99], "window": [0, 1]}, "dataset.window and dataset.percentiles are both set"),
        ({"dtype": "int16"}, "dataset.dtype=int16 must be auto or uint8"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(InputError, match=message):
        PixelSettings(channels=1, size=2, **settings)


@pytest.mark.parametrize("first", MAXIMA)
@pytest.mark.parametrize("second", MAXIMA)
def test_a_wider_dtype_keeps_every_value(first, second):
    every = np.arange(MAXIMA[first] + 1).astype(first) if first != "float32" else np.linspace(0, 1, 999, dtype=first)
    there = convert(every, second)
    assert there.dtype == second
    is_wider = list(MAXIMA).index(second) >= list(MAXIMA).index(first)
    step = 1e-7 if is_wider else 1.001 / MAXIMA[second]
    np.testing.assert_allclose(there / MAXIMA[second], every / MAXIMA[first], atol=step)
    if is_wider:
        assert np.array_equal(convert(there, first), every)


def test_tensors_of_all_dtypes_are_divided_by_their_maximum():
    assert unit_values(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0, 1]
    assert unit_values(torch.tensor([0, 65535], dtype=torch.uint16)).tolist() == [0, 1]
    assert unit_values(torch.tensor([0.0, 0.25])).tolist() == [0, 0.25]


def test_8_bits_have_the_pixels_of_pillow():
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    found = made(values, "uint8", settings={"channels": 4, "size": 4})
    assert found.dtype == np.uint8
    expected = np.asarray(Image.fromarray(values[..., 0]).resize((4, 4), Image.Resampling.BILINEAR))
    assert np.abs(found[0].astype(int) - expected).max() <= 1
