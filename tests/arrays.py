"""Comparison of named arrays, whose order counts, and their bytes as Flower sends them."""

import io
from collections.abc import Mapping
from typing import Any

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


def npy(array: np.ndarray, **changed: Any) -> bytes:
    """The bytes of an array, with parts of its header changed."""
    file = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, header | changed)
    return file.getvalue() + array.tobytes()


def archive(array: np.ndarray) -> bytes:
    """An archive of arrays, which `numpy.load` takes for one."""
    file = io.BytesIO()
    np.savez(file, a=array)
    return file.getvalue()
