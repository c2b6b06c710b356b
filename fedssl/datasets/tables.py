"""Columns of parquet and arrow files, read by pyarrow alone.

A column of images has bytes, paths, the structs of ``datasets`` with both, or its arrays: nested lists of numbers,
``(height, width)``, with channels in front or behind. A path is absolute or begins at the folder of the file. It may
lead anywhere: the files of ``dataset.path`` are the user's own. Only regular files are opened.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedssl.datasets.column_types import array_dtype, is_byte_list, is_bytes, is_text, value_type
from fedssl.datasets.decoding import Encoded
from fedssl.datasets.image_index import FileRecords, OpenFiles
from fedssl.datasets.manifest import SUFFIXES as MANIFEST_SUFFIXES
from fedssl.datasets.manifest import found_below, manifest_table, named_file, names_image
from fedssl.datasets.npy import npy_bytes
from fedssl.datasets.shards import ANY_IMAGE, PLACE, is_compressed, is_shard, shard_table
from fedssl.errors import InputError, reason_of, shortened
from fedssl.safe_io import LFS_POINTER, read_start

CHUNK = 256  # rows read at a time, and images per task of a decoding thread
_FIELDS = ("bytes", "path")  # of the structs of ``datasets``
_PATH_COLUMNS = ("path", "file", "file_name", "filename", "file_path", "filepath", "image", "img")  # names of files


def num_rows(file: Path) -> int:
    """Return the number of rows of a file."""
    table = _open(file)
    return int(table.num_rows if isinstance(table, pa.Table) else table.metadata.num_rows)


def schema_of(file: Path, column: str | None = None) -> pa.Schema:
    """Return the columns of a file with their types; `InputError` if several have the name ``column``."""
    opened = _open(file, column)
    return opened.schema if isinstance(opened, pa.Table) else opened.schema_arrow


def as_written(files: Iterable[Path], column: str) -> str:
    """Return the name of a column as the files write it: ``Label`` for ``label`` if no other differs only in case."""
    names = {name for file in files for name in schema_of(file).names}
    alike = {name for name in names if name.casefold() == column.casefold()}
    return str(*alike) if column not in names and len(alike) == 1 else column


def require_column(file: Path, column: str, remedy: str) -> pa.Schema:
    """Return the schema of a file; `InputError` if it has no such column."""
    schema = schema_of(file, column)
    if column not in schema.names:
        raise InputError(f"{file} has no column {column!r} (it has {schema.names}); {remedy}")
    return schema


def column_of(file: Path, column: str) -> pa.Array:
    """Return a whole column."""
    opened = _open(file, column)
    with _reading(file):
        table = opened if isinstance(opened, pa.Table) else opened.read(columns=[column])
        return table.column(column).combine_chunks()


def row_values(files: Sequence[Path], column: str, rows: np.ndarray) -> list[Any]:
    """Return the values of a column at ascending ``rows`` of all files one after another."""
    values: list[Any] = []
    bounds, column = np.cumsum([0, *map(num_rows, files)]), as_written(files, column)
    for file, start, end in zip(files, bounds, bounds[1:], strict=False):
        require_column(file, column, "name one of these")
        wanted = rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start
        values += column_of(file, column).take(pa.array(wanted)).to_pylist()
    return values


def named_files(file: Path, column: str) -> Sequence[Path | None] | None:
    """Return the files that a column names, None for empty rows; None for a column of another type.

    It is a column of text, or one of numbers in a file that people write: 7 is the name of 7.png.
    """
    schema = schema_of(file, column)
    if column not in schema.names:
        return None
    kind = value_type(schema.field(column).type)
    if not is_text(kind) and not (pa.types.is_integer(kind) and file.suffix.lower() in MANIFEST_SUFFIXES):
        return None
    values = ("" if value is None else str(value) for value in column_of(file, column).to_pylist())
    return found_below([named_file(value, file.parent) if value else None for value in values], file.parent)


def children(file: Path, column: str, field: str) -> list[pa.Array]:
    """Return a field of a column of structs, in pieces; nothing else of a parquet file is read."""
    opened = _open(file, column)
    with _reading(file):
        table = opened if isinstance(opened, pa.Table) else opened.read(columns=[f"{column}.{field}"])
        return [chunk.field(field) for chunk in table.column(column).chunks]


def has_nulls(file: Path, column: str, field: str) -> bool:
    """Return whether a field of a column of structs has nulls, by the statistics of a parquet file."""
    opened = _open(file, column)
    if isinstance(opened, pa.Table):
        return any(chunk.field(field).null_count for chunk in opened.column(column).chunks)
    found = [part.statistics for part in _stored_parts(opened) if part.path_in_schema == f"{column}.{field}"]
    return any(statistics is not None and statistics.null_count for statistics in found)


def column_chunks(file: Path, column: str) -> Iterator[pa.Array]:
    """Yield a column in order, at most `CHUNK` rows at a time."""
    table = _open(file, column)
    if isinstance(table, pa.Table):
        batches = iter(table.select([column]).to_batches(max_chunksize=CHUNK))
    else:
        batches = table.iter_batches(CHUNK, columns=[column])
    while True:
        with _reading(file):  # damaged data raises here
            batch = next(batches, None)
        if batch is None:
            return
        yield batch.column(0)


def column_bytes(file: Path, column: str) -> int:
    """Return the approximate size of a column in memory, in bytes."""
    opened = _open(file)
    if is_shard(file):
        return sum(place["length"] for place in column_of(file, column).drop_null().to_pylist())
    if isinstance(opened, pa.Table):
        return int(opened.select([column]).nbytes) if column in opened.schema.names else 0
    parts = _stored_parts(opened)
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)


def _stored_parts(file: pq.ParquetFile) -> Iterator[pq.ColumnChunkMetaData]:
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    return (group.column(number) for group in groups for number in range(group.num_columns))


def arrow_records(files: Sequence[Path], column: str, rows: np.ndarray) -> FileRecords | None:
    """Return the encoded images at ``rows`` of arrow files, where they are in these files.

    None if a file has them in compressed form, as all parquet files do, or in other files.
    """
    places = [_places(file, column) for file in files]
    if any(place is None for place in places):
        return None
    offsets, lengths = (np.concatenate(parts) for parts in zip(*filter(None, places), strict=True))
    counts = [len(place[0]) for place in places if place is not None]
    file_numbers = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return FileRecords(OpenFiles(files), file_numbers[rows], offsets[rows], lengths[rows])


def _places(file: Path, column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return offset and length of every image in a tar or arrow file; None if they are compressed, or not there."""
    if file.suffix.lower() in (".parquet", *MANIFEST_SUFFIXES) or is_compressed(file):
        return None
    if is_shard(file):
        check_image_column(file, column)
        places = column_of(file, column)  # nulls of samples without an image are empty records
        starts, sizes = (np.array(places.field(name).fill_null(0)) for name in ("offset", "length"))
        return starts, np.where(np.array(places.is_valid()), sizes, 0)
    with _reading(file):
        mapped = pa.memory_map(str(file)).read_buffer()
        table = _table(mapped)
    if column not in table.schema.names:  # of another data set, which is an error if its rows are needed
        return np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, np.int64)
    offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for chunk in table.column(column).chunks:
        names = [field.name for field in chunk.type] if pa.types.is_struct(chunk.type) else []
        array = chunk.field("bytes") if "bytes" in names else chunk
        if "path" in names and array.null_count:
            return None
        bounds, content = value_bounds(array), array.buffers()[-1]
        if bounds is None:
            return None
        start = content.address - mapped.address if content is not None and content.size else 0
        if not 0 <= start <= mapped.size:
            return None
        offsets.append(np.add(bounds[:-1], start, dtype=np.int64))
        lengths.append(np.diff(bounds).astype(np.int64))
    return np.concatenate(offsets), np.concatenate(lengths)


def value_bounds(array: pa.Array) -> np.ndarray | None:
    """Return where each value begins in the buffer, and the end, ``(n + 1,)``; None for other types than bytes."""
    wide = pa.types.is_large_binary(array.type)
    if not (wide or pa.types.is_binary(array.type)):
        return None
    bounds = np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)
    return bounds[array.offset : array.offset + len(array) + 1]


def image_column(file: Path) -> str:
    """Return the only column of images of a file; `InputError` if it has several or none.

    A column of file names is recognized by its name, or else by the ending of its first value.
    """
    schema = schema_of(file)
    if ANY_IMAGE in schema.names:
        return ANY_IMAGE
    found = [name for name in schema.names if _is_image(schema.field(name).type, text=False)]
    found = found or [name for name in schema.names if name.lower() in _PATH_COLUMNS]
    if len(found) != 1:
        texts = [name for name in found or schema.names if is_text(value_type(schema.field(name).type))]
        named = [name for name in texts if names_image(next(filter(None, column_of(file, name).to_pylist()), ""))]
        found = named or found
    if len(found) != 1:
        has = f"several columns of images ({shortened(found)})" if found else "no column of images"
        raise InputError(f"{file} has {has} in {schema.names}; set dataset.image=COLUMN")
    return str(found[0])


def check_image_column(file: Path, column: str, *, others_have_it: bool = False) -> None:
    """Raise an `InputError` unless the file has such a column of encoded images or paths, like the files before it."""
    schema = schema_of(file, column)
    if column in schema.names and _is_image(schema.field(column).type):
        return
    others = [name for name in schema.names if _is_image(schema.field(name).type, text=False)]
    remedy = "give files of this data set only"
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
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    dtype = array_dtype(array.type)
    if dtype is not None:
        return [_array_file(value, dtype) for value in array.to_pylist()]
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
    kind, parts = value_type(schema.field(column).type), []
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if "path" in names and ("bytes" not in names or has_nulls(file, column, "bytes")):
            parts = children(file, column, "path")
    elif is_text(kind):
        parts = [column_of(file, column)]
    paths = (_source(value, file.parent) for part in parts for value in part.to_pylist())
    return [path for path in paths if isinstance(path, Path)]


def _array_file(value: list[Any] | None, dtype: np.dtype) -> bytes:
    """Return nested lists as an NPY file; no bytes if they are no array, such as rows of different lengths."""
    try:
        return b"" if value is None else npy_bytes(np.array(value, dtype))
    except (TypeError, ValueError, OverflowError):
        return b""


def _source(value: bytes | str | None, folder: Path) -> Encoded:
    return named_file(value, folder) if isinstance(value, str) and value else bytes(value or b"")


def _values(array: pa.Array) -> list[bytes | str | None]:
    """Return bytes or paths; lists of bytes are joined."""
    if not is_byte_list(array.type):
        values: list[bytes | str | None] = array.to_pylist()
        return values
    content = memoryview(array.values.buffers()[1] or b"")[array.values.offset :]
    bounds = array.offsets.to_pylist()
    return [bytes(content[first:last]) for first, last in pairwise(bounds)]


def _is_image(kind: pa.DataType, *, text: bool = True) -> bool:
    kind = value_type(kind)
    if pa.types.is_struct(kind):
        return kind == PLACE or any(field.name in _FIELDS and _is_image(field.type) for field in kind)
    return is_bytes(kind) or is_byte_list(kind) or array_dtype(kind) is not None or (text and is_text(kind))


def _open(file: Path, column: str | None = None) -> pq.ParquetFile | pa.Table:
    """Open a parquet file, or the table of an arrow file, memory-mapped; it must have only one such column."""
    with _reading(file):
        suffix = file.suffix.lower()
        if suffix == ".parquet":
            opened = pq.ParquetFile(file, memory_map=True, pre_buffer=False)  # otherwise the whole file is read
        elif is_shard(file):
            opened = shard_table(file)
        elif suffix in MANIFEST_SUFFIXES:
            opened = manifest_table(file)
        else:
            opened = _table(pa.memory_map(str(file)).read_buffer())
    names = (opened.schema if isinstance(opened, pa.Table) else opened.schema_arrow).names
    if names.count(column) > 1:
        raise InputError(f"{file} has {names.count(column)} columns named {column!r}; give them different names")
    return opened


def _table(content: pa.Buffer) -> pa.Table:
    """Return the table of an arrow file, in either format of ``datasets``."""
    try:
        return pa.ipc.open_stream(content).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(content).read_all()


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn the errors of pyarrow and the file system into an `InputError`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = reason_of(error)
        with suppress(OSError):
            if read_start(file, len(LFS_POINTER)) == LFS_POINTER:
                reason = "it is a pointer of Git LFS: fetch the file with git lfs pull"
        raise InputError(f"{file} cannot be read ({reason}); check the path") from error
