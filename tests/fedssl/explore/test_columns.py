"""Columns of labels, texts and numbers, of which some are missing."""

from base64 import b64decode

import numpy as np

from fedssl.explore.columns import MISSING, Column, coded, column_of


def texts(column: Column) -> list[str]:
    return [column.values[code] for code in column.codes]


def test_labels_have_their_names_or_numbers():
    column = coded("label", np.array([2, -1, 0, 2, 5]), ["cat", "cow", "dog"])
    assert texts(column) == ["dog", MISSING, "cat", "dog", "5"]
    assert column.values[column.missing] == MISSING
    assert coded("label", np.array([1, 0]), ["cat", "cow"]).missing is None


def test_texts_are_sorted_and_missing_ones_first():
    column = column_of("site", ["b", None, "a", "NaN", float("nan"), "b"])
    assert column.values == (MISSING, "a", "b")
    assert texts(column) == ["b", MISSING, "a", MISSING, MISSING, "b"]
    assert column.missing == 0


def test_few_numbers_are_sorted_as_numbers():
    assert column_of("age", [10, 9, 100, None]).values == (MISSING, "9", "10", "100")


def test_many_numbers_are_ranges_of_equal_size():
    column = column_of("age", [*range(60), None])
    # Quantiles of 0 to 59 at sixths: 0, 9.83, 19.67, 29.5, 39.33, 49.17, 59.
    assert column.values[:3] == (MISSING, "0 to 9.83333", "9.83333 to 19.6667")
    assert np.bincount(column.codes).tolist() == [1, 10, 10, 10, 10, 10, 10]
    assert texts(column)[59] == column.values[-1]


def test_the_ends_of_ranges_have_digits_that_differ():
    # Sixths of 60 days, and of 60 steps from 1 to 1 + 59e-9.
    assert column_of("day", range(20240101, 20240161)).values[:2] == ("20240101 to 20240111", "20240111 to 20240121")
    values = column_of("x", [1 + 1e-9 * number for number in range(60)]).values
    assert len({*values}) == 6
    assert values[0] == "1 to 1.00000001"


def test_mixed_and_infinite_values_are_texts():
    values = [*range(30), "x"]
    assert len(column_of("id", values).values) == 31
    assert len(column_of("id", [f"1_{number}" for number in range(30)]).values) == 30
    assert "inf" in column_of("id", [*range(30), float("inf")]).values


def test_a_column_without_any_value_is_missing():
    column = column_of("site", [None, None])
    assert (column.values, column.codes.tolist(), column.missing) == ((MISSING,), [0, 0], 0)


def test_codes_are_little_endian_for_the_script():
    script = column_of("site", ["b", "a"]).for_script()
    assert b64decode(script["codes"]) == b"\1\0\0\0\0\0\0\0"
    assert script["values"] == ("a", "b")
