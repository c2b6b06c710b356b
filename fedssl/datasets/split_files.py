"""Splits of files with many images each: parquet and arrow files.

A file belongs to the split that its name, or else the nearest folder below the data set's path, names; see
`fedssl.datasets.splits`. If no name is that of a split, all files are training images.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedssl.datasets.sources import Source
from fedssl.datasets.splits import HELD_OUT, split_of, split_of_word
from fedssl.errors import InputError, sanitize, shortened
from fedssl.logs import log_once

_SHARD = re.compile(r"(.+)-\d+-of-\d+")  # file names of the Hub


def files_of_split(source: Source, split: str) -> list[Path]:
    """Return the sorted files of ``split``; empty for "test" if there are no test and validation files.

    ``split`` is a word for a split or another word of the files' names. Raise an `InputError` if it does not exist.
    """
    names = source.files
    kinds = {file: split_in(name) for file, name in names.items()}
    files = _files_of(split, names, kinds)
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
    again = Counter(file.name for file in files if _SHARD.match(file.name))
    folders = sorted({str(file.parent) for file in files if again[file.name] > 1})
    if folders:
        line = f"{source.path}: files of the same names in {shortened(folders)} are read as one data set; if these are "
        log_once(logging.WARNING, f"{line}several, set {source.setting}={folders[0]}")
    unnamed = {file: name for file, name in names.items() if kinds[file] is None and file not in files}
    if unnamed and split_of_word(split) == "train":
        log_once(
            logging.INFO,
            sanitize(f"{source.path}: not used, because the names are of no split: {_sorted_names(unnamed.values())}"),
        )
    return sorted(files)


def training_files(source: Source) -> list[Path]:
    """Return the files for training; empty if all are of other splits."""
    return _files_of("train", source.files, {file: split_in(name) for file, name in source.files.items()})


def has_held_out(source: Source) -> bool:
    """Return whether a file is of a split that is not for training."""
    return any(split_in(name) in HELD_OUT for name in source.listing.paths)


def _files_of(split: str, names: Mapping[Path, str], kinds: Mapping[Path, str | None]) -> list[Path]:
    # A folder may hold further splits that begin with the same word (train_0).
    shards = [file for file, name in names.items() if _shard_of(name) == split.lower()]
    if shards:
        return shards
    kind = split_of_word(split)
    if kind is None:
        word = re.compile(rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])")
        return [file for file, name in names.items() if word.search(name.lower())]
    if kind == "train" and not any(kinds.values()):
        return list(names)
    for served in HELD_OUT if split == "test" else (kind,):
        files = [file for file in names if kinds[file] == served]
        if files:
            if served != kind:
                log_once(logging.INFO, f"{_sorted_names(names[file] for file in files)} serves as the test")
            return files
    return []


def _shard_of(name: str) -> str | None:
    shard = _SHARD.match(name.rpartition("/")[2].lower())
    return None if shard is None else shard[1]


def split_in(name: str) -> str | None:
    """Return the split that a file's name or the nearest of its folders names."""
    *folders, file = name.split("/")
    return next(filter(None, map(split_of, (file.rpartition(".")[0], *reversed(folders)))), None)


def _sorted_names(names: Iterable[str]) -> str:
    return shortened(sorted(set(names)))
