"""Types of the columns of arrow and parquet files."""

import numpy as np
import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is one of strings."""
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is one of byte strings."""
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


def is_byte_list(kind: pa.DataType) -> bool:
    """Return whether a type is one of lists of bytes."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and kind.value_type in (pa.uint8(), pa.int8())


def array_dtype(kind: pa.DataType) -> np.dtype | None:
    """Return the dtype of arrays with two or three axes, as nested lists; None for another type."""
    depth, tests = 0, (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    while any(test(kind) for test in tests):
        kind, depth = kind.value_type, depth + 1
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return np.dtype(kind.to_pandas_dtype()) if depth in (2, 3) and is_number else None


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a dictionary, or that in which values of ``datasets``' types are stored."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return kind.value_type if pa.types.is_dictionary(kind) else kind
