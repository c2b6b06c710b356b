"""Data sets of the Hugging Face Hub, through flwr-datasets or from local parquet and arrow files.

Both ways end in files that are read with pyarrow alone: the Hub's data set is a list of arrow files in its cache. The
bytes of an image go straight to the decoder, without a Python object per row.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fedssl.datasets.base import ImageData, stratified_holdout, subsample_indices
from fedssl.datasets.cache import CacheKey, cached
from fedssl.datasets.cache_entry import NewBuffer
from fedssl.datasets.decoding import MAX_PIXELS, decode, unreadable_summary
from fedssl.errors import InputError
from fedssl.untrusted import sanitize

_CLASSES = 2**20  # most that there can be
_BATCH = 256  # images per task of a decoding thread
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|test|valid|validation|unlabeled)(?![a-z])")
_HELD_OUT = ("test", "valid", "validation")  # splits that are not for training


def read(
    split: str,
    *,
    channels: int,
    size: int,
    limit: int | None,
    path: str | None,
    hub: str,
    image: str,
    label: str,
    owner: str | None = None,
    test_fraction: float = 0.0,
    max_pixels: int = MAX_PIXELS,
    cache: str | None = None,
) -> ImageData | None:
    """Read one split.

    Parameters
    ----------
    split : str
        Name of the split on the Hub, or in the names of the local files.
    channels, size : int
        Form of the decoded images.
    limit : int or None
        Use only so many images, always the same ones.
    path : str or None
        A parquet or arrow file, a folder of them or a pattern such as ``/data/cifar10-*.parquet``; no network is
        touched then. None: the Hub.
    hub : str
        Name of the data set on the Hub.
    image, label : str
        Names of the columns.
    owner : str or None
        Name of the column that says who made an image, in whole numbers or words. None: unknown.
    test_fraction : float
        Share of every class of labelled local training images, in [0, 1), that is held out where no file is for the
        test; 0 holds nothing out.
    max_pixels : int
        Most pixels of an image; larger ones are left out like those that cannot be read.
    cache : str or None
        Where decoded images are kept, see `fedssl.datasets.cache`.

    Returns
    -------
    ImageData or None
        None if ``path`` holds no file of this split.

    Raises
    ------
    InputError
        If the files or the Hub cannot be read.
    """
    _check_fraction(test_fraction, path)
    shared = path is not None and test_fraction > 0 and not any(local_files(path, one) for one in _HELD_OUT)
    held_out = shared and split in _HELD_OUT
    files = hub_files(hub, split) if path is None else local_files(path, "train" if held_out else split)
    count = sum(_num_rows(file) for file in files)
    if not count:
        return None

    def make(new_buffer: NewBuffer) -> ImageData | None:
        labels, classes, notices = _labels(files, label)
        rows = np.arange(count)
        if held_out and labels is None:
            return None
        if labels is not None and shared and (held_out or split == "train"):
            rows = stratified_holdout(labels, fraction=test_fraction)[held_out]
        rows = rows[subsample_indices(len(rows), limit)]
        if not len(rows):
            return None
        owners, owner_names = (None, ()) if owner is None else _owners(files, owner)
        buffer = new_buffer((len(rows), channels, size, size))
        unreadable = decode(lambda start: _encoded(files, image, rows[start:]), buffer, max_pixels=max_pixels)
        if unreadable:
            place = f"of the split {split!r} in {files[0].parent}"
            left_out = unreadable_summary(unreadable, lambda position: f"row {rows[position]} {place}", count=len(rows))
            notices, rows = (*notices, left_out), rows[buffer.drop(unreadable)]
        return ImageData(buffer.images, _at(rows, labels), classes, _at(rows, owners), owner_names, notices)

    settings = {"reader": "hub", "split": split, "limit": limit, "channels": channels, "size": size, "image": image}
    cache_key = CacheKey(
        name=f"{hub if path is None else Path(path).name}-{split}-{size}px",
        files=files,
        num_images=count,
        wanted=min(limit or count, round(count * test_fraction) if held_out else count),
        settings=settings
        | {"label": label, "owner": owner, "test_fraction": test_fraction, "held_out": held_out}
        | {"max_pixels": max_pixels},
    )
    return cached(cache, cache_key, make)


def _check_fraction(test_fraction: float, path: str | None) -> None:
    if not 0 <= test_fraction < 1:
        raise InputError(f"dataset.test_fraction={test_fraction} must be at least 0 and below 1; 0 holds nothing out")
    if test_fraction and path is None:
        raise InputError(
            f"dataset.test_fraction={test_fraction} is for local files, but dataset.path is null and data sets of the "
            "Hub have splits of their own; give dataset.splits.test=NAME, or dataset.path"
        )


def local_files(path: str, split: str) -> list[Path]:
    """Files under ``path`` that hold ``split``, sorted; empty if there are none.

    A file belongs to the split that its name, or the name of a folder between ``path`` and it, contains as a word.
    Where no name contains any split, the files are training images.
    """
    root = Path(path).expanduser()
    if root.is_file():
        names = {root: root.name.lower()}
    elif root.is_dir():
        found = [file for file in root.rglob("*") if file.suffix in (".parquet", ".arrow") and file.is_file()]
        names = {file: str(file.relative_to(root)).lower() for file in found}
    else:
        names = {file: file.name.lower() for file in _matching(root)}
    if not names:
        raise InputError(f"dataset.path={path} holds no .parquet or .arrow file; give a file or a folder of them")
    if not any(_SPLIT_WORD.search(name) for name in names.values()):
        return [] if split in _HELD_OUT else sorted(names)
    # The Hub's own file names; a folder of it may hold further splits that begin with the same word (train_0).
    exact = [file for file in names if re.match(rf"{split}-\d+-of-\d+", file.name.lower())]
    word = re.compile(rf"(?<![a-z]){split}(?:ation)?(?![a-z])")
    return sorted(exact or [file for file, name in names.items() if word.search(name)])


def _matching(pattern: Path) -> list[Path]:
    """Files that match ``pattern``; hidden ones, such as another system's notes on a file, only where it says so."""
    try:
        found = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except ValueError:  # no pattern, e.g. *** in some versions of Python
        return []
    return [file for file in found if (pattern.name[0] == "." or file.name[0] != ".") and file.is_file()]


def hub_files(hub: str, split: str) -> list[Path]:
    """Arrow files of a split in the cache of the Hub, after a download if they are not there yet."""
    from flwr_datasets import FederatedDataset  # takes seconds; not needed for local files

    try:
        # Not shuffled, so that the rows are those of the Hub's files and of a local copy.
        dataset = FederatedDataset(dataset=hub, partitioners={}, shuffle=False).load_split(split)
    except Exception as error:  # network, Hub and cache each raise exceptions of their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the split {split!r} of {hub} could not be fetched from the Hugging Face Hub ({reason}); "
            "pass local parquet or arrow files instead: dataset.path=FILE_OR_FOLDER"
        ) from error
    return [Path(file["filename"]) for file in dataset.cache_files]


def _open(file: Path) -> pq.ParquetFile | pa.Table:
    """Open a parquet file, or the table of an arrow file in either format of ``datasets``, memory-mapped."""
    with _reading(file):
        if file.suffix == ".parquet":
            return pq.ParquetFile(file, memory_map=True, pre_buffer=False)  # else it is read as a whole
        source = pa.memory_map(str(file))
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Say in one sentence what keeps a file from being read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = sanitize(" ".join(str(error).split())[:300])
        raise InputError(f"{file} cannot be read ({reason}); give parquet or arrow files in dataset.path") from error


def _num_rows(file: Path) -> int:
    opened = _open(file)
    return int(opened.num_rows if isinstance(opened, pa.Table) else opened.metadata.num_rows)


def _column(file: Path, column: str) -> Iterator[pa.Array]:
    """Yield the values of one column in batches."""
    opened = _open(file)
    if isinstance(opened, pa.Table):
        batches = iter(opened.select([column]).to_batches(max_chunksize=_BATCH))
    else:
        batches = opened.iter_batches(_BATCH, columns=[column])
    while True:
        with _reading(file):  # only now a damaged one shows
            batch = next(batches, None)
        if batch is None:
            return
        yield batch.column(0)


def _schema(file: Path) -> pa.Schema:
    opened = _open(file)
    return opened.schema if isinstance(opened, pa.Table) else opened.schema_arrow


def _values(files: Sequence[Path], column: str) -> list[Any]:
    """Values of one column of all rows."""
    # A list, not pyarrow's conversion to NumPy: that imports pandas, which takes longer than this.
    return [value for file in files for batch in _column(file, column) for value in batch.to_pylist()]


def _labels(files: Sequence[Path], column: str) -> tuple[np.ndarray | None, tuple[str, ...], tuple[str, ...]]:
    """Labels of all rows ``(n,)``, names of the classes, and notices; None without a column or with unknown labels."""
    for file in files:
        schema = _schema(file)
        if column not in schema.names:
            return None, (), (f"{file} has no column {column!r} (it has {schema.names}): used without labels",)
        if not pa.types.is_integer(schema.field(column).type):
            raise InputError(f"dataset.label={column} is of type {schema.field(column).type}; class numbers are needed")
    values = _values(files, column)
    if None in values or min(values) < 0:  # -1 is "unknown", as in the unlabelled split of STL-10
        return None, (), ()
    if max(values) >= _CLASSES:
        raise InputError(f"dataset.label={column} has the class {max(values)}; there can be {_CLASSES}, from 0 on")
    return np.array(values), _class_names(_schema(files[0]), column), ()


def _class_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """Names of the classes where the Hub's notes in a file tell them in its way."""
    try:
        described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = described["info"]["features"][column]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _owners(files: Sequence[Path], column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers of the owners of all rows ``(n,)`` and their names, which are the sorted values of the column."""
    for file in files:
        schema = _schema(file)
        if column not in schema.names:
            raise InputError(
                f"{file} has no column {column!r} (it has {schema.names}); "
                "give the column that says who made an image in dataset.owner, or dataset.owner=null if none does"
            )
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(f"dataset.owner={column} is of type {kind}; whole numbers or words are needed")
    values = _values(files, column)
    if None in values:
        raise InputError(
            f"dataset.owner={column} has no value in {values.count(None)} of {len(values)} rows, first row "
            f"{values.index(None)} of {files[0].parent}; give every image an owner, or dataset.owner=null"
        )
    names, owners = np.unique(values, return_inverse=True)
    return owners, tuple(str(name) for name in names)


def _at(rows: np.ndarray, column: np.ndarray | None) -> torch.Tensor | None:
    return None if column is None else torch.from_numpy(column[rows])


def _encoded(files: Sequence[Path], column: str, rows: np.ndarray) -> Iterator[list[bytes]]:
    """Yield the encoded images at ``rows`` (sorted) in batches."""
    start = 0
    for file in files:
        end = start + _num_rows(file)
        if np.searchsorted(rows, start) == np.searchsorted(rows, end):  # nothing is wanted of it
            start = end
            continue
        schema = _schema(file)
        if column not in schema.names:
            raise InputError(
                f"{file} has no column {column!r} (it has {schema.names}); "
                "give only files of this data set in dataset.path, or its column in dataset.image"
            )
        for batch in _column(file, column):
            wanted = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(batch))] - start
            start += len(batch)
            if len(wanted):
                encoded = (batch.field("bytes") if pa.types.is_struct(batch.type) else batch).to_pylist()
                yield [encoded[row] for row in wanted]
