"""The images of a path, found but not decoded: in files, in rows of tables, or in arrays."""

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.datasets.decoding import Bands, Decoding
from fedssl.datasets.folder_layout import list_split
from fedssl.datasets.holdout import NO_LABEL, stratified_holdout
from fedssl.datasets.image_index import (
    FOLDER,
    ImageIndex,
    Query,
    RecordSequence,
    SequenceIndex,
    file_line,
    grouped_by_folder,
)
from fedssl.datasets.npz import index_arrays
from fedssl.datasets.page_index import with_pages
from fedssl.datasets.sources import ARRAYS, TABLES, Source, find
from fedssl.datasets.splits import HELD_OUT, split_of_word
from fedssl.datasets.table_index import RowIndex, index_tables
from fedssl.digests import new_identity
from fedssl.errors import InputError, shortened
from fedssl.logs import log_once

# Arguments of `read` for all images of a path, without labels, as on a device.
ALL_IMAGES: Mapping[str, Any] = {
    "folders": "none",
    "split_folders": False,
    "test_fraction": 0.0,
    "label": None,
    "skip_missing": True,
}
_NOTHING_HELD_OUT = (
    "no group was held out, so that there are no test images: each class needs images of other groups for training, "
    "and groups of the share dataset.test_fraction"
)
_SMALLER_GROUPS = "name smaller groups (dataset.group=COLUMN), or hold out images of all groups (dataset.group=null)"
_SMALLER_FILES = (
    "the pages of a file are a group: divide the files, raise dataset.test_fraction, or put test images into a folder "
    "test beside one named train"
)


def index_path(path: str, query: Query, *, containers_first: bool = False) -> ImageIndex | None:
    """Return the images of ``query.split`` in a path; None if there are none."""
    source = find(path, containers_first=containers_first)
    index = index_source(source, query)
    if index is None:
        return None
    if index.shared:
        labels = np.full(index.count, NO_LABEL) if index.labels is None else index.labels
        is_test = split_of_word(query.split) in HELD_OUT
        rows = stratified_holdout(labels, fraction=query.test_fraction, groups=index.groups)[is_test]
        if index.groups is not None and index.labels is not None and not len(rows):
            remedy = _SMALLER_GROUPS if query.group is not None else _SMALLER_FILES
            log_once(logging.WARNING, f"{path}: {_NOTHING_HELD_OUT}; {remedy}")
        index = index.at(rows)
    elif split_of_word(query.split) in HELD_OUT and (index.groups is not None or _names_files(index)):
        index = replace(index, warnings=index.warnings + _common(source, index, query))
    if index.groups is not None and index.count:
        number = len(np.unique(index.groups))
        log_once(logging.INFO, f"{path}: {query.split}: {index.count:,} images in {number:,} groups")
    return replace(index, warnings=source.warnings + index.warnings) if index.count else None


def index_source(source: Source, query: Query) -> ImageIndex | None:
    """Return the images of ``query.split`` in files of one kind; None if there are none."""
    indexers = {TABLES: index_tables, ARRAYS: index_arrays}
    return indexers.get(source.kind, _index_files)(source, query)


def _names_files(index: ImageIndex) -> bool:
    return isinstance(index, RowIndex) and not isinstance(index.images, RecordSequence)


def _common(source: Source, test: ImageIndex, query: Query) -> tuple[str, ...]:
    """Return a warning if the given splits for training and for the test have the same groups, or the same files."""
    try:
        train = index_source(source, replace(query, split="train"))
    except InputError:  # there is no such split
        return ()
    if train is None:
        return ()
    what, common = "files are", {*map(os.path.normpath, test.files)} & {*map(os.path.normpath, train.files)}
    remedy = ""
    if test.groups is not None:
        what, common = "groups have images", test.present_groups & train.present_groups
        remedy = "; set dataset.split_folders=false dataset.split_column=null to hold out groups"
    line = f"{source.path}: {len(common):,} {what} in the training and in {query.split} ({shortened(sorted(common))})"
    return (f"{line}, so that results are too good{remedy}",) if common else ()


def index_all(path: Path) -> ImageIndex:
    """Return all images of a path, as on a device; `InputError` if there are none."""
    query = Query(split="train", name="", decoding=Decoding(channels=3, size=32), **ALL_IMAGES)
    index = index_path(str(path), query)
    if index is None:
        raise InputError(f"{path} holds no images")
    return index


def bytes_per_value(path: Path, settings: Mapping[str, Any]) -> int:
    """Return the size of a value of the decoded images, by a sample of them; ``settings`` are arguments of `read`."""
    index = index_all(path)
    names = {field.name for field in fields(Decoding)} & settings.keys()
    decoding = replace(index.decoding, **{name: settings[name] for name in names})
    return np.dtype(decoding.with_found_dtype(index.sample(np.arange(index.count))).pixel_dtype).itemsize


def files_digest(path: Path) -> str:
    """Return a digest of the names, sizes and modification times of the files of all images."""
    hashed = new_identity()
    for file in index_all(path).files:
        hashed.update(file_line(file)[0])
    return hashed.hexdigest()


def _index_files(source: Source, query: Query) -> SequenceIndex:
    if query.owner is not None and not query.folders.startswith("owner"):
        raise InputError(
            f"dataset.owner={query.owner} is a column, but {source.path} holds image files; set dataset.owner=null, "
            "and dataset.folders=owner if its subfolders are owners"
        )
    index = list_split(source, query)
    if query.group == FOLDER:
        index = replace(index, **grouped_by_folder(index.files, Path(source.listing.root)))
    elif query.group is not None:
        raise InputError(
            f"dataset.group={query.group} is a column, but {source.path} holds image files; set dataset.group=folder "
            f"if the images of a folder are a group, or {source.setting} to a CSV file with columns path and "
            f"{query.group}"
        )
    found = with_pages(index, index.files, query.pages)
    has_bands = any(isinstance(image, Bands) for image in found.images[:1])  # whose folders are the images
    is_held_out = (
        index.shared and query.test_fraction and index.labels is not None and split_of_word(query.split) in HELD_OUT
    )
    if query.group is None and query.folders == "class" and is_held_out and not has_bands:
        _warn_of_folders_in_classes(index)
    return found


def _warn_of_folders_in_classes(index: SequenceIndex) -> None:
    """Log a warning if each class has several folders with several images, of which a test share is held out."""
    assert index.labels is not None
    parents = (str(file).rpartition("/")[0] for file in index.files)
    folders = Counter(zip(parents, index.labels.tolist(), strict=True))
    of_class = Counter(label for (_, label), count in folders.items() if count > 1)
    if len(of_class) == len(index.classes) and min(of_class.values(), default=0) > 1:
        line = f"each class has several folders, such as {next(iter(folders))[0]}, and images of all of them are held "
        log_once(logging.WARNING, f"{line}out; if a folder is a patient or a scene, set dataset.group=folder")
