"""Comparison of named arrays, whose order counts."""

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


def same(one: Arrays, other: Arrays) -> bool:
    """Return whether names, shapes, dtypes and values are equal."""
    return list(one) == list(other) and all(
        np.array_equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def same_bits(one: Arrays, other: Arrays) -> bool:
    """Return whether bits are equal, too: those of zeros of either sign, and of NaN."""

    def bits(arrays: Arrays) -> list[tuple[str, np.dtype, tuple[int, ...], bytes]]:
        return [(name, array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()]

    return bits(one) == bits(other)
