"""Arrays of apps: dtypes and shapes that are accepted, and prefixes of names."""

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.errors import InputError
from strategies.flower.arrays import conform, in_parts, read_layers, write_layers
from tests.strategies.flower.apps import record


@pytest.mark.parametrize(
    ("array", "like"),
    [
        (np.array([7]), np.array(6)),  # a counter, as some clients of lists send it
        (np.array(7.0), np.array(6)),  # a counter that was averaged
        (np.array([1.5, 2.0]), np.ones(2, np.float16)),
        (np.array([1, 2]), np.ones(2, np.float32)),
        (np.array([0, 1]), np.ones(2, bool)),
    ],
)
def test_numbers_of_another_dtype_are_converted(array, like):
    converted = conform({"x": array}, GlobalLayers({"x": like}))["x"]
    assert (converted.dtype, converted.shape) == (like.dtype, like.shape)
    assert (converted == array.reshape(like.shape)).all()


@pytest.mark.parametrize("array", [np.array([0.5, 2.0]), np.array([np.nan, 1.0]), np.array([2**40 + 1, 0])])
def test_numbers_that_would_change_are_refused(array):
    like = np.ones(2, np.float32 if array.dtype.kind == "i" else np.int64)
    with pytest.raises(InputError, match="layer x has dtype"):
        conform({"x": array}, GlobalLayers({"x": like}))


def test_a_prefix_ends_at_a_dot_or_a_slash():
    names = ["layer1.conv.weight", "layer10.conv.weight", "layer1", "params/layer1/kernel", "1"]
    assert [in_parts(name, ["layer1", "params"]) for name in names] == [True, False, True, True, False]
    assert [in_parts(name, ["layer1."]) for name in names] == [True, False, True, False, False]


def test_a_record_is_a_copy_with_equal_bits():
    layers = {"w": np.arange(6, dtype=np.float16).reshape(2, 3).T, "n": np.array(3), "e": np.zeros((0, 2))}
    written = write_layers(layers)
    again = read_layers(written)
    assert all(
        np.array_equal(again[name], array) and again[name].dtype == array.dtype for name, array in layers.items()
    )
    written["w"].numpy()[:] = -1
    assert np.array_equal(layers["w"].T.reshape(-1), np.arange(6))
    assert list(read_layers(record(layers), ["n"])) == ["w", "n.@.running_mean", "e"]
