"""Arrays of images in an NPZ file of NumPy, such as those of MedMNIST: ``train_images``, ``train_labels``, ...

Images are ``(n, height, width)``, ``(n, height, width, channels)`` or ``(n, channels, height, width)``. Each becomes an
NPY file in memory, which is decoded like an image file.
"""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.npyio import NpzFile

from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.image_index import Place, Query, RecordSequence, SequenceIndex
from fedssl.datasets.labels import joined, label_column
from fedssl.datasets.npy import as_images, npy_bytes, read_header
from fedssl.datasets.sources import Source
from fedssl.datasets.split_files import split_in
from fedssl.datasets.splits import HELD_OUT, is_held_out_of, matching, split_of, split_of_word
from fedssl.errors import InputError, sanitize, shortened
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.safe_io import open_regular_file

_SHARE = 2  # an array needs at most one part in two of the available memory
_IMAGES, _LABELS = ("images", "image", "x"), ("label", "labels", "y")  # parts of the names of arrays


def index_file(source: Source, file: Path, query: Query, *, is_alone: bool = True) -> "ArrayIndex | None":
    """Return the images of a file; None if it has none of the split. One of several files has those of one split."""
    with _opened(file) as archive:
        names = _array_names(archive, _IMAGES if query.image is None else (query.image,), file=file)
        if not is_alone:
            query = replace(query, split=_only_split(source, file, names), test_fraction=0.0)
        shared = query.test_fraction > 0 and not any(split_of(name) in HELD_OUT for name in names)
        split = "train" if shared and split_of_word(query.split) in HELD_OUT else query.split
        source.log(f"arrays {shortened(archive.files)}")
        name = _of_split(split, names, file=file)
        if name is None:
            return None
        split = split_of(name) or split  # of its labels
        train = matching("train", names) or [name for name in names if not any(map(split_of, names))]
        shared = shared and is_held_out_of([name], train, split=query.split, fraction=query.test_fraction)
        shape, dtype = _header(archive, name)
        _check_pixels(shape, dtype, query.decoding.channels, f"{file}: {name}")
        labels, classes = _labels(archive, query, split, shape[0], file=file)
        owners, owner_names = _numbered(archive, query.owner, split, shape[0], file=file)
        groups, group_names = _numbered(archive, query.group, split, shape[0], file=file)
    if query.owner is None and not is_alone and query.folders.startswith("owner"):
        owners, owner_names = np.zeros(shape[0], np.int64), (file.stem,)
    missing = 0 if labels is None else int((labels == NO_LABEL).sum())
    warnings = (f"{file}: {missing:,} of the {shape[0]:,} {name} have no label",) if missing else ()
    if query.label is not None and labels is None:
        warnings = (f"{file}: {name} has no labels; set dataset.label to a part of their name",)
    return ArrayIndex(
        name=query.name,
        count=shape[0],
        decoding=query.decoding,
        files=[file],
        num_in_files=shape[0],
        key={"reader": "npz", "image": name},
        images=ArrayImages(
            [(file, name)], np.zeros(shape[0], np.int64), np.arange(shape[0]), channels=query.decoding.channels
        ),
        labels=labels,
        classes=classes,
        owners=owners,
        owner_names=owner_names,
        groups=groups,
        group_names=group_names,
        warnings=warnings,
        shared=shared,
    )


def _only_split(source: Source, file: Path, names: Sequence[str]) -> str:
    """Return the split of the only array of images of one of several files; `InputError` if its name has another."""
    of_name, of_file = split_of(names[0]), split_in(source.files[file])
    if len(names) > 1 or (of_name or of_file) != of_file:
        raise InputError(
            f"{source.path} holds {len(source.files)} NPZ files, and {file.name} has {shortened(names)}; give "
            "one of these files, or write one array of images to each, and its split into the name of the file"
        )
    return of_name or "train"


def _numbered(
    archive: NpzFile, column: str | None, split: str, number: int, *, file: Path
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the number of the owner or group of each image of a split, and their names; None without a column."""
    if column is None:
        return None, ()
    name = _of_split(split, _array_names(archive, (column,), file=file), file=file)
    values = None if name is None else _load(archive, name, file=file)
    if values is None or values.ndim == 0 or values.size != number or values.dtype.kind not in "iuUS":
        raise InputError(f"{file}: {name or column} has no text or integer for each of the {number} images; correct it")
    found, numbers = np.unique(values.reshape(-1), return_inverse=True)
    return numbers, tuple(map(str, found.tolist()))


class ArrayIndex(SequenceIndex):
    """Images of arrays."""

    images: "ArrayImages"

    def places(self, rows: np.ndarray) -> list[Place]:
        return [Place(file, f"{name}, {row}") for file, name, row in map(self.images.place, rows)]

    def values(self, name: str) -> Sequence[Any]:
        columns: dict[tuple[Path, str], np.ndarray] = {}
        values = []
        for file, images, row in map(self.images.place, range(self.count)):
            if (file, images) not in columns:
                columns[file, images] = _column(file, name, images)
            if row >= len(columns[file, images]):
                raise InputError(f"{file} has no array {name!r} for each of {images}; name another one")
            values.append(columns[file, images][row])
        return values


class ArrayImages(RecordSequence):
    """Rows of arrays, as NPY files; an array is read when it is used.

    ``arrays`` are files with the names of arrays in them; ``numbers`` and ``rows``, ``(n,)``, are the indices of each
    image's array among these and of its row.
    """

    def __init__(
        self, arrays: Sequence[tuple[Path, str]], numbers: np.ndarray, rows: np.ndarray, *, channels: int
    ) -> None:
        self.arrays, self._numbers, self._rows, self._channels = arrays, numbers, rows, channels
        self._array = cache(self._read_array)

    def at(self, rows: np.ndarray) -> "ArrayImages":
        return ArrayImages(self.arrays, self._numbers[rows], self._rows[rows], channels=self._channels)

    def place(self, index: int) -> tuple[Path, str, int]:
        """Return the file, the name of the array and the row of an image."""
        return *self.arrays[self._numbers[index]], int(self._rows[index])

    def _read_array(self, number: int) -> np.ndarray:
        file, name = self.arrays[number]
        with _opened(file) as archive:
            return _stack(_load(archive, name, file=file), self._channels)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        """Return a row as an NPY file."""
        return npy_bytes(self._array(int(self._numbers[index]))[self._rows[index]])


def _column(file: Path, name: str, images: str) -> np.ndarray:
    """Return an array of further values of the ``images`` of a file; empty if their split has none."""
    split = split_of(images)
    with _opened(file) as archive:
        names = _array_names(archive, (name,), file=file)
        chosen = _of_split(split, names, file=file) if split else names[0]
        return np.empty(0) if chosen is None else _load(archive, chosen, file=file)


@contextmanager
def _opened(file: Path) -> Iterator[NpzFile]:
    """Open a file; errors of a damaged one, also inside the block, become an `InputError`.

    Encrypted members raise a RuntimeError, unknown compressions a NotImplementedError.
    """
    try:
        with open_regular_file(file) as stream, zipfile.ZipFile(stream):
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                yield archive
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        reason = sanitize((error.strerror if isinstance(error, OSError) else None) or error)[:200]
        raise InputError(f"{file} cannot be read as NPZ ({reason}); check the path, or download it again") from error


def _array_names(archive: NpzFile, parts: Sequence[str], *, file: Path, required: bool = True) -> list[str]:
    """Return the arrays with one of these parts in their names, that of the first part with any."""
    found_names = (
        [name for name in archive.files if part.lower() in (lower := name.lower(), *lower.split("_"))] for part in parts
    )
    names: list[str] = next(filter(None, found_names), [])
    if not names and required:
        part = parts[0]
        found = sanitize(", ".join(archive.files[:20]))
        raise InputError(
            f"{file} has no array whose name contains {part!r} (it has {found}); set dataset.image and dataset.label "
            "(owner, group) to a part of their names, e.g. dataset.image=x for x_train, or dataset.label=null"
        )
    return names


def _of_split(split: str, names: Sequence[str], *, file: Path) -> str | None:
    """Return the array of a split; None if only other splits have one."""
    chosen = matching(split, names) or (matching("validation", names) if split == "test" else [])
    if split_of_word(split) == "train" and not any(map(split_of, names)):
        chosen = list(names)
    if len(chosen) > 1:
        raise InputError(f"{file} has several arrays of the split {split!r}: {sanitize(', '.join(chosen))}; keep one")
    return chosen[0] if chosen else None


def _header(archive: NpzFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of an array."""
    assert archive.zip is not None  # it is open
    with archive.zip.open(f"{name}.npy") as stream:
        shape, _, dtype = read_header(stream)
    return shape, dtype


def _load(archive: NpzFile, name: str, *, file: Path) -> np.ndarray:
    """Read an array that fits into the memory; its header is read first."""
    shape, dtype = _header(archive, name)
    needed, free = dtype.itemsize * int(np.prod(shape, dtype=object)), available_memory()
    if free is not None and _SHARE * needed > free:
        raise InputError(
            f"{file}: {name} needs {gigabytes(needed)} of memory, more than half of the available {gigabytes(free)}; "
            "use smaller images, or save them as files and use dataset=folder"
        )
    array: np.ndarray = archive[name]
    return array


def _check_pixels(shape: tuple[int, ...], dtype: np.dtype, channels: int, name: str) -> None:
    """Raise an `InputError` unless an array has images."""
    if len(shape) not in (3, 4) or dtype.kind not in "biuf":
        raise InputError(
            f"{name} has shape {shape} and dtype {dtype}; images are numbers (n, height, width), or with channels "
            "in front of or behind the height and width"
        )
    try:
        _stack(np.broadcast_to(np.zeros((), dtype), shape), channels)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error


def _stack(array: np.ndarray, channels: int) -> np.ndarray:
    """Return images as ``(n, height, width, channels)``; those of three axes are gray."""
    return as_images(array[..., None] if array.ndim == 3 else array, channels)


def _labels(
    archive: NpzFile, query: Query, split: str, number: int, *, file: Path
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the labels of the ``number`` images of a split, None if it has none, and the classes of all splits."""
    if query.label is None:
        return None, ()
    is_explicit = query.image is not None
    names = _array_names(archive, (query.label, *(() if is_explicit else _LABELS)), file=file, required=is_explicit)
    chosen = _of_split(split, names, file=file)
    if chosen is None:
        return None, ()
    columns = {}
    for name in (name for name in names if name == chosen or split_of(name)):
        array = _load(archive, name, file=file)
        array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        if array.ndim != 1 or (name == chosen and len(array) != number):
            several = "set dataset.label=null for several labels, which evaluation=multi_label "
            several += "evaluation.columns=[labels] uses"
            raise InputError(
                f"{file}: {name} has shape {array.shape}, but {number} images have one class each; "
                f"{several if array.ndim > 1 else 'correct it, or set dataset.label=null'}"
            )
        columns[name] = label_column(f"{file}: {name}", query.label, pa.array(array))
    labels, classes = joined(columns, query.label)
    return labels[chosen], classes
