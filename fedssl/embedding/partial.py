"""Features of an unfinished file, beside it in the folder ``.NAME.partial``, from which the next process continues."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.atomic_files import make_subfolder, write_text
from fedssl.embedding.image_list import Block
from fedssl.errors import InputError
from fedssl.locks import lock

_NOTE_SECONDS = 10.0  # between two notes


class Partial:
    """The features of the readable images up to row ``done``, float32, and the unreadable images."""

    def __init__(self, folder: Path, about: Mapping[str, Any], dimension: int) -> None:
        self._folder, self._about, self.dimension = folder, dict(about), dimension
        self.done, self.unreadable, self.is_changed = 0, dict[int, str](), False
        self._load()
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._stream = os.fdopen(descriptor, "r+b")
        if self._stream.seek(0, os.SEEK_END) < self._num_bytes:  # the note is of another file
            self.done, self.unreadable = 0, {}
        self.rewind(self.done)
        self._noted = time.monotonic()

    @property
    def file(self) -> Path:
        """The file of the features."""
        return self._folder / "features"

    @property
    def count(self) -> int:
        """Number of the features."""
        return self.done - len(self.unreadable)

    @property
    def _num_bytes(self) -> int:
        return 4 * self.dimension * self.count

    def _load(self) -> None:
        """Read the note, unless it is damaged or about other images, settings or another encoder."""
        try:
            note = json.loads((self._folder / "note.json").read_text(encoding="utf-8"))
            done, unreadable = int(note["done"]), {int(row): str(why) for row, why in note["unreadable"].items()}
        except Exception:  # a missing or damaged file can raise any exception
            return
        self.is_changed = note.get("about") != self._about
        if not self.is_changed:
            self.done, self.unreadable = done, unreadable

    def rewind(self, row: int) -> None:
        """Drop the features from a row on."""
        self.done, self.unreadable = row, {bad: why for bad, why in self.unreadable.items() if bad < row}
        self._stream.truncate(self._num_bytes)
        self._stream.seek(self._num_bytes)

    def add(self, block: Block, features: np.ndarray) -> None:
        """Add the features of the next images."""
        self._stream.write(features.astype("<f4", copy=False).data)
        self.done = block.end
        self.unreadable |= block.unreadable
        if time.monotonic() - self._noted > _NOTE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the note; the features that it counts are on the disk before."""
        self._stream.flush()
        os.fsync(self._stream)
        note = {"about": self._about, "done": self.done, "unreadable": self.unreadable}
        write_text(self._folder / "note.json", json.dumps(note))
        self._noted = time.monotonic()

    def close(self) -> None:
        """Write the note if the disk allows it, and close the file."""
        with suppress(OSError):
            self.save()
        with suppress(OSError):
            self._stream.close()

    def chunks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows and the features of all readable images, at most ``size`` at a time."""
        unreadable = np.array(sorted(self.unreadable), dtype=np.int64)
        with self.file.open("rb") as stream:
            for start in range(0, self.done, size):
                rows = np.setdiff1d(np.arange(start, min(start + size, self.done)), unreadable, assume_unique=True)
                features = np.fromfile(stream, "<f4", count=len(rows) * self.dimension)
                yield rows, features.reshape(len(rows), self.dimension)


@contextmanager
def open_partial(out: Path, about: Mapping[str, Any], dimension: int) -> Iterator[Partial]:
    """Open what an earlier process has computed for the file ``out``, and lock it; raise an `InputError` if it is."""
    folder = make_subfolder(out.parent, _folder(out).name)
    with (folder / "lock").open("w") as stream:
        if not lock(stream.fileno()):
            raise InputError(f"another process writes out={out}; wait for it, or choose another file")
        partial = Partial(folder, about, dimension)
        try:
            yield partial
        finally:
            partial.close()
            if not partial.count:
                remove_partial(out)


def partial_bytes(out: Path) -> int:
    """Return the size of what an earlier process has computed for a file."""
    file = _folder(out) / "features"
    return file.stat().st_size if file.is_file() else 0


def names_marker(out: Path) -> Path:
    """Return the file that exists from when the names of ``out`` are written until ``out`` is complete."""
    return _folder(out) / "names"


def _folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def remove_partial(out: Path) -> None:
    """Remove what is left of an unfinished file."""
    shutil.rmtree(_folder(out), ignore_errors=True)
