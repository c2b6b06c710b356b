"""Data sets of the Hugging Face Hub, through flwr-datasets or from local parquet and arrow files.

Both are read with pyarrow alone, since the Hub's cache of a data set consists of arrow files. The bytes of an image go
directly to the decoder, without a Python object per row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from fedssl.config.constraints import check_arguments
from fedssl.datasets.base import ImageData, stratified_holdout, subsample_indices
from fedssl.datasets.cache import read_images
from fedssl.datasets.decoding import MAX_PIXELS, Decoding, Encoded
from fedssl.datasets.image_index import ImageIndex
from fedssl.datasets.labels import missing_labels, read_labels
from fedssl.datasets.listing import is_file
from fedssl.datasets.local_tables import has_held_out, listed_files, local_files
from fedssl.datasets.pixels import BACKGROUND
from fedssl.datasets.splits import HELD_OUT, split_of_word
from fedssl.datasets.tables import (
    arrow_records,
    check_image_column,
    column_bytes,
    column_chunks,
    column_of,
    encoded_images,
    image_files,
    num_rows,
    require_column,
)
from fedssl.digests import identity
from fedssl.errors import InputError


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    hub: str,
    image: str,
    label: str | None,
    owner: str | None = None,
    test_fraction: float = 0.0,
    background: int = BACKGROUND,
    window: Sequence[float] | None = None,
    max_pixels: int = MAX_PIXELS,
    cache: str | None = None,
    storage: str = "decoded",
) -> ImageData | None:
    """Read one split.

    Parameters
    ----------
    split : str
        Name of the split on the Hub, or in the names of the local files.
    channels, size, background, window, limit, max_pixels, cache, storage
        As in `fedssl.datasets.image_folder.read`.
    path : str or None
        A parquet or arrow file, a folder of them or a pattern such as ``/data/cifar10-*.parquet``; the network is
        not used. None for the Hub.
    hub : str
        Name of the data set on the Hub.
    image : str
        Name of the column of images.
    label : str or None
        Name of the column of labels, see `fedssl.datasets.labels`. None for no labels.
    owner : str or None
        Name of the column with the owner of each image, as an integer or a string. None if unknown.
    test_fraction : float
        Share of every class of labeled local training images, in [0, 1), that is held out if no file belongs to a
        test split; 0 holds nothing out.

    Returns
    -------
    ImageData or None
        None if ``path`` holds no file of this split.
    """
    check_arguments("dataset", test_fraction=test_fraction, storage=storage)
    decoding = Decoding(channels=channels, size=size, background=background, window=window, max_pixels=max_pixels)
    if test_fraction and path is None:
        raise InputError(
            f"dataset.test_fraction={test_fraction} is for local files, but dataset.path is null and data sets of the "
            "Hub have their own splits; give dataset.splits.test=NAME, or dataset.path"
        )
    shared = path is not None and test_fraction > 0 and not has_held_out(path)
    held_out = shared and split_of_word(split) in HELD_OUT
    files = hub_files(hub, split) if path is None else local_files(path, "train" if held_out else split)
    count = sum(num_rows(file) for file in files)
    if not count:
        return None

    data_set = _siblings(files) if path is None else list(listed_files(path))
    labels, classes = read_labels(files, label, data_set=data_set)
    warnings = () if label is None or held_out else missing_labels(labels, files, label, split=split)
    rows = np.arange(count)
    if shared and (held_out or split_of_word(split) == "train"):
        rows = stratified_holdout(labels, fraction=test_fraction)[held_out]
    rows = rows[subsample_indices(len(rows), limit)]
    if not len(rows):
        return None
    owners, owner_names = (None, ()) if owner is None else _owners(files, owner)
    named = [path for file in files for path in image_files(file, image)]
    index = TableIndex(
        name=f"{hub if path is None else Path(path).name}-{split}-{size}px",
        count=len(rows),
        files=[*files, *filter(is_file, named)],
        num_in_files=count,
        decoding=decoding,
        # The rows depend on the labels, whose numbers depend on the names in all files of the data set.
        key={"reader": "hub", "image": image, "rows": identity(rows.tobytes())},
        labels=labels[rows],
        classes=classes,
        owners=None if owners is None else owners[rows],
        owner_names=owner_names,
        warnings=warnings,
        tables=files,
        column=image,
        rows=rows,
        names_files=bool(named),
        row_name=f"of the split {split!r} in {files[0].parent}",
    )
    return read_images(index, cache=cache, storage=storage)


@dataclass(frozen=True, kw_only=True)
class TableIndex(ImageIndex):
    """Images in rows of a column of parquet or arrow files."""

    tables: Sequence[Path]
    column: str
    rows: np.ndarray  # ascending, of all tables one after another
    row_name: str  # of any row, after its number
    names_files: bool  # whether the column names files

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

    def num_bytes(self) -> int:
        return sum(column_bytes(file, self.column) for file in self.tables) * self.count // self.num_in_files


def _siblings(files: Sequence[Path]) -> list[Path]:
    """Return the files of all splits in the Hub's cache, without results of ``datasets``' own operations."""
    return [file for file in sorted(files[0].parent.glob("*.arrow")) if not file.name.startswith("cache-")]


def hub_files(hub: str, split: str) -> list[Path]:
    """Return the arrow files of a split in the Hub's cache; download them if needed."""
    from flwr_datasets import FederatedDataset  # slow import, not needed for local files

    try:
        # Not shuffled, so that rows are in the order of the Hub's files and of a local copy.
        dataset = FederatedDataset(dataset=hub, partitioners={}, shuffle=False).load_split(split)
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
    names, owners = np.unique(values, return_inverse=True)
    return owners, tuple(str(name) for name in names)


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
