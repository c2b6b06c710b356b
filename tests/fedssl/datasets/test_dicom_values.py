"""Values of DICOM frames, computed by hand."""

import numpy as np
from pydicom.dataset import Dataset

from fedssl.datasets.dicom_values import is_beside_image, limits_of, transforms
from fedssl.datasets.pixels import BIT_RANGE, FILE_WINDOW


def header(**values: object) -> Dataset:
    dataset = Dataset()
    for name, value in ({"BitsStored": 12, "PixelRepresentation": 0} | values).items():
        setattr(dataset, name, value)
    return dataset


def test_limits_are_those_of_the_window_or_of_the_bits():
    linear = header(WindowCenter=100, WindowWidth=51)  # 100 - 0.5 - 50 / 2, and 50 above
    assert limits_of(linear) == (74.5, 124.5, FILE_WINDOW)
    assert limits_of(header(RescaleSlope=2, RescaleIntercept=-1000)) == (-1000, 2 * 4095 - 1000, BIT_RANGE)
    assert limits_of(header(PixelRepresentation=1)) == (-2048, 2047, BIT_RANGE)
    assert [transforms(each) for each in (linear, header(RescaleSlope=2), header())] == [True, True, False]


def test_padding_is_a_value_or_a_range():
    stored = np.array([[-3, -2, 0, 7]], dtype=np.int16)
    one, several = header(PixelPaddingValue=-3), header(PixelPaddingValue=-3, PixelPaddingRangeLimit=0)
    assert is_beside_image(stored, one).tolist() == [[True, False, False, False]]
    assert is_beside_image(stored, several).tolist() == [[True, True, True, False]]
    assert is_beside_image(stored, header()) is None
