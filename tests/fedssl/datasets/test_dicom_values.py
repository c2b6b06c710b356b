"""Values of DICOM frames, computed by hand."""

from io import BytesIO

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.pixels.processing import apply_voi_lut
from pydicom.sequence import Sequence

from fedssl.datasets.decoding import Decoding
from fedssl.datasets.dicom_values import limits_of
from fedssl.datasets.pixels import BIT_RANGE
from tests.fedssl.datasets.dicom_files import RAMP, item, levels, make, opened, palette


def test_the_range_is_that_of_the_stored_bits():
    # 255.999 x / 4095: 0, 0.06, 62.5, 255.999
    assert levels(make()) == [[0, 0], [62, 255]]
    assert limits_of(dcmread(BytesIO(make()))) == (0, 4095, BIT_RANGE)
    # from -2048 to 2047: 255.999 (x + 2048) / 4095 = 0, 128.03, 190.5, 255.999
    assert levels(make(RAMP - [[2048, 1], [1000 - 1000 + 0, 2048]], bits=12, signed=True)) == [[0, 128], [190, 255]]
    # rescaled to x / 2 - 1024, from -1024 to 1023.5: the same levels
    assert levels(make(RescaleSlope="0.5", RescaleIntercept="-1024")) == [[0, 0], [62, 255]]
    # a slope or an intercept alone, or an empty one: the same levels
    for tags in ({"RescaleSlope": "2"}, {"RescaleIntercept": "-9"}, {"RescaleSlope": "", "RescaleIntercept": "-9"}):
        assert levels(make(**tags)) == [[0, 0], [62, 255]]
    # a negative slope reverses the order
    assert levels(make(RescaleSlope="-1", RescaleIntercept="0")) == [[255, 255], [193, 0]]


def test_monochrome1_is_inverted():
    assert levels(make(PhotometricInterpretation="MONOCHROME1")) == [[255, 255], [193, 0]]
    assert levels(make(RAMP // 16, bits=8, PhotometricInterpretation="MONOCHROME1")) == [[255, 255], [193, 0]]


def test_8_bits_are_unchanged():
    image, values = opened(make(RAMP // 16, bits=8))
    assert (image.mode, values.tolist()) == ("L", [[0, 0], [62, 255]])


WINDOW = item(WindowCenter="40", WindowWidth="400")


@pytest.mark.parametrize(
    ("tags", "window"),
    [
        # PS3.3 C.11.2.1.2.1: black up to c - 0.5 - (w - 1) / 2, white above c - 0.5 + (w - 1) / 2
        ({"WindowCenter": "40", "WindowWidth": "400"}, (-160.0, 239.0)),
        ({"WindowCenter": ["40", "600"], "WindowWidth": ["400", "2000"]}, (-160.0, 239.0)),
        # C.11.2.1.3.2: c - w / 2 and c + w / 2
        ({"WindowCenter": "40", "WindowWidth": "400", "VOILUTFunction": "LINEAR_EXACT"}, (-160.0, 240.0)),
        ({"SharedFunctionalGroupsSequence": Sequence([item(FrameVOILUTSequence=Sequence([WINDOW]))])}, (-160.0, 239.0)),
    ],
    ids=["linear", "first of several", "exact", "enhanced"],
)
def test_the_window_of_the_file(tags, window):
    values = np.array([[-1000, -160], [40, 1000]])
    content = make(values + 1024, RescaleIntercept="-1024", RescaleSlope="1", **tags)
    image, pixels = opened(content)
    assert image.info["window"] == window
    assert pixels.tolist() == values.tolist()
    middle = int(255.999 * (40 - window[0]) / (window[1] - window[0]))
    assert levels(content) == [[0, 0], [middle, 255]]
    assert levels(content, window=[-1000, 1000]) == [[0, 107], [133, 255]]  # 255.999 (x + 1000) / 2000


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_a_sigmoid_window_equals_that_of_pydicom(photometric):
    values = np.array([[0, 400], [1000, 4095]])  # black and white only far beyond the window from 200 to 1000
    tags = {"WindowCenter": "600", "WindowWidth": "800", "PhotometricInterpretation": photometric}
    content = make(values, VOILUTFunction="SIGMOID", **tags)
    expected = apply_voi_lut(values, dcmread(BytesIO(content))) / 4095  # PS3.3 C.11.2.1.3.1
    np.testing.assert_allclose(expected, 1 / (1 + np.exp(-4 * (values - 600) / 800)), rtol=1e-6)
    expected = 1 - expected if photometric == "MONOCHROME1" else expected
    found = Decoding(channels=1, size=2, dtype="float32")(content)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    set_by_user = levels(content, window=[0, 4095])  # then it is linear
    assert set_by_user == levels(make(values, PhotometricInterpretation=photometric), window=[0, 4095])


def test_the_window_of_fractions():
    # from 0.5 - 0.4 to 0.5 + 0.4; values 0, 0.0002, 0.2, 0.819: 255.999 (0.2 - 0.1) / 0.8 = 32.0, 230.0
    content = make(RescaleSlope="0.0002", RescaleIntercept="0", WindowCenter="0.5", WindowWidth="0.8")
    assert levels(content) == [[0, 0], [31, 230]]


def test_bits_above_the_stored_ones_are_ignored():
    assert levels(make(RAMP | 0x8000)) == levels(make())  # such as an overlay
    with pytest.raises(ValueError, match="its HighBit is 15, above BitsStored=12"):
        levels(make(RAMP << 4, HighBit=15))


def test_rescale_of_an_enhanced_image():
    groups = item(PixelValueTransformationSequence=Sequence([item(RescaleSlope="2", RescaleIntercept="-10")]))
    assert opened(make(PerFrameFunctionalGroupsSequence=Sequence([groups])))[1].tolist() == [[-10, -8], [1990, 8180]]


def test_tables_of_values():
    table = item(LUTDescriptor=[4096, 0, 16], LUTData=(65535 - 16 * np.arange(4096)).astype("<u2").tobytes())
    for name in ("ModalityLUTSequence", "VOILUTSequence"):
        assert levels(make(**{name: Sequence([table])})) == [[255, 255], [193, 0]]


def test_colors():
    rgb = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]]])
    pixels = Decoding(channels=3, size=2)(make(rgb, bits=8))
    assert pixels.transpose(1, 2, 0).tolist() == rgb.tolist()


def test_palettes():
    inverted = 255 - np.arange(256)
    wide, narrow = (inverted * 257).astype("<u2").tobytes(), inverted.astype("u1").tobytes()
    expected = [[255, 255], [193, 0]]
    assert levels(palette(table=wide)) == expected
    assert levels(palette(table=narrow, stated=8)) == expected
    assert levels(palette(table=narrow, stated=16)) == expected  # the table has 8 bits all the same
    assert levels(palette(RAMP, bits=12, table=narrow, stated=8)) == [[255, 254], [0, 0]]  # beyond: its last color
    segments = np.array([0, 1, 65535, 1, 255, 0], "<u2").tobytes()  # 65535, then 255 values down to 0
    assert levels(palette(table=segments, part="Segmented")) == expected


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("kind", [b"SS", b"US"])  # some files state the bits of a signed value as an unsigned one
def test_pixels_beside_the_image_are_black(photometric, kind):
    values = np.array([[-2000, -2000], [0, 4095]])
    tags = {"PhotometricInterpretation": photometric, "PixelPaddingValue": -2000}
    content = make(values, bits=16, signed=True, **tags).replace(b"\x28\0\x20\1SS", b"\x28\0\x20\1" + kind)
    pixels = Decoding(channels=1, size=2, percentiles=[0, 100])(content)[0]
    assert pixels[0].tolist() == [0, 0]
    assert sorted(pixels[1].tolist()) == [0, 65535]  # percentiles are those of the image alone
    assert opened(content)[1][1].tolist() == [0, 4095]
    ranged = make(values, bits=16, signed=True, **tags, PixelPaddingRangeLimit=0)
    assert np.isnan(opened(ranged)[1]).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("padding", [0, 255])
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_pixels_of_8_bits_beside_the_image_are_black(photometric, padding):
    values = np.array([[padding, padding], [9, 100]])
    content = make(values, bits=8, PhotometricInterpretation=photometric, PixelPaddingValue=padding)
    inside = [9, 100] if photometric == "MONOCHROME2" else [246, 155]
    assert levels(content) == [[0, 0], inside]
