"""Columns of parquet and arrow files, read by pyarrow alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedssl.datasets.images import FileRecords
from fedssl.errors import InputError
from fedssl.safe_io import sanitize

CHUNK = 256  # rows read at a time, and images per task of a decoding thread


def num_rows(file: Path) -> int:
    """Return the number of rows of a file."""
    table = _open(file)
    return int(table.num_rows if isinstance(table, pa.Table) else table.metadata.num_rows)


def schema_of(file: Path, column: str | None = None) -> pa.Schema:
    """Return the columns of a file with their types; `InputError` if several have the name ``column``."""
    opened = _open(file, column)
    return opened.schema if isinstance(opened, pa.Table) else opened.schema_arrow


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is one of strings."""
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is one of byte strings."""
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


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
    return FileRecords(files, file_numbers[rows], offsets[rows], lengths[rows])


def _places(file: Path, column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return offset and length of every image in an arrow file; None if they are compressed, or not there."""
    if file.suffix.lower() == ".parquet":
        return None
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


def _open(file: Path, column: str | None = None) -> pq.ParquetFile | pa.Table:
    """Open a parquet file, or the table of an arrow file, memory-mapped; it must have only one such column."""
    with _reading(file):
        if file.suffix.lower() == ".parquet":
            opened = pq.ParquetFile(file, memory_map=True, pre_buffer=False)  # otherwise the whole file is read
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
        reason = sanitize(" ".join(str(error).split())[:300])
        raise InputError(f"{file} cannot be read ({reason}); give parquet or arrow files in dataset.path") from error
