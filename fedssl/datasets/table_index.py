"""Images in the rows of tables: parquet and arrow files, also of the Hub's cache, shards, and CSV files with paths.

All are tables of pyarrow. The bytes of an image go directly to the decoder, without a Python object per row. Images of
a column of text are files.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedssl.datasets.column_types import is_text
from fedssl.datasets.decoding import Encoded
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.image_index import (
    BATCH,
    FOLDER,
    ImageIndex,
    Place,
    Query,
    RecordSequence,
    SequenceIndex,
    grouped_by_folder,
)
from fedssl.datasets.labels import class_names, missing_labels, read_labels
from fedssl.datasets.listing import ending_of, is_file
from fedssl.datasets.page_index import with_pages
from fedssl.datasets.shards import KEY, is_shard, stored_images
from fedssl.datasets.sources import Source
from fedssl.datasets.split_files import labeled_test, split_files, split_in
from fedssl.datasets.splits import HELD_OUT, chosen_parts, split_of, split_of_word
from fedssl.datasets.tables import (
    arrow_records,
    as_written,
    check_image_column,
    column_bytes,
    column_chunks,
    column_of,
    encoded_images,
    image_column,
    image_files,
    named_files,
    num_rows,
    require_column,
    row_values,
    schema_of,
)
from fedssl.digests import identity
from fedssl.errors import InputError, shortened
from fedssl.safe_io import sanitize_line

_MAX_SPLITS = 12  # named in a line
_COLUMNS_OF_QUERY = ("image", "label", "owner", "group", "split_column")


def index_tables(source: Source, query: Query) -> ImageIndex | None:
    """Return the images of local files; None if none is of the split."""
    files = sorted(source.files)
    count = sum(map(num_rows, files))
    kinds = ", ".join(sorted({ending_of(file.name) for file in files}))
    source.log(f"{count:,} rows in {len(files):,} {kinds} file{'s'[: len(files) != 1]}")
    if not count:
        raise InputError(f"{source.path} has no row with an image; check {source.setting}")
    files = [file for file in files if num_rows(file)]
    columns: dict[str, Any] = {name: column for name in _COLUMNS_OF_QUERY if (column := vars(query)[name]) is not None}
    columns |= {name: as_written(files, column) for name, column in columns.items()}
    return labeled_test(replace(query, **columns), partial(_index_split, source, files))


def _index_split(source: Source, files: Sequence[Path], query: Query) -> ImageIndex | None:
    """Return the rows of a split by a column, or by the names of files; None if none is of the test."""
    column = query.split_column if query.split_folders is not False else None
    others = [file for file in files if column not in schema_of(file).names]
    if column is not None and not others:
        return _index_by_column(source, files, query, column)
    if column is not None and len(others) < len(files) and not all(map(split_in, source.files.values())):
        raise InputError(
            f"{source.path}: {shortened(others)} has no column {column} with the split, as others have; add it, or set "
            "dataset.split_column=null if the names of the files are the splits"
        )
    chosen, shared = split_files(source, query)
    return index_rows(chosen, query, data_set=files, shared=shared)


def _index_by_column(source: Source, files: Sequence[Path], query: Query, column: str) -> ImageIndex | None:
    """Return the rows whose split a column has; None if none is of the test."""
    splits = np.array([str(value).strip() for file in files for value in column_of(file, column).to_pylist()])
    names = np.unique(splits).tolist()
    counts = ", ".join(f"{name or 'empty'} ({(splits == name).sum():,})" for name in names[:_MAX_SPLITS])
    source.log(f"splits in the column {column}: {counts}{', ...' * (len(names) > _MAX_SPLITS)}")
    kinds = {name: split_of(name) or "other" for name in names}
    chosen, shared = chosen_parts(
        {name: name for name in names}, kinds, split=query.split, fraction=query.test_fraction
    )
    if not chosen and query.split != "test":
        raise InputError(
            f"{source.path}: the column {column} has no split {query.split!r}, only {shortened(names)}; name one of "
            "them in dataset.splits, or set dataset.split_column=null if it has no splits"
        )
    if not chosen:
        return None
    return index_rows(files, query, data_set=files, shared=shared, chosen=np.isin(splits, chosen))


def index_hub(hub: str, query: Query) -> ImageIndex | None:
    """Return the images of a data set of the Hub; None if it has none."""
    if query.test_fraction:
        raise InputError(
            f"dataset.test_fraction={query.test_fraction} is for local files, but dataset.path is null and data sets "
            "of the Hub have their own splits; give dataset.splits.test=NAME, or dataset.path"
        )
    return labeled_test(query, partial(_index_hub_split, hub))


def _index_hub_split(hub: str, query: Query) -> ImageIndex | None:
    files = _hub_files(hub, query.split)
    # All splits of the data set, without results of operations of ``datasets``.
    data_set = [file for file in sorted(files[0].parent.glob("*.arrow")) if not file.name.startswith("cache-")]
    return index_rows(files, query, data_set=data_set, shared=False)


def index_rows(
    files: Sequence[Path], query: Query, *, data_set: Sequence[Path], shared: bool, chosen: np.ndarray | None = None
) -> ImageIndex | None:
    """Return the images of the rows of some files of a data set, or the ``chosen``; None if they have no row."""
    files = [file for file in files if num_rows(file)]
    if not files:
        return None
    known = _columns(files, query, data_set=data_set, shared=shared)
    count = len(known["labels"])
    image = image_column(files[0]) if query.image is None else query.image
    known |= {"name": query.name, "count": count, "decoding": query.decoding, "num_in_files": count, "shared": shared}
    known["key"] = {"reader": "hub", "image": image}
    paths = [named_files(file, image) for file in files]
    if all(part is not None for part in paths):
        images = [path or Path() for part in paths for path in part or ()]
        return _existing(
            RowIndex(files=images, images=images, tables=files, rows=np.arange(count), **known), query, chosen
        )
    if query.group == FOLDER and "groups" not in known:
        raise InputError(
            f"dataset.group={FOLDER} but the images of {files[0]} are inside the file; name the column with their "
            "groups, or set dataset.group=null"
        )
    if query.pages in ("all", "channels"):
        raise InputError(
            f"dataset.pages={query.pages} but the images of {files[0]} are inside the file, of which only the first "
            "page is used; write them to files and name these in the column, or set dataset.pages=auto"
        )
    index: ImageIndex
    if all(map(is_shard, files)) and (records := arrow_records(files, image, np.arange(count))) is not None:
        index = RowIndex(files=files, images=records, tables=files, rows=np.arange(count), **known)
    else:
        named = [path for file in files for path in image_files(file, image)]
        index = TableIndex(
            files=[*files, *filter(is_file, named)], tables=files, column=image, rows=np.arange(count), **known
        )
    return index if chosen is None else index.at(np.flatnonzero(chosen))


def _columns(files: Sequence[Path], query: Query, *, data_set: Sequence[Path], shared: bool) -> dict[str, Any]:
    """Return labels, owners, groups and warnings of all rows, as fields of an index."""
    labels, classes = read_labels(files, query.label, data_set=data_set)
    known: dict[str, Any] = {"labels": labels, "classes": classes}
    if query.label is not None and not (shared and split_of_word(query.split) in HELD_OUT):
        known["warnings"] = missing_labels(labels, files, query.label, split=query.split)
    if query.owner is not None:
        known["owners"], known["owner_names"] = _numbered(files, query.owner, "owner")
    if query.group is not None and (query.group != FOLDER or FOLDER in schema_of(files[0]).names):
        known["groups"], known["group_names"] = _numbered(files, query.group, "group")
    return known


def _existing(index: "RowIndex", query: Query, chosen: np.ndarray | None) -> SequenceIndex:
    """Return the images in files that exist, each once, by its first row with a label; else an `InputError`."""
    images, table = index.files, index.tables[0]
    named = f"{table} names" if len(index.tables) == 1 else f"{shortened(index.tables)} name"
    labels = np.zeros(len(images)) if index.labels is None else index.labels
    if query.group == FOLDER and index.groups is None:
        index = replace(index, **grouped_by_folder(images, table.parent))
    missing = [row for row, image in enumerate(images) if not is_file(Path(image))]
    present = sorted({*range(len(images))} - {*missing})
    names = [os.path.normpath(image) for image in images]
    first = {names[row]: row for row in sorted(present, key=lambda row: (labels[row] != NO_LABEL, -row))}
    rows = np.array(sorted(first.values()), dtype=np.int64)
    warnings: tuple[str, ...] = ()
    if missing:
        listed = shortened(sanitize_line(str(images[row]).removeprefix(".")) or "an empty one" for row in missing)
        line = f"{len(missing):,} of the {len(images):,} image files that {named} do not exist, such as {listed}"
        if not query.skip_missing or not len(rows):
            remedy = "use the others with dataset.skip_missing=true" if len(rows) else "move the table to its images"
            raise InputError(f"{line}; correct the paths, which begin at {table.parent}, or {remedy}")
        warnings += (f"{line}: the others are used",)
    again = [row for row in present if first[names[row]] != row]
    if again:
        others = sum(labels[row] not in (NO_LABEL, labels[first[names[row]]]) for row in again)
        line = f"{named} {len(again):,} image files again, such as {images[again[0]]}"
        line += f", {others:,} of them with another label" if others else ""
        warnings += (f"{line}: the first row{' with a label' * (index.labels is not None)} is used",)
    rows = rows if chosen is None else rows[chosen[rows]]
    index = replace(index, warnings=index.warnings + warnings).at(rows)
    return with_pages(index, index.files, query.pages)


@dataclass(frozen=True, kw_only=True)
class RowIndex(SequenceIndex):
    """Images that rows of tables name or locate."""

    tables: Sequence[Path]
    rows: np.ndarray  # ascending, of all tables one after another

    def at(self, rows: np.ndarray) -> "RowIndex":
        return replace(super().at(rows), rows=self.rows[rows])

    def places(self, rows: np.ndarray) -> list[Place]:
        return (
            _places(self.tables, self.rows[rows]) if isinstance(self.images, RecordSequence) else super().places(rows)
        )

    def values(self, name: str) -> Sequence[Any]:
        return row_values(self.tables, name, self.rows)


@dataclass(frozen=True, kw_only=True)
class TableIndex(ImageIndex):
    """Images in rows of a column of parquet or arrow files."""

    tables: Sequence[Path]
    column: str
    rows: np.ndarray  # ascending, of all tables one after another

    def at(self, rows: np.ndarray) -> "TableIndex":
        chosen = self.rows[rows]
        # The rows depend on the labels, whose numbers depend on the names in all files of the data set.
        key = {**self.key, "rows": identity(chosen.tobytes())}
        return replace(super().at(rows), rows=chosen, key=key)

    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        return _encoded(self.tables, self.column, self.rows[start:])

    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        return chain.from_iterable(_encoded(self.tables, self.column, self.rows[readable]))

    def places(self, rows: np.ndarray) -> list[Place]:
        return _places(self.tables, self.rows[rows])

    def records(self) -> Sequence[Encoded] | None:
        return arrow_records(self.tables, self.column, self.rows)

    def values(self, name: str) -> Sequence[Any]:
        return row_values(self.tables, name, self.rows)

    def num_bytes(self) -> int:
        return sum(column_bytes(file, self.column) for file in self.tables) * self.count // self.num_in_files


def _places(tables: Sequence[Path], rows: np.ndarray) -> list[Place]:
    """Return the tables with the numbers of their ``rows``, or the keys of samples."""
    starts = _first_rows(tuple(tables), tuple(file.stat().st_mtime_ns for file in tables))
    numbers = np.searchsorted(starts, rows, side="right") - 1
    keys = row_values(tables, KEY, rows) if all(map(is_shard, tables)) else (rows - starts[numbers]).tolist()
    return [Place(tables[number], str(key)) for number, key in zip(numbers, keys, strict=True)]


@lru_cache(maxsize=16)
def _first_rows(tables: tuple[Path, ...], _modified: tuple[int, ...]) -> np.ndarray:
    return np.cumsum([0, *map(num_rows, tables)])[:-1]


def _hub_files(hub: str, split: str) -> list[Path]:
    """Return the arrow files of a split in the Hub's cache; download them if needed."""
    from flwr_datasets import FederatedDataset  # slow import, not needed for local files

    try:
        # Not shuffled, so that rows are in the order of the Hub's files and of a local copy.
        name, _, subset = hub.partition(":")
        chosen = {"subset": subset} if subset else {}
        dataset = FederatedDataset(dataset=name, partitioners={}, shuffle=False, **chosen).load_split(split)
    except Exception as error:  # network, Hub and cache raise different exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the split {split!r} of {hub} could not be fetched from the Hugging Face Hub ({reason}); "
            "pass local parquet or arrow files instead: dataset.path=FILE_OR_FOLDER"
        ) from error
    return [Path(file["filename"]) for file in dataset.cache_files]


def _numbered(files: Sequence[Path], column: str, what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of the owner or group of every row ``(n,)`` and their names, sorted."""
    setting = f"dataset.{what}={column}"
    remedy = f"set dataset.{what} to the column with the {what}s of the images, or dataset.{what}=null if there is none"
    values: list[Any] = []
    for file in files:
        kind = require_column(file, column, remedy).field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        found = column_of(file, column).to_pylist()
        found = [None if value == "" or (isinstance(value, float) and isnan(value)) else value for value in found]
        is_number = pa.types.is_integer(kind) or (pa.types.is_floating(kind) and not any(v and v % 1 for v in found))
        if not (is_number or is_text(kind)):
            raise InputError(f"{setting} is of type {kind}; a column of integers or strings is needed")
        values += [int(value) if isinstance(value, float) else value for value in found]
    if None in values:
        raise InputError(
            f"{setting} has no value in {values.count(None)} of {len(values)} rows, first row {values.index(None)} of "
            f"{files[0].parent}; give every image {'an' if what == 'owner' else 'a'} {what}, or dataset.{what}=null"
        )
    listed = {tuple(class_names(schema_of(file), column)) for file in files}
    names = dict(enumerate(listed.pop())) if len(listed) == 1 else {}
    if listed:  # each file has its own numbers
        lengths = [num_rows(file) for file in files]
        of_file = [dict(enumerate(class_names(schema_of(file), column))) for file in files]
        numbered = zip(np.repeat(np.arange(len(files)), lengths).tolist(), values, strict=True)
        values = [str(of_file[file].get(value, value)) for file, value in numbered]
    codes, numbers = np.unique(values, return_inverse=True)
    return numbers, tuple(str(names.get(code, code)) for code in codes.tolist())


def _of_shard(file: Path, column: str, rows: np.ndarray) -> Iterator[list[Encoded]]:
    """Yield the images at ``rows`` of a compressed shard, or of one beside it."""
    places = column_of(file, column).take(pa.array(rows)).to_pylist()
    images = stored_images(file, [place and (place["offset"], place["length"]) for place in places])
    while batch := list[Encoded](islice(images, BATCH)):
        yield batch


def _encoded(files: Sequence[Path], column: str, rows: np.ndarray) -> Iterator[list[Encoded]]:
    """Yield the encoded images of ascending rows of all files one after another."""
    bounds = np.cumsum([0, *map(num_rows, files)])
    first = np.searchsorted(rows, bounds)
    needed = [(file, bounds[place]) for place, file in enumerate(files) if first[place] < first[place + 1]]
    for place, (file, _) in enumerate(needed):  # all of them before an image is decoded
        check_image_column(file, column, others_have_it=place > 0)
    for file, start in needed:
        if is_shard(file):
            yield from _of_shard(file, column, rows[(rows >= start) & (rows < start + num_rows(file))] - start)
            continue
        for batch in column_chunks(file, column):
            wanted = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(batch))] - start
            start += len(batch)
            if len(wanted):
                encoded = encoded_images(batch, file.parent)
                yield [encoded[row] for row in wanted]
