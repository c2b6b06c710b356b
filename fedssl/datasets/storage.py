"""Images of a data set while they are decoded, and afterwards: in memory, or in a folder of the cache.

The folder has these files, and those of `fedssl.datasets.stores`:

=============  ============================================================================
``lock``       held by the process that decodes; the kernel releases it when the process ends
``note.json``  the progress of decoding, from which the next process continues
``partial``    the content while it is made
``about.npz``  what is in the files, with their stamps, and unreadable images; without it the cache is empty
=============  ============================================================================

Only damaged files are removed. A folder may be deleted whenever no run uses it.
"""

import errno
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from fedssl.atomic_files import write_text
from fedssl.datasets.decoding import THREADS, Encoded, unreadable_reason
from fedssl.datasets.image_index import ImageIndex
from fedssl.datasets.images import ImageSource
from fedssl.errors import InputError
from fedssl.locks import lock
from fedssl.logs import log
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.machine.process import available_cores
from fedssl.safe_io import FilePath, open_regular_file
from fedssl.tensor_file import read_arrays, write_arrays

DECODE_LOG_INTERVAL = 10.0  # seconds between two progress lines
_LOCK_POLL_SECONDS = 0.2
_FAILURES = {  # of a disk or a share, a missing permission, or too many open files; not of the content of a file
    *(errno.EIO, errno.ENOENT, errno.EACCES, errno.ENODEV, errno.ENXIO, errno.EMFILE, errno.ENFILE),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET),
}


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


def can_be_read(file: FilePath) -> bool:
    """Return whether a file can be read to its end, or all files of a folder, such as the bands of an image."""
    try:
        for path in filter(Path.is_file, Path(file).rglob("*")) if Path(file).is_dir() else [file]:
            with open_regular_file(path) as stream:
                while stream.read(2**20):
                    pass
    except OSError:
        return False
    return True


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Raise an `InputError` if memory is too small."""
    free = available_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{what} need {gigabytes(needed)} of memory, and {gigabytes(free)} are available; {remedy}, or lower "
            "dataset.limit or dataset.size"
        )


class Storage(ABC):
    """The images of an index, decoded or not; in memory without a folder."""

    def __init__(self, index: ImageIndex, folder: Path | None) -> None:
        self.index, self.count, self.folder = index, index.count, folder
        self.done = 0  # number of images, from the first, that are decoded or unreadable
        self.unreadable = dict[int, str]()  # sorted indices of unreadable images, with the reasons
        self.failed = set[int]()  # those whose files could not be read, for example on a share that was offline

    @property
    def readable(self) -> np.ndarray:
        """Sorted indices of the readable images, int64."""
        return np.delete(np.arange(self.count), list(self.unreadable))

    @property
    def failed_files(self) -> tuple[FilePath, ...]:
        """Files that could not be read. Their content may be valid, and is used once `can_be_read`."""
        return tuple(dict.fromkeys(place.file for place in self.index.places(np.array(sorted(self.failed), int))))

    def file(self, name: str) -> Path:
        """Return a file of the folder."""
        assert self.folder is not None
        return self.folder / name

    def read(self) -> ImageSource | None:
        """Open the images that an earlier process has stored; None if there are none or they are damaged."""
        if self.folder is None:
            return None
        try:
            columns = read_arrays(self.file("about.npz"))
            self.unreadable = dict(zip(columns["unreadable"].tolist(), columns["reasons"].tolist(), strict=True))
            self.failed = set(columns["failed"].tolist()) if "failed" in columns else set()
            if not any(map(can_be_read, self.failed_files)):
                return self._open(columns)
            log.info("%s lacks images that could not be read, and can be now: all are decoded again", self.folder)
        except FileNotFoundError:
            pass
        except Exception as error:  # a damaged file can raise any exception
            log.warning("%s is damaged (%s): its images are decoded again", self.folder, error)
        self.unreadable, self.failed = {}, set()
        return None

    def make(self, *, required: bool) -> ImageSource:
        """Decode the images and store them; in memory if the folder is not ``required`` and cannot be made."""
        stream = None if self.folder is None else self._open_lock(required=required)
        if stream is None:
            self.folder = None
            self._decode()
            return self._in_memory()
        with stream, closing(self):
            self._wait_for(stream)
            source = self.read()  # another process may have decoded the images meanwhile
            return self._store() if source is None else source

    def close(self) -> None:  # noqa: B027, only some need it
        """Close the files that are written."""

    def _decode(self) -> None:
        """Decode the images that are not there yet, with a pool of threads.

        A batch is fetched only when a thread is free, so that memory holds at most one batch per thread. The progress
        is logged and saved every `DECODE_LOG_INTERVAL` seconds. Images that raise an exception count as unreadable.
        """
        self._start()
        threads, first, position = min(THREADS, available_cores()), self.done, self.done
        running = deque[tuple[int, Future[dict[int, str]]]]()  # batches in order: number of images, and unreadable ones
        start = last_saved = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for batch in self.index.batches(position):
                    self.receive(batch)
                    running.append((len(batch), pool.submit(self._decode_batch, batch, position)))
                    position += len(batch)
                    while len(busy := [task for _, task in running if not task.done()]) >= threads:
                        wait(busy, return_when=FIRST_COMPLETED)
                    self._count_finished(running)
                    if time.monotonic() - last_saved >= DECODE_LOG_INTERVAL:
                        last_saved = time.monotonic()
                        self._save_progress()
                        self._log_progress(first, seconds=last_saved - start)
                for _, task in running:
                    task.result()
            finally:  # also after Ctrl-C
                wait([task for _, task in running])
                with suppress(BaseException):  # is raised already
                    self._count_finished(running)
                self._save_progress()
        self.index.unreadable_warnings(self.unreadable)  # an error if there is nothing else

    def _decode_batch(self, batch: Sequence[Encoded], start: int) -> dict[int, str]:
        """Decode images from index ``start`` on; return the unreadable ones with their reasons."""
        unreadable = {}
        for index, image in enumerate(self.index.decoding.each(batch), start):
            if isinstance(image, Exception):
                unreadable[index] = unreadable_reason(image)
                if isinstance(image, OSError) and image.errno in _FAILURES:
                    self.failed.add(index)
            else:
                self.write(index, image)
        return unreadable

    def _count_finished(self, running: deque[tuple[int, Future[dict[int, str]]]]) -> None:
        """Remove the first batches if they are decoded; raises what a thread has raised."""
        while running and running[0][1].done():
            self.unreadable |= running[0][1].result()
            self.done += running.popleft()[0]

    def _log_progress(self, first: int, *, seconds: float) -> None:
        """Log the number of decoded images and the time for the others; those after ``first`` took ``seconds``."""
        if self.done > first:
            rest = seconds / (self.done - first) * (self.count - self.done)
            remaining = f"{rest:.0f} s" if rest < 120 else f"{rest / 60:.0f} min"
            log.info("decoding %s of %s images, %s left", f"{self.done:,}", f"{self.count:,}", remaining)

    def _store(self) -> ImageSource:
        assert self.folder is not None
        self._decode()
        with cache_errors(self.folder):
            columns = self._complete_files() | {
                "unreadable": np.array(list(self.unreadable), dtype=np.int64),
                "reasons": np.array(list(self.unreadable.values()), dtype=np.str_),
                "failed": np.array(sorted(self.failed), dtype=np.int64),
            }
            write_arrays(self.file("about.npz"), columns)
            self.file("note.json").unlink(missing_ok=True)
        source = self.read()
        if source is None:
            raise InputError(f"{self.folder} was changed while its images were decoded; start again")
        return source

    def _open_lock(self, *, required: bool) -> IO[str] | None:
        """Make the folder and open its lock file."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self.file("lock").open("w")
        except OSError as error:
            if required:
                raise cache_error(self.folder, error) from error
            log.warning("%s cannot be made (%s): images are decoded into memory", self.folder, error.strerror)
            return None

    def _wait_for(self, stream: IO[str]) -> None:
        """Lock the folder; another process holds the lock until it has decoded the images or has ended."""
        last_logged = -math.inf
        while True:
            try:
                if lock(stream.fileno()):
                    return
            except OSError as error:  # a file system without locks
                raise cache_error(self.file(""), error) from error
            if time.monotonic() - last_logged > DECODE_LOG_INTERVAL:
                last_logged = time.monotonic()
                done = f"{self._noted()[0]:,}"
                log.info("another process decodes the images of %s (%s so far); waiting for it", self.folder, done)
            time.sleep(_LOCK_POLL_SECONDS)

    def _noted(self) -> tuple[int, dict[int, str]]:
        """Return the number of decoded images and the unreadable ones; 0 and none if the note is unreadable."""
        try:
            note = json.loads(self.file("note.json").read_text(encoding="utf-8"))
            return int(note["done"]), {int(index): str(reason) for index, reason in note["unreadable"].items()}
        except Exception:  # a damaged file can raise any exception
            return 0, {}

    def _save_progress(self) -> None:
        """Write the note, if there is a folder; the images that it counts are on the disk before.

        It ends before the first image whose file could not be read, which the next process tries again.
        """
        if self.folder is not None:
            done = min(self.done, *self.failed, self.count)
            unreadable = {index: reason for index, reason in self.unreadable.items() if index < done}
            with cache_errors(self.folder):
                self._flush()
                write_text(self.file("note.json"), json.dumps({"done": done, "unreadable": unreadable}))

    def receive(self, batch: Sequence[Encoded]) -> None:  # noqa: B027, only some need it
        """Take the next encoded images, before they are decoded; called in their order."""

    def write(self, index: int, image: np.ndarray) -> None:  # noqa: B027, as above
        """Store a decoded image ``(channels, size, size)``; called by all threads, in any order."""

    @abstractmethod
    def _start(self) -> None:
        """Open what was partly decoded, whose progress is in the note, or make room for all images."""

    @abstractmethod
    def _flush(self) -> None:
        """Flush the files to the disk."""

    @abstractmethod
    def _in_memory(self) -> ImageSource:
        """Return the readable images, all of which are in memory."""

    @abstractmethod
    def _complete_files(self) -> dict[str, np.ndarray]:
        """Complete the files of the folder; return further columns of ``about.npz``."""

    @abstractmethod
    def _open(self, columns: Mapping[str, np.ndarray]) -> ImageSource:
        """Open the stored images by the columns of ``about.npz``; raise any exception if they are damaged."""


def sync_and_rename(partial: Path, size: int, final: Path) -> None:
    """Cut a file to its size, flush it to the disk and give it its final name."""
    with partial.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream)
    partial.replace(final)
