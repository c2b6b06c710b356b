"""Encoded images of a split, in order, with their labels and owners: what the reader of a format finds."""

import math
import os
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple, Self

import numpy as np

from fedssl.datasets.decoding import Bands, Decoding, Encoded, Page, Shape
from fedssl.datasets.formats import is_zarr
from fedssl.datasets.sample_checks import SAMPLE
from fedssl.digests import identity, new_identity
from fedssl.errors import InputError, sanitize
from fedssl.machine.process import max_open_files
from fedssl.safe_io import FilePath

_MAX_LISTED = 5  # images listed in a warning
_READ_FILES, _READ_BYTES = 256, 4096  # of `describe_files`, at three places of each file
FOLDER = "folder"  # value of dataset.group: the folder of a file is its group
_OPEN_SHARE = 0.5  # of the files that this process may open: those with images that stay open
_open_descriptors = set[int]()
BATCH = 16  # images per task of a decoding thread; small, since images may be large


def _parts(file: Path, size: int) -> bytes:
    """Return the start, middle and end of a file; empty if it cannot be read."""
    with suppress(OSError), file.open("rb") as stream:
        return b"".join(os.pread(stream.fileno(), _READ_BYTES, at) for at in (0, size // 2, max(size - _READ_BYTES, 0)))
    return b""


class Place(NamedTuple):
    """The file of an image, and its part: the number of a page or a row, or the key of a sample; empty for the file."""

    file: FilePath  # the folder of an image whose bands are files
    part: str = ""

    @property
    def name(self) -> str:
        """Return the path of the file, with the part in brackets."""
        return f"{self.file}[{self.part}]" if self.part else str(self.file)


def columns_at(images: Any, rows: Any) -> dict[str, Any]:
    """Return the values at ``rows`` of the columns that images have, by name; None for those that they lack."""
    columns = {name: vars(images)[name] for name in ("labels", "owners", "groups") if name in vars(images)}
    return {name: None if column is None else column[rows] for name, column in columns.items()}


@dataclass(frozen=True, kw_only=True)
class Query:
    """The images to read; see `fedssl.datasets.folder.read`."""

    split: str
    name: str  # of the images in a cache
    decoding: Decoding
    image: str | None = None
    label: str | None
    owner: str | None = None
    group: str | None = None
    split_column: str | None = None
    skip_missing: bool
    folders: str
    split_folders: bool | str
    test_fraction: float
    pages: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ImageIndex(ABC):
    """Encoded images of a split; see `fedssl.datasets.base.ImageData` for the fields from ``labels`` on."""

    name: str  # readable part of the name of their folder in a cache
    count: int  # number of the images
    decoding: Decoding
    files: Sequence[FilePath]  # files with the encoded images
    num_in_files: int  # number of images in the files
    key: Mapping[str, Any]  # what else the pixels depend on, as JSON values
    labels: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()  # ``group_names[group]``
    warnings: tuple[str, ...] = ()
    shared: bool = False  # whether the test is a share of the images of this index

    def at(self, rows: np.ndarray) -> Self:
        """Return the index of the images at ``rows``."""
        return replace(self, count=len(rows), **columns_at(self, rows))

    @property
    def present_groups(self) -> set[str]:
        """Names of the groups of the images."""
        return set() if self.groups is None else {self.group_names[group] for group in np.unique(self.groups)}

    @property
    def shape(self) -> Shape:
        return self.count, self.decoding.channels, self.decoding.size, self.decoding.size

    @property
    def num_pixel_bytes(self) -> int:
        """Size of the decoded images, whose dtype is known."""
        return math.prod(self.shape) * np.dtype(self.decoding.pixel_dtype).itemsize

    def describe_files(self) -> str:
        """Return number, size and a digest of the files, which are equal in a copy elsewhere.

        The digest is of all names and sizes, and of parts of the content of at most 256 files.
        """
        hashed, num_bytes = new_identity(), 0
        step = -(-len(self.files) // _READ_FILES)
        for number, file in enumerate(map(Path, self.files)):
            status = file.stat()
            size = status.st_size if S_ISREG(status.st_mode) else 0  # that of a folder depends on the file system
            hashed.update(f"{file.name}\0{size}\n".encode(errors="surrogateescape"))
            if number % step == 0:
                hashed.update(_parts(file, size))
            num_bytes += size
        return f"{len(self.files):,} files, {num_bytes:,} bytes, digest {hashed.hexdigest()[:16]}"

    @abstractmethod
    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        """Yield the images from index ``start`` on, as tasks of a decoding thread."""

    @abstractmethod
    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        """Return some of the images, given the indices of those that can be read."""

    def image_name(self, index: int) -> str:
        """Return the name of an image."""
        return self.places(np.array([index]))[0].name

    @abstractmethod
    def places(self, rows: np.ndarray) -> list[Place]:
        """Return where the images at ascending ``rows`` are."""

    @abstractmethod
    def records(self) -> Sequence[Encoded] | None:
        """Return the images where they are; None if they must be copied to be found again."""

    def values(self, name: str) -> Sequence[Any]:
        """Return a further value of every image, such as its targets; `InputError` if the source has no such values."""
        raise InputError(f"{self.name} has no column {name!r}, because its images are files; give a CSV file")

    def num_bytes(self) -> int:
        """Return the approximate size of a copy of the images."""
        return 0

    def unreadable_warnings(self, unreadable: Mapping[int, str]) -> tuple[str, ...]:
        """Return one warning about unreadable images, by index with their reasons; empty if there are none.

        Raise an `InputError` if all images are unreadable.
        """
        if not unreadable:
            return ()
        indices = defaultdict[str, list[int]](list)  # by reason, which is often the same
        for index, reason in islice(unreadable.items(), _MAX_LISTED):
            indices[reason].append(index)
        listed = "; ".join(f"{', '.join(map(self.image_name, rows))} ({reason})" for reason, rows in indices.items())
        listed += f"; and {len(unreadable) - _MAX_LISTED} more" if len(unreadable) > _MAX_LISTED else ""
        if len(unreadable) == self.count:
            raise InputError(f"none of the {self.count} images can be read: {listed}; check dataset.path")
        return (sanitize(f"{len(unreadable)} of {self.count} images cannot be read, the rest is used: {listed}"),)


class RecordSequence(Sequence[bytes], ABC):
    """Encoded images that are read when they are used."""

    @abstractmethod
    def at(self, rows: np.ndarray) -> "RecordSequence":
        """Return the images at ``rows``."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Read an encoded image."""

    def __getitem__(self, index: Any) -> Any:
        return [self.read(row) for row in range(len(self))[index]] if isinstance(index, slice) else self.read(index)


class OpenFiles:
    """Files that stay open, so that a replaced file does not change what is read.

    Those beyond `_OPEN_SHARE` of what this process may open are opened for each read, with an error if they were
    changed. Reading, in place of a mapping, returns an error where a mapped file that was cut would end the process.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors)
        for _, file in zip(range(int(_OPEN_SHARE * max_open_files()) - len(_open_descriptors)), files, strict=False):
            self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            _open_descriptors.add(self._descriptors[-1])
        self._stamps = [_stamp(file.stat()) for file in files[len(self._descriptors) :]]

    def read(self, number: int, length: int, offset: int) -> bytes:
        """Read bytes of a file; an OSError if it has been cut, or changed since it was closed."""
        closed = number - len(self._descriptors)
        if closed < 0:
            content = os.pread(self._descriptors[number], length, offset)
        else:
            with self._files[number].open("rb", buffering=0) as stream:
                if _stamp(os.fstat(stream.fileno())) != self._stamps[closed]:
                    raise OSError(0, f"{self._files[number].name} has been changed")
                content = os.pread(stream.fileno(), length, offset)
        if len(content) != length:
            raise OSError(0, f"{self._files[number].name} has been cut")
        return content


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        _open_descriptors.discard(descriptor)
        os.close(descriptor)


class FileRecords(RecordSequence):
    """Byte strings in files, read when they are used.

    ``file_numbers``, ``offsets`` and ``lengths``, ``(n,)``, are the index of each record's file, its first byte and its
    number of bytes.
    """

    def __init__(self, files: OpenFiles, file_numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self._files, self._file_numbers, self._offsets, self._lengths = files, file_numbers, offsets, lengths

    def at(self, rows: np.ndarray) -> "FileRecords":
        return FileRecords(self._files, self._file_numbers[rows], self._offsets[rows], self._lengths[rows])

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> bytes:
        """Read an encoded image; an OSError if its file has been cut."""
        return self._files.read(int(self._file_numbers[index]), int(self._lengths[index]), int(self._offsets[index]))


@dataclass(frozen=True, kw_only=True)
class SequenceIndex(ImageIndex):
    """Images in their own files, or records of other files."""

    images: Sequence[Encoded]  # files, or a `RecordSequence`

    def at(self, rows: np.ndarray) -> Self:
        if isinstance(self.images, RecordSequence):
            chosen = identity(str(self.key.get("rows")).encode() + rows.tobytes())
            return replace(super().at(rows), images=self.images.at(rows), key={**self.key, "rows": chosen})
        images = [self.images[row] for row in rows]
        return replace(super().at(rows), files=images, num_in_files=len(rows), images=images)

    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        return (self.images[first : first + BATCH] for first in range(start, self.count, BATCH))

    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        return self.images[:: math.ceil(self.count / SAMPLE)]

    def places(self, rows: np.ndarray) -> list[Place]:
        return [_place_of(self.images[row]) for row in rows]

    def records(self) -> Sequence[Encoded]:
        return self.images


def _place_of(source: Encoded) -> Place:
    if isinstance(source, Page):
        return Place(source.file, str(source.number))
    return Place(str(Path(source.files[0]).parent) if isinstance(source, Bands) else str(source))


def grouped_by_folder(files: Sequence[FilePath], root: Path) -> dict[str, Any]:
    """Return the groups of files by their folders below ``root``, with their names."""
    folders = [os.path.relpath(Path(file).parent, root) for file in files]
    names, groups = np.unique(folders, return_inverse=True)
    return {"groups": groups, "group_names": tuple(names.tolist())}


def file_line(file: FilePath) -> tuple[bytes, int]:
    """Return a file's name, size and modification time, by which changes are detected, and its size."""
    parts = [Path(file).stat(), *(part.lstat() for part in (Path(file).rglob("*") if is_zarr(file) else ()))]
    size = sum(part.st_size for part in parts)
    line = f"{file}\0{size}\0{max(part.st_mtime_ns for part in parts)}\n"
    return line.encode(errors="surrogateescape"), size
