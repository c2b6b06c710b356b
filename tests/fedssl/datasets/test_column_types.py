"""Kinds of columns by their types: text, bytes, lists of bytes, and arrays."""

import numpy as np
import pyarrow as pa
import pytest

from fedssl.datasets.column_types import array_dtype, is_byte_list, is_bytes, is_text, value_type

WORDS = pa.dictionary(pa.int8(), pa.large_string())


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (pa.string(), is_text),
        (pa.large_string(), is_text),
        (pa.string_view(), is_text),
        (pa.binary(), is_bytes),
        (pa.binary(4), is_bytes),
        (pa.binary_view(), is_bytes),
        (pa.list_(pa.uint8()), is_byte_list),
        (pa.large_list(pa.int8()), is_byte_list),
        (pa.list_(pa.int32()), None),
        (pa.int64(), None),
        (WORDS, None),
    ],
)
def test_a_type_has_one_kind(kind, test):
    assert [one for one in (is_text, is_bytes, is_byte_list) if one(kind)] == ([test] if test else [])


def test_arrays_are_lists_of_two_or_three_axes():
    def nested(depth, kind):
        return kind if not depth else pa.list_(nested(depth - 1, kind))

    assert [array_dtype(nested(depth, pa.float32())) for depth in range(5)] == [
        None,
        None,
        np.float32,
        np.float32,
        None,
    ]
    assert array_dtype(pa.list_(pa.list_(pa.uint16(), 8), 8)) == np.uint16
    assert array_dtype(nested(2, pa.string())) is None


def test_values_of_dictionaries_have_their_own_type():
    assert value_type(WORDS) == pa.large_string()
    assert value_type(pa.bool8()) == pa.int8()
    assert value_type(pa.int16()) == pa.int16()
