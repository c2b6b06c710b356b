"""Labels of rows in parquet and arrow files, with the same numbers in all files of a data set.

A column holds names (strings), truth values, class numbers whose names are in the metadata (``ClassLabel`` of
``datasets``), or class numbers alone. Named classes are joined by name over all files: a file may list other names, or
in another order. A row has no label if its value is null, NaN, negative or blank.
"""

import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from fedssl.datasets.column_types import is_bytes, is_text
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.shards import is_shard
from fedssl.datasets.tables import column_of, num_rows, schema_of
from fedssl.errors import InputError, shortened
from fedssl.logs import log_once

MAX_NUMBER = 2**16  # larger numbers are identifiers, such as those of species: they count as names
Source = TypeVar("Source")
_TRUTH_VALUES = ("False", "True")  # as `str` writes them; the TRUE of a spreadsheet is one, too
_OFF = "dataset.label=null where no labels are needed"


@dataclass(frozen=True)
class LabelColumn:
    """Labels of a file or an array."""

    source: object  # its name
    values: np.ndarray  # int64, ``(n,)``, `NO_LABEL` if missing
    names: tuple[str, ...] | None = None  # ``names[value]``; None if values are class numbers without names

    @property
    def is_empty(self) -> bool:
        """Return whether no row has a label."""
        return not (self.values >= 0).any()


def read_labels(
    files: Sequence[Path], column: str | None, *, data_set: Sequence[Path]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the labels ``(n,)`` of some files of a data set, and the classes of all its files, empty if unknown.

    Without a ``column`` no row has a label.
    """
    if column is None:
        return np.full(sum(num_rows(file) for file in files), NO_LABEL), ()
    columns = {file: _read(file, column) for file in sorted({*files, *data_set})}  # one order for all splits
    if any(part.names for part in columns.values()):  # in a shard beside, all names may be numbers
        columns = {file: _by_name(part) if is_shard(file) else part for file, part in columns.items()}
    labels, classes = joined(columns, column)
    return np.concatenate([labels[file] for file in files]), classes


def missing_labels(labels: np.ndarray, files: Sequence[Path], column: str, *, split: str) -> tuple[str, ...]:
    """Return one warning about rows of a split without labels; empty if all have one."""
    missing, count = int((labels == NO_LABEL).sum()), len(labels)
    if not missing:
        return ()
    lacking = [file for file in files if column not in schema_of(file).names]
    why = ""
    if lacking:
        why = f" ({lacking[0]} has no column {column!r}: set dataset.label to one of {schema_of(lacking[0]).names})"
    if missing == count:
        return (f"none of the {count} rows of the split {split!r} has a label{why}: they are used without labels",)
    have = "has" if missing == 1 else "have"
    return (
        f"{missing} of {count} rows of the split {split!r} {have} no label{why}: used for training, "
        "and for results that need no class",
    )


def joined(parts: Mapping[Source, LabelColumn], column: str) -> tuple[dict[Source, np.ndarray], tuple[str, ...]]:
    """Return the labels of each source by one list of classes, and their names."""
    used = [part for part in parts.values() if not part.is_empty]
    numbered = [part for part in used if part.names is None]
    if len(numbered) == len(used):
        if max((int(part.values.max()) for part in used), default=0) < MAX_NUMBER:
            return {source: part.values for source, part in parts.items()}, ()
        parts = {source: _by_name(part) for source, part in parts.items()}
        used = list(parts.values())
    elif numbered:
        named = next(part for part in used if part.names is not None)
        raise InputError(
            f"dataset.label={column} has class names in {named.source} but numbers without names in "
            f"{numbered[0].source}, so that classes cannot be matched; write both files with names, select files that "
            f"belong together with a pattern, or give {_OFF}"
        )
    every = {name for part in used for name in part.names or ()}
    lists = [part.names for part in used if part.names and every.issubset(part.names)]
    classes = lists[0] if lists else tuple(sorted(every))
    return {source: _renumbered(part, classes) for source, part in parts.items()}, classes


def _renumbered(part: LabelColumn, classes: Sequence[str]) -> np.ndarray:
    names = part.names or ()
    if part.is_empty or names == classes:
        return part.values
    number = {name: index for index, name in enumerate(classes)}
    if len(number) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise InputError(
            f"{part.source} has other class names than the other files, where two classes are named "
            f"{twice!r}, so that classes cannot be matched; give them different names, or {_OFF}"
        )
    of_value = np.array([*(number[name] for name in names), NO_LABEL], dtype=np.int64)
    renumbered: np.ndarray = of_value[part.values]
    return renumbered


def _by_name(part: LabelColumn) -> LabelColumn:
    """Return class numbers as names, unless they have names."""
    if part.names is not None:
        return part
    distinct, values = np.unique(part.values[part.values >= 0], return_inverse=True)
    labels = np.full(len(part.values), NO_LABEL)
    labels[part.values >= 0] = values
    return LabelColumn(part.source, labels, tuple(map(str, distinct)))


def _read(file: Path, column: str) -> LabelColumn:
    """Read the labels of a file; none if it lacks the column."""
    if column not in schema_of(file).names:
        return LabelColumn(file, np.full(num_rows(file), NO_LABEL))
    array = column_of(file, column)
    names = _TRUTH_VALUES if pa.types.is_boolean(array.type) else class_names(schema_of(file), column)
    return label_column(file, column, array, names)


def label_column(source: object, column: str, array: pa.Array, names: tuple[str, ...] = ()) -> LabelColumn:
    """Return the labels of an array of class numbers or names; ``names`` are those of numbers, if known."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    try:
        if is_text(kind) or is_bytes(kind):
            return _text(source, column, array.cast(pa.string()))
        values = _floats(array.cast(pa.float64())) if pa.types.is_floating(kind) else _integers(array, kind)
    except pa.ArrowException as error:
        several = "several labels per image, for evaluation=multi_label" if pa.types.is_nested(kind) else str(error)
        raise InputError(
            f"dataset.label={column} is of type {kind} in {source} ({several}); one class per image is needed, as an "
            f"integer or a name: give another column, or {_OFF}"
        ) from error
    if pa.types.is_integer(kind) and not array.null_count and {*np.unique(values)} == {-1, 1}:
        line = f"{source}: dataset.label={column}: -1 is read as no label; write 0 and 1 if these are two classes"
        log_once(logging.WARNING, line)
    known = len(names) > values.max(initial=NO_LABEL)  # others describe another column
    return LabelColumn(source, np.where(values < 0, NO_LABEL, values), names if names and known else None)


def _text(source: object, column: str, array: pa.Array) -> LabelColumn:
    """Return the labels of a column of names, which are sorted; log a warning if these are joined by bars."""
    encoded = array.dictionary_encode()
    written = [unicodedata.normalize("NFC", name.strip()) for name in encoded.dictionary.to_pylist()]
    names = tuple(sorted({name for name in written if name}))
    folded = Counter(name.casefold() for name in names)
    if alike := [name for name in names if folded[name.casefold()] > 1]:
        line = f"{source}: dataset.label={column}: {shortened(alike)} differ only in case and are several classes; "
        log_once(logging.WARNING, f"{line}write those alike that are one")
    if found := next((name for name in names if "|" in name), None):
        line = f"{source}: dataset.label={column} has names such as {found!r}, each of which is one class; for several "
        log_once(logging.WARNING, f"{line}labels per image use evaluation=multi_label 'evaluation.columns=[{column}]'")
    number = {name: index for index, name in enumerate(names)}
    of_index = np.array([*(number.get(name, NO_LABEL) for name in written), NO_LABEL])
    return LabelColumn(source, of_index[_integers(encoded.indices, encoded.indices.type)], names)


def _floats(array: pa.Array) -> np.ndarray:
    """Return whole numbers as integers; NaN and null are missing, as pandas writes them."""
    values = np.from_dlpack(array.fill_null(np.nan))
    values = np.where(np.isnan(values), NO_LABEL, values)
    wrong = values[values != np.clip(np.floor(values), -(2.0**53), 2.0**53)]
    if len(wrong):
        raise pa.ArrowInvalid(f"it has the value {wrong[0]:g}, for evaluation=regression")
    return values.astype(np.int64)


def _integers(array: pa.Array, kind: pa.DataType) -> np.ndarray:
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise pa.ArrowInvalid("it holds no classes")
    return np.from_dlpack(array.cast(pa.int64()).fill_null(NO_LABEL))  # pyarrow's conversion imports pandas: seconds


def class_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """Return the class names in the Hub's metadata of the file; empty if there are none."""
    try:
        described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = described["info"]["features"][column]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()
