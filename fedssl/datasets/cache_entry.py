"""Folder of one data set in the cache: its lock, its progress and the description of its content."""

import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedssl.atomic_files import write_text
from fedssl.datasets.buffers import StoredBuffer
from fedssl.datasets.decode_buffer import DECODE_LOG_INTERVAL, DecodeBuffer
from fedssl.datasets.decoding import Shape
from fedssl.datasets.images import ImageSource
from fedssl.errors import InputError
from fedssl.locks import lock
from fedssl.tensor_file import read_arrays, write_arrays

_LOCK_POLL_SECONDS = 0.2

log = logging.getLogger("fedssl")


def cache_error(folder: Path, error: OSError) -> InputError:
    """Make the error for a folder that cannot be written."""
    return InputError(
        f"{folder} cannot be written ({error.strerror or error}); set dataset.cache=FOLDER, or "
        "decode into memory with dataset.cache=null"
    )


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of the file system into an `InputError`."""
    try:
        yield
    except OSError as error:
        raise cache_error(folder, error) from error


def stamp(file: Path) -> list[int]:
    """Return size and modification time, which change with the content."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


class CacheEntry(ABC):
    """Folder with the images of one data set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about, self.partial, self.note = folder / "about.npz", folder / "partial", folder / "note.json"

    def read(self) -> StoredBuffer | None:
        """Open the stored images; None if there are none or they are damaged."""
        try:
            columns = read_arrays(self._about)
            unreadable = dict(zip(columns["unreadable"].tolist(), columns["reasons"].tolist(), strict=True))
            source = self._open(columns, unreadable)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise any exception
            log.warning("%s is damaged (%s): its images are decoded again", self.folder, error)
            return None
        return StoredBuffer(source, count=len(source) + len(unreadable), unreadable=unreadable)

    def wait_for(self, stream: IO[str]) -> None:
        """Lock the folder; another process holds the lock until it has decoded the images or has ended."""
        last_logged = -math.inf
        while True:
            try:
                if lock(stream.fileno()):
                    return
            except OSError as error:  # a file system without locks
                raise cache_error(self.folder, error) from error
            if time.monotonic() - last_logged > DECODE_LOG_INTERVAL:
                last_logged = time.monotonic()
                done = f"{self.progress()[0]:,}"
                log.info("another process decodes the images of %s (%s so far); waiting for it", self.folder, done)
            time.sleep(_LOCK_POLL_SECONDS)

    def store(self, buffer: DecodeBuffer) -> None:
        """Store the readable images of a complete buffer of `new_buffer`, and make its source; needs the lock."""
        with cache_errors(self.folder):
            columns: dict[str, Any] = self._store(buffer) | {
                "unreadable": np.array(list(buffer.unreadable), dtype=np.int64),
                "reasons": np.array(list(buffer.unreadable.values()), dtype=np.str_),
            }
            write_arrays(self._about, columns)
            self.note.unlink(missing_ok=True)
        stored = self.read()
        if stored is None:
            raise InputError(f"{self.folder} was changed while its images were decoded; start again")
        buffer.source = stored.source

    def progress(self) -> tuple[int, dict[int, str]]:
        """Return the number of decoded images and the unreadable ones; 0 and none if the note is unreadable."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
            return int(note["done"]), {int(index): str(reason) for index, reason in note["unreadable"].items()}
        except Exception:  # a damaged file can raise any exception
            return 0, {}

    def write_progress(self, buffer: DecodeBuffer) -> None:
        """Write the note; the images that it counts must be on the disk already."""
        write_text(self.note, json.dumps({"done": buffer.done, "unreadable": buffer.unreadable}))

    @abstractmethod
    def new_buffer(self, shape: Shape) -> DecodeBuffer:
        """Open the partly decoded images, or make files for all of them; needs the lock."""

    @abstractmethod
    def _open(self, columns: Mapping[str, np.ndarray], unreadable: Mapping[int, str]) -> ImageSource:
        """Open the stored images by the columns of ``about.npz``; raise any exception if they are damaged."""

    @abstractmethod
    def _store(self, buffer: Any) -> dict[str, np.ndarray]:
        """Complete the files of the images; return further columns of ``about.npz``."""


def sync_and_rename(partial: Path, size: int, final: Path) -> None:
    """Cut a file to its size, flush it to the disk and give it its final name."""
    with partial.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream)
    partial.replace(final)
