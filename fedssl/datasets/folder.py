"""Images of a path: in files, in the rows of parquet and arrow files, or in the arrays of an NPZ file.

``DIR`` holds images without classes and owners, subfolders of images, or the folders of splits with either layout, see
`fedssl.datasets.folder_layout`. The setting ``folders`` gives the meaning of a subfolder:

==============  =========================  ==========================================================
``class``       ``DIR/cat/1.png``          the class of its images
``owner``       ``DIR/phone-7/1.png``      the owner of its images, which have no labels
``owner/class`` ``DIR/phone-7/cat/1.png``  the owner of its images; its subfolders are the classes
``none``        ``DIR/2024/may/1.png``     none: all images below DIR, without labels
==============  =========================  ==========================================================

Images are sorted by path. The other kinds are described in `fedssl.datasets.table_index` and `fedssl.datasets.npz`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.config.constraints import check_arguments
from fedssl.datasets.base import NO_LABEL, ImageData, stratified_holdout, subsample_indices
from fedssl.datasets.cache import file_line, read_images
from fedssl.datasets.decoding import MAX_PIXELS, Decoding
from fedssl.datasets.folder_layout import list_split
from fedssl.datasets.image_index import FOLDER, ImageIndex, Query, SequenceIndex, grouped_by_folder
from fedssl.datasets.listing import log_once
from fedssl.datasets.npz import index_arrays
from fedssl.datasets.page_index import with_pages
from fedssl.datasets.raster import BACKGROUND
from fedssl.datasets.sources import ARRAYS, TABLES, Source, find
from fedssl.datasets.splits import HELD_OUT, split_of_word
from fedssl.datasets.table_index import index_hub, index_tables
from fedssl.digests import new_identity
from fedssl.errors import InputError, shortened
from fedssl.safe_io import sanitize

# Arguments of `read` for all images of a path, without labels, as on a device.
ALL_IMAGES: Mapping[str, Any] = {
    "folders": "none",
    "split_folders": False,
    "test_fraction": 0.0,
    "label": None,
    "skip_missing": True,
}
_NOTHING_HELD_OUT = (
    "no group was held out, so that there are no test images: each class needs images of other groups for training; "
    "name smaller groups (dataset.group=COLUMN), or hold out images of all groups (dataset.group=null)"
)


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    hub: str | None = None,
    image: str | None = None,
    label: str | None = "label",
    owner: str | None = None,
    group: str | None = None,
    split_column: str | None = None,
    skip_missing: bool = True,
    folders: str = "class",
    split_folders: bool | str = "auto",
    test_fraction: float = 0.0,
    pages: str = "auto",
    background: int = BACKGROUND,
    dtype: str = "auto",
    window: Sequence[float] | None = None,
    percentiles: Sequence[float] | None = None,
    max_pixels: int = MAX_PIXELS,
    video_interval: float = 1.0,
    cache: str | None = None,
    storage: str = "decoded",
) -> ImageData | None:
    """Read one split.

    Parameters
    ----------
    split : str
        Name of the split on the Hub, or in the names of folders, files, or arrays; or a word for it.
    pages : {"auto", "first", "all", "channels"}
        The images of files with several, see `fedssl.datasets.page_index`.
    channels, size, background, dtype, window, percentiles
        See `fedssl.datasets.raster.PixelSettings`.
    limit : int or None
        Maximum number of images; the subset is always the same.
    path : str or None
        A file, a folder or a pattern such as ``/data/cifar10-*.parquet``; the network is not used. None for the Hub.
    hub : str or None
        Name of the data set on the Hub, with the name of its subset behind a colon, if it has several.
    image : str or None
        Name of the column of images, or part of the name of the arrays. None for the only one.
    label : str or None
        Name of the column or arrays of labels, see `fedssl.datasets.labels`. None for no labels, also of folders.
    owner : str or None
        Name of the column with the owner of each image, as an integer or a string. None if unknown.
    group : str or None
        Name of the column with the group of each image, such as a patient, as an integer or a string; "folder" for the
        folder of its file. Images of one group are on one side of the holdout. None for no groups.
    split_column : str or None
        Name of the column with the split of each image, if all files have it. None for none.
    skip_missing : bool
        Whether image files that a column names and that do not exist are a warning; otherwise they are an error.
    folders : {"class", "owner", "owner/class", "domain", "domain/class", "none"}
        Meaning of the subfolders, see the module. A domain is an owner.
    split_folders : bool or "auto"
        Whether the folders in ``path`` are splits; "auto" decides by their names. False reads the files of all splits.
    test_fraction : float
        Share of every class that is held out if there are labels, but no test or validation split, in [0, 1);
        0 holds nothing out.
    max_pixels : int
        Maximum number of pixels of an image; larger images count as unreadable.
    video_interval : float
        Seconds between two frames of a video.
    cache : str or None
        Folder of decoded images, see `fedssl.datasets.cache`.
    storage : {"decoded", "encoded", "auto"}
        See `fedssl.datasets.cache.read_images`. Encoded images stay in their files.

    Returns
    -------
    ImageData or None
        None if there is no such split.
    """
    check_arguments("dataset", folders=folders, split_folders=split_folders, test_fraction=test_fraction)
    check_arguments("dataset", storage=storage, pages=pages)
    query = Query(
        split=split,
        name=f"{hub if path is None else Path(path).name}-{split}-{size}px",
        decoding=Decoding(
            channels=channels,
            size=size,
            background=background,
            dtype=dtype,
            window=window,
            percentiles=percentiles,
            max_pixels=max_pixels,
            video_interval=video_interval,
        ),
        image=image,
        label=label,
        owner=owner,
        group=group,
        split_column=split_column,
        skip_missing=skip_missing,
        folders=folders.replace("domain", "owner"),
        split_folders=split_folders,
        test_fraction=test_fraction,
        pages=pages,
    )
    if path is not None:
        index = index_path(path, query, containers_first=hub is not None)
    elif hub is not None:
        index = index_hub(hub, query)
    else:
        raise InputError("dataset.path=null but there is no data set without one; give dataset.path=FOLDER_OR_FILE")
    if index is None:
        return None
    return read_images(index.at(subsample_indices(index.count, limit)), cache=cache, storage=storage)


def index_path(path: str, query: Query, *, containers_first: bool = False) -> ImageIndex | None:
    """Return the images of ``query.split`` in a path; None if there are none."""
    source = find(path, containers_first=containers_first)
    index = _index(source, query)
    if index is None:
        return None
    if index.shared:
        labels = np.full(index.count, NO_LABEL) if index.labels is None else index.labels
        is_test = split_of_word(query.split) in HELD_OUT
        rows = stratified_holdout(labels, fraction=query.test_fraction, groups=index.groups)[is_test]
        if index.groups is not None and index.labels is not None and not len(rows):
            log_once(logging.WARNING, sanitize(f"{path}: {_NOTHING_HELD_OUT}"))
        index = index.at(rows)
    elif index.groups is not None and split_of_word(query.split) in HELD_OUT:
        index = replace(index, warnings=index.warnings + _common_groups(source, index, query))
    if index.groups is not None and index.count:
        number = len(np.unique(index.groups))
        log_once(logging.INFO, sanitize(f"{path}: {query.split}: {index.count:,} images in {number:,} groups"))
    return replace(index, warnings=source.warnings + index.warnings) if index.count else None


def _index(source: Source, query: Query) -> ImageIndex | None:
    indexers = {TABLES: index_tables, ARRAYS: index_arrays}
    return indexers.get(source.kind, _index_files)(source, query)


def _common_groups(source: Source, test: ImageIndex, query: Query) -> tuple[str, ...]:
    """Return a warning if the given splits for training and for the test have images of the same groups."""
    try:
        train = _index(source, replace(query, split="train"))
    except InputError:  # there is no such split
        return ()
    common = sorted(test.present_groups & (set() if train is None else train.present_groups))
    line = (
        f"{source.path}: {len(common):,} groups ({shortened(common)}) have images in the training and in {query.split}"
        ", so that results are too good; set dataset.split_folders=false dataset.split_column=null to hold out groups"
    )
    return (line,) if common else ()


def index_all(path: Path) -> ImageIndex:
    """Return all images of a path, as on a device; `InputError` if there are none."""
    query = Query(split="train", name="", decoding=Decoding(channels=3, size=32), **ALL_IMAGES)
    index = index_path(str(path), query)
    if index is None:
        raise InputError(f"{path} holds no images")
    return index


def files_digest(path: Path) -> str:
    """Return a digest of the names, sizes and modification times of the files of all images."""
    hashed = new_identity()
    for file in index_all(path).files:
        hashed.update(file_line(file)[0])
    return hashed.hexdigest()


def _index_files(source: Source, query: Query) -> SequenceIndex:
    if query.owner is not None:
        raise InputError(
            f"dataset.owner={query.owner} is a column, but {source.path} holds image files; set dataset.owner=null, "
            "and dataset.folders=owner if its subfolders are owners"
        )
    found = list_split(source, query)
    groups: dict[str, Any] = {}
    if query.group == FOLDER:
        groups = grouped_by_folder(found.files, Path(source.listing.root))
    elif query.group is not None:
        raise InputError(
            f"dataset.group={query.group} is a column, but {source.path} holds image files; set dataset.group=folder "
            f"if the images of a folder are a group, or dataset.path to a CSV file with columns path and {query.group}"
        )
    if query.label is None:
        found = replace(found, labels=None, classes=())
    index = SequenceIndex(
        name=query.name,
        count=len(found.files),
        decoding=query.decoding,
        num_in_files=len(found.files),
        key={"reader": "folder"},
        images=found.files,
        **groups,
        **vars(found),
    )
    return with_pages(index, found.files, query.pages)
