"""Column of encoded images in a parquet or arrow file: bytes, paths, or the structs of ``datasets`` with both.

A path is absolute or begins at the folder of the file. It may lead anywhere: the files of ``dataset.path`` are the
user's own. Only regular files are opened.
"""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from fedssl.datasets.decoding import Encoded
from fedssl.datasets.tables import children, column_of, has_nulls, is_bytes, is_text, schema_of
from fedssl.errors import InputError

_FIELDS = ("bytes", "path")  # of the structs of ``datasets``


def check_image_column(file: Path, column: str, *, others_have_it: bool = False) -> None:
    """Raise an `InputError` unless the file has such a column of encoded images or paths, like the files before it."""
    schema = schema_of(file, column)
    if column in schema.names and _is_image(schema.field(column).type):
        return
    others = [name for name in schema.names if _is_image(schema.field(name).type, text=False)]
    remedy = "set dataset.path to files of this data set only"
    remedy += "" if others_have_it else ", or dataset.image to its column"
    if others and not others_have_it:
        remedy = f"set dataset.image={others[0]}" + "".join(f", or dataset.image={name}" for name in others[1:])
    if column not in schema.names:
        raise InputError(f"{file} has no column {column!r} (it has {schema.names}); {remedy}")
    raise InputError(
        f"dataset.image={column} is of type {schema.field(column).type} in {file}, but encoded images (such as PNG), "
        f"their paths, or the structs of datasets with both are needed; {remedy}"
    )


def encoded_images(array: pa.Array, folder: Path) -> list[Encoded]:
    """Return the encoded images of a column in a file of ``folder``, or their files; no bytes for an empty row."""
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if not pa.types.is_struct(array.type):
        return [_source(value, folder) for value in _values(array)]
    names = [field.name for field in array.type]
    contents, paths = (_values(array.field(name)) if name in names else [None] * len(array) for name in _FIELDS)
    return [
        _source(path if content is None else content, folder) for content, path in zip(contents, paths, strict=True)
    ]


def image_files(file: Path, column: str) -> list[Path]:
    """Return the files that a column names in place of bytes; those of all rows if some lack bytes."""
    schema = schema_of(file, column)
    if column not in schema.names:
        return []
    kind, parts = _value_type(schema.field(column).type), []
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if "path" in names and ("bytes" not in names or has_nulls(file, column, "bytes")):
            parts = children(file, column, "path")
    elif is_text(kind):
        parts = [column_of(file, column)]
    paths = (_source(value, file.parent) for part in parts for value in part.to_pylist())
    return [path for path in paths if isinstance(path, Path)]


def _source(value: bytes | str | None, folder: Path) -> Encoded:
    return folder / value if isinstance(value, str) and value else bytes(value or b"")


def _values(array: pa.Array) -> list[bytes | str | None]:
    """Return bytes or paths; lists of bytes are joined."""
    if not _is_byte_list(array.type):
        values: list[bytes | str | None] = array.to_pylist()
        return values
    content = memoryview(array.values.buffers()[1] or b"")[array.values.offset :]
    bounds = array.offsets.to_pylist()
    return [bytes(content[first:last]) for first, last in pairwise(bounds)]


def _is_image(kind: pa.DataType, *, text: bool = True) -> bool:
    kind = _value_type(kind)
    if pa.types.is_struct(kind):
        return any(field.name in _FIELDS and _is_image(field.type) for field in kind)
    return is_bytes(kind) or _is_byte_list(kind) or (text and is_text(kind))


def _is_byte_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and kind.value_type in (pa.uint8(), pa.int8())


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
