"""Splits of files with many images each: parquet and arrow files.

A file belongs to the split that its name, or else the nearest folder below the data set's path, names; see
`fedssl.datasets.splits`. If no name is that of a split, all files are training images.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedssl.datasets.image_index import ImageIndex, Query
from fedssl.datasets.sources import Source
from fedssl.datasets.splits import HELD_OUT, chosen_parts, shard_of, split_of, split_of_word
from fedssl.errors import InputError, shortened
from fedssl.logs import log_once


def split_files(source: Source, query: Query) -> tuple[list[Path], bool]:
    """Return the sorted files of a split, and whether a test share of their images is held out.

    There may be none of the test. The name of a split is a word for it, or another word of the files' names. Raise an
    `InputError` if it does not exist.
    """
    names, split = source.files, query.split
    if query.split_folders is False:
        return sorted(names), query.test_fraction > 0 or split_of_word(split) in HELD_OUT
    kinds = {file: split_in(name) for file, name in names.items()}
    files, shared = chosen_parts(names, kinds, split=split, fraction=query.test_fraction)
    if not files and split != "test":
        remedy = (
            "set dataset.splits.federated and dataset.splits.train to a word in these names, and dataset.splits.test "
            "to another word or null"
        )
        if split_of_word(split) in HELD_OUT:
            remedy = "hold out a share with dataset.test_fraction=0.2, or set dataset.splits.test=null for no test"
        raise InputError(
            f"{source.setting}={source.path} has no split {split!r}, only {_sorted_names(names.values())}; {remedy}"
        )
    again = Counter(file.name for file in files if shard_of(file.name))
    folders = sorted({str(file.parent) for file in files if again[file.name] > 1})
    if folders:
        line = f"{source.path}: files of the same names in {shortened(folders)} are read as one data set; if these are "
        log_once(logging.WARNING, f"{line}several, set {source.setting}={folders[0]}")
    unnamed = {file: name for file, name in names.items() if kinds[file] is None and file not in files}
    if unnamed and split_of_word(split) == "train":
        line = f"not used, because the names are of no split: {_sorted_names(unnamed.values())}"
        log_once(logging.INFO, f"{source.path}: {line}")
    return sorted(files), shared


def labeled_test(query: Query, read: Callable[[Query], ImageIndex | None]) -> ImageIndex | None:
    """Return the images of a split, or, in place of a test without labels, those of a validation with labels."""
    index = read(query)
    if query.split != "test" or query.label is None or index is None:
        return index
    if not (index.shared or _has_labels(index)):
        with suppress(InputError):  # there is no such split
            validation = read(replace(query, split="validation"))
            if validation is not None and _has_labels(validation):
                log_once(logging.INFO, f"{query.name}: the validation serves as the test, which has no labels")
                return validation
    return index


def _has_labels(index: ImageIndex) -> bool:
    return index.labels is not None and bool((index.labels >= 0).any())


def split_in(name: str) -> str | None:
    """Return the split that a file's name or the nearest of its folders names."""
    *folders, file = name.split("/")
    return next(filter(None, map(split_of, (file.rpartition(".")[0], *reversed(folders)))), None)


def _sorted_names(names: Iterable[str]) -> str:
    return shortened(sorted(set(names)))
