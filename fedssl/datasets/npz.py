"""Arrays of images in NPZ files of NumPy, such as those of MedMNIST: ``train_images``, ``train_labels``, ...

Images are ``(n, height, width)``, ``(n, height, width, channels)`` or ``(n, channels, height, width)``. Each becomes an
NPY file in memory, which is decoded like an image file.

Several files are one data set if each has one array of images. A file then belongs to the split that its name names,
see `fedssl.datasets.split_files`, and with ``folders=owner`` to one owner.
"""

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
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
from fedssl.datasets.split_files import split_files, split_in
from fedssl.datasets.splits import chosen_parts, split_of
from fedssl.errors import InputError, sanitize, shortened
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.safe_io import open_regular_file

_SHARE = 2  # an array needs at most one part in two of the available memory
_IMAGES, _LABELS = ("images", "image", "x"), ("label", "labels", "y")  # parts of the names of arrays

_Part = tuple[Path, str]  # a file, and the name of an array of images in it


def index_arrays(source: Source, query: Query) -> "ArrayIndex | None":
    """Return the images of one or several files; None if there are none of the split."""
    files = dict(sorted(source.files.items()))
    listed = [(file, array) for file, name in files.items() for array in _image_arrays(source, file, name, query)]
    chosen, shared = _of_split(source, listed, query)
    if not chosen:
        return None
    counts = {part: _count(part, query.decoding.channels) for part in chosen}
    numbers = list(counts.values())
    labels, classes, warnings = _labels(query, listed, counts)
    owners, groups = (_values(counts, column) for column in (query.owner, query.group))
    if query.owner is None and len(files) > 1 and query.folders.startswith("owner"):
        owners = [np.full(count, file.stem) for (file, _), count in counts.items()]
    names = [name for _, name in chosen]
    return _NpzIndex(
        name=query.name,
        count=sum(numbers),
        decoding=query.decoding,
        files=[file for file, _ in chosen],
        num_in_files=sum(numbers),
        key={"reader": "npz", "image": names if len(files) > 1 else names[0]},
        images=ArrayImages(
            chosen,
            np.repeat(np.arange(len(chosen)), numbers),
            np.concatenate([np.arange(number) for number in numbers]),
            read_array=cache(partial(_read, chosen, query.decoding.channels)),
        ),
        labels=labels,
        classes=classes,
        warnings=warnings,
        shared=shared,
        **_numbered("owner", owners),
        **_numbered("group", groups),
    )


def _image_arrays(source: Source, file: Path, name: str, query: Query) -> list[str]:
    """Return the arrays of images of a file; of several files each must have one, of the split in the file's name."""
    with _opened(file) as archive:
        names = _array_names(archive, _IMAGES if query.image is None else (query.image,), file=file)
        source.log(f"arrays {shortened(archive.files)}")
    number, of_file = len(source.listing.paths), split_in(name)
    if number > 1 and (len(names) > 1 or (split_of(names[0]) or of_file) != of_file):
        raise InputError(
            f"{source.path} holds {number} NPZ files, and {file.name} has {shortened(names)}; give "
            "one of these files, or write one array of images to each, and its split into the name of the file"
        )
    return names


def _of_split(source: Source, listed: Sequence[_Part], query: Query) -> tuple[list[_Part], bool]:
    """Return the arrays of the images of a split, and whether a test share of them is held out."""
    if len(source.listing.paths) > 1:
        files, shared = split_files(source, query)
        return [part for part in listed if part[0] in {*files}], shared
    names = {part: part[1] for part in listed}
    kinds = {part: split_of(name) for part, name in names.items()}
    chosen, shared = chosen_parts(names, kinds, split=query.split, fraction=query.test_fraction)
    if len(chosen) > 1:
        found = sanitize(", ".join(names[part] for part in chosen))
        raise InputError(f"{chosen[0][0]} has several arrays of the split {query.split!r}: {found}; keep one")
    return chosen, shared


def _values(counts: Mapping[_Part, int], column: str | None) -> list[np.ndarray] | None:
    """Return the owners or the groups of the images of each part; None without a column."""
    if column is None:
        return None
    found = []
    for (file, images), count in counts.items():
        values = _column(file, column, images)
        if values is None or values.ndim == 0 or values.size != count or values.dtype.kind not in "iuUS":
            raise InputError(f"{file}: {column} has no text or integer for each of the {count} images; correct it")
        found.append(values.reshape(-1))
    return found


def _numbered(what: str, values: Sequence[np.ndarray] | None) -> dict[str, Any]:
    """Return the numbers of owners or groups, and their names, as fields of an index."""
    if values is None:
        return {}
    together = values[0] if len(values) == 1 else np.concatenate([part.astype(str) for part in values])
    names, numbers = np.unique(together, return_inverse=True)
    return {f"{what}s": numbers, f"{what}_names": tuple(map(str, names.tolist()))}


class ArrayIndex(SequenceIndex):
    """Images of arrays."""

    images: "ArrayImages"

    def places(self, rows: np.ndarray) -> list[Place]:
        return [Place(file, f"{name}, {row}") for file, name, row in map(self.images.place, rows)]


class _NpzIndex(ArrayIndex):
    def values(self, name: str) -> Sequence[Any]:
        columns: dict[_Part, np.ndarray | None] = {}
        values = []
        for file, images, row in map(self.images.place, range(self.count)):
            if (file, images) not in columns:
                columns[file, images] = _column(file, name, images)
            column = columns[file, images]
            if column is None or row >= len(column):
                raise InputError(f"{file} has no array {name!r} for each of {images}; name another one")
            values.append(column[row])
        return values


class ArrayImages(RecordSequence):
    """Rows of arrays, as NPY files; an array is read when it is used.

    ``arrays`` are files with the names of arrays in them; ``numbers`` and ``rows``, ``(n,)``, are the indices of each
    image's array among these and of its row. ``read_array`` returns the array ``(n, height, width, channels)`` of a
    number, and keeps it.
    """

    def __init__(
        self,
        arrays: Sequence[_Part],
        numbers: np.ndarray,
        rows: np.ndarray,
        *,
        read_array: Callable[[int], np.ndarray],
    ) -> None:
        self.arrays, self._numbers, self._rows, self._read_array = arrays, numbers, rows, read_array

    def at(self, rows: np.ndarray) -> "ArrayImages":
        return ArrayImages(self.arrays, self._numbers[rows], self._rows[rows], read_array=self._read_array)

    def place(self, index: int) -> tuple[Path, str, int]:
        """Return the file, the name of the array and the row of an image."""
        return *self.arrays[self._numbers[index]], int(self._rows[index])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        """Return a row as an NPY file."""
        return npy_bytes(self._read_array(int(self._numbers[index]))[self._rows[index]])


def _read(parts: Sequence[_Part], channels: int, number: int) -> np.ndarray:
    file, name = parts[number]
    with _opened(file) as archive:
        return image_stack(_load(archive, name, file=file), channels)


def _column(file: Path, name: str, images: str) -> np.ndarray | None:
    """Return an array of further values of the ``images`` of a file; None if their split has none."""
    with _opened(file) as archive:
        names = _array_names(archive, (name,), file=file)
        chosen = _matching(images, names, file=file)
        return None if chosen is None else _load(archive, chosen, file=file)


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


def _matching(images: str, names: Sequence[str], *, file: Path) -> str | None:
    """Return the array of the split of some images; None if only other splits have one."""
    kinds = {name: split_of(name) for name in names}
    kind = split_of(images)
    found = [name for name in names if kinds[name] == kind]
    found = found or [name for name in names if {kinds[name], kind} == {None, "train"}]
    if len(found) > 1:
        raise InputError(f"{file} has several arrays for {images}: {sanitize(', '.join(found))}; keep one")
    return found[0] if found else None


def _header(archive: NpzFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of an array."""
    assert archive.zip is not None  # it is open
    with archive.zip.open(f"{name}.npy") as stream:
        shape, _, dtype = read_header(stream)
    return shape, dtype


def _load(archive: NpzFile, name: str, *, file: Path) -> np.ndarray:
    """Read an array that fits into the memory; its header is read first."""
    shape, dtype = _header(archive, name)
    if dtype.hasobject:
        raise InputError(f"{file}: {name} holds Python objects, which are not loaded; save it with {name}.astype(str)")
    needed, free = dtype.itemsize * int(np.prod(shape, dtype=object)), available_memory()
    if free is not None and _SHARE * needed > free:
        raise InputError(
            f"{file}: {name} needs {gigabytes(needed)} of memory, more than half of the available {gigabytes(free)}; "
            "use smaller images, or save them as files and use dataset=folder"
        )
    array: np.ndarray = archive[name]
    return array


def _count(part: _Part, channels: int) -> int:
    """Return the number of images of an array; `InputError` if it has none."""
    file, name = part
    with _opened(file) as archive:
        shape, dtype = _header(archive, name)
    if len(shape) not in (3, 4) or dtype.kind not in "biuf":
        raise InputError(
            f"{file}: {name} has shape {shape} and dtype {dtype}; images are numbers (n, height, width), or with "
            "channels in front of or behind the height and width"
        )
    try:
        image_stack(np.broadcast_to(np.zeros((), dtype), shape), channels)
    except ValueError as error:
        raise InputError(f"{file}: {name}: {error}") from error
    return shape[0]


def image_stack(array: np.ndarray, channels: int) -> np.ndarray:
    """Return images as ``(n, height, width, channels)``; those of three axes are gray."""
    return as_images(array[..., None] if array.ndim == 3 else array, channels)


def _labels(
    query: Query, listed: Sequence[_Part], counts: Mapping[_Part, int]
) -> tuple[np.ndarray | None, tuple[str, ...], tuple[str, ...]]:
    """Return the labels of the images of some parts, None if they have none, the classes of all, and warnings."""
    if query.label is None:
        return None, (), ()
    columns = {}
    parts = (query.label, *(() if query.image is not None else _LABELS))
    for file, images in listed:
        with _opened(file) as archive:
            names = _array_names(archive, parts, file=file, required=query.image is not None)
            name = _matching(images, names, file=file)
            if name is None:
                continue
            array = _load(archive, name, file=file)
        array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        number = counts.get((file, images))  # None of another split
        if array.ndim != 1 or number not in (None, len(array)):
            part = max((part for part in parts if part in name), key=len, default=name)
            several = "set dataset.label=null for several labels, which evaluation=multi_label "
            several += f"evaluation.columns=[{part}] uses"
            raise InputError(
                f"{file}: {name} has shape {array.shape}, but {number or 'its'} images have one class each; "
                f"{several if array.ndim > 1 else 'correct it, or set dataset.label=null'}"
            )
        try:
            column = pa.array(array.astype(array.dtype.newbyteorder("=")))
        except pa.ArrowException as error:
            raise InputError(f"{file}: {name} has dtype {array.dtype}; labels are integers or text") from error
        columns[file, images] = label_column(f"{file}: {name}", query.label, column)
    by_part, classes = joined(columns, query.label)
    labels = {part: by_part.get(part, np.full(count, NO_LABEL)) for part, count in counts.items()}
    warnings = list[str]()
    for (file, name), found in labels.items():
        missing = int((found == NO_LABEL).sum())
        if (file, name) not in by_part:
            warnings.append(f"{file}: {name} has no labels; set dataset.label to a part of their name")
        elif missing:
            warnings.append(f"{file}: {missing:,} of the {len(found):,} {name} have no label")
    together = np.concatenate(list(labels.values()))
    is_labeled = bool((together != NO_LABEL).any())
    return together if is_labeled else None, classes if is_labeled else (), tuple(warnings)
