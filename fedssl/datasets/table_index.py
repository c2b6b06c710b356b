"""Images in the rows of parquet and arrow files: local ones, or those of the Hub's cache.

Both are read with pyarrow alone. The bytes of an image go directly to the decoder, without a Python object per row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedssl.datasets.decoding import Encoded
from fedssl.datasets.image_index import ImageIndex, Query
from fedssl.datasets.labels import class_names, missing_labels, read_labels
from fedssl.datasets.listing import is_file
from fedssl.datasets.sources import Source
from fedssl.datasets.split_files import files_of_split, has_held_out
from fedssl.datasets.splits import HELD_OUT, split_of_word
from fedssl.datasets.tables import (
    arrow_records,
    check_image_column,
    column_bytes,
    column_chunks,
    column_of,
    encoded_images,
    image_column,
    image_files,
    num_rows,
    require_column,
    row_values,
    schema_of,
)
from fedssl.digests import identity
from fedssl.errors import InputError


def index_tables(source: Source, query: Query) -> "TableIndex | None":
    """Return the images of local files; None if none is of the split."""
    all_files = sorted(source.files)
    count = sum(map(num_rows, all_files))
    source.log(f"{count:,} rows in {len(all_files):,} parquet or arrow file{'s'[: len(all_files) != 1]}")
    if query.split_folders is False:
        return index_rows(all_files, query, data_set=all_files, shared=query.test_fraction > 0)
    shared = query.test_fraction > 0 and not has_held_out(source)
    held_out = shared and split_of_word(query.split) in HELD_OUT
    files = files_of_split(source, "train" if held_out else query.split)
    return index_rows(
        files, query, data_set=all_files, shared=shared and (held_out or split_of_word(query.split) == "train")
    )


def index_hub(hub: str, query: Query) -> "TableIndex | None":
    """Return the images of a data set of the Hub; None if it has none."""
    if query.test_fraction:
        raise InputError(
            f"dataset.test_fraction={query.test_fraction} is for local files, but dataset.path is null and data sets "
            "of the Hub have their own splits; give dataset.splits.test=NAME, or dataset.path"
        )
    files = _hub_files(hub, query.split)
    # All splits of the data set, without results of operations of ``datasets``.
    data_set = [file for file in sorted(files[0].parent.glob("*.arrow")) if not file.name.startswith("cache-")]
    return index_rows(files, query, data_set=data_set, shared=False)


def index_rows(files: Sequence[Path], query: Query, *, data_set: Sequence[Path], shared: bool) -> "TableIndex | None":
    """Return the images of all rows of some files of a data set; None if they have no row."""
    count = sum(num_rows(file) for file in files)
    if not count:
        return None
    labels, classes = read_labels(files, query.label, data_set=data_set)
    warnings: tuple[str, ...] = ()
    if query.label is not None and not (shared and split_of_word(query.split) in HELD_OUT):
        warnings = missing_labels(labels, files, query.label, split=query.split)
    owners, owner_names = (None, ()) if query.owner is None else _owners(files, query.owner)
    image = image_column(files[0]) if query.image is None else query.image
    named = [path for file in files for path in image_files(file, image)]
    return TableIndex(
        name=query.name,
        count=count,
        files=[*files, *filter(is_file, named)],
        num_in_files=count,
        decoding=query.decoding,
        key={"reader": "hub", "image": image},
        labels=labels,
        classes=classes,
        owners=owners,
        owner_names=owner_names,
        warnings=warnings,
        shared=shared,
        tables=files,
        column=image,
        rows=np.arange(count),
        names_files=bool(named),
        row_name=f"of the split {query.split!r} in {files[0].parent}",
    )


@dataclass(frozen=True, kw_only=True)
class TableIndex(ImageIndex):
    """Images in rows of a column of parquet or arrow files."""

    tables: Sequence[Path]
    column: str
    rows: np.ndarray  # ascending, of all tables one after another
    row_name: str  # of any row, after its number
    names_files: bool  # whether the column names files

    def at(self, rows: np.ndarray) -> "TableIndex":
        chosen = self.rows[rows]
        # The rows depend on the labels, whose numbers depend on the names in all files of the data set.
        key = {**self.key, "rows": identity(chosen.tobytes())}
        return replace(super().at(rows), rows=chosen, key=key)

    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        return _encoded(self.tables, self.column, self.rows[start:])

    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        return chain.from_iterable(_encoded(self.tables, self.column, self.rows[readable]))

    def image_name(self, index: int) -> str:
        place = f"row {self.rows[index]} {self.row_name}"
        if not self.names_files:
            return place
        source = next(chain.from_iterable(self.batches(index)))
        return f"{place}, {source}" if isinstance(source, Path) else place

    def records(self) -> Sequence[Encoded] | None:
        return arrow_records(self.tables, self.column, self.rows)

    def values(self, name: str) -> Sequence[Any]:
        return row_values(self.tables, name, self.rows)

    def num_bytes(self) -> int:
        return sum(column_bytes(file, self.column) for file in self.tables) * self.count // self.num_in_files


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


def _owners(files: Sequence[Path], column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the owner index of every row ``(n,)`` and the owners' names, the sorted values of the column."""
    remedy = "set dataset.owner to the column with the owners of the images, or dataset.owner=null if there is none"
    for file in files:
        kind = require_column(file, column, remedy).field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(f"dataset.owner={column} is of type {kind}; an integer or string column is needed")
    values = [value for file in files for value in column_of(file, column).to_pylist()]
    if None in values:
        raise InputError(
            f"dataset.owner={column} has no value in {values.count(None)} of {len(values)} rows, first row "
            f"{values.index(None)} of {files[0].parent}; give every image an owner, or dataset.owner=null"
        )
    numbers, owners = np.unique(values, return_inverse=True)
    names = dict(enumerate(class_names(schema_of(files[0]), column)))
    return owners, tuple(str(names.get(number, number)) for number in numbers.tolist())


def _encoded(files: Sequence[Path], column: str, rows: np.ndarray) -> Iterator[list[Encoded]]:
    """Yield the encoded images of ascending rows of all files one after another."""
    bounds = np.cumsum([0, *map(num_rows, files)])
    first = np.searchsorted(rows, bounds)
    needed = [(file, bounds[place]) for place, file in enumerate(files) if first[place] < first[place + 1]]
    for place, (file, _) in enumerate(needed):  # all of them before an image is decoded
        check_image_column(file, column, others_have_it=place > 0)
    for file, start in needed:
        for batch in column_chunks(file, column):
            wanted = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(batch))] - start
            start += len(batch)
            if len(wanted):
                encoded = encoded_images(batch, file.parent)
                yield [encoded[row] for row in wanted]
