"""Decoded images in a file: decoded once per host and mapped by all processes of the host.

The setting ``dataset.cache`` is the folder of all caches: ``auto`` is ``$XDG_CACHE_HOME/fedssl`` or
``~/.cache/fedssl``. Every data set has a subfolder, named after everything that the pixels depend on:

=============  ============================================================================
``lock``       held by the process that decodes; the kernel releases it when the process ends
``partial``    the pixels while they are decoded
``note.json``  the progress of decoding, from which the next process continues
``pixels``     the pixels of all readable images
``about.npz``  shape, stamp of ``pixels`` and unreadable images; without it the cache is empty
=============  ============================================================================

Only damaged files are removed. A folder may be deleted whenever no run uses it.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import PIL
import torch

from fedssl.atomic_files import atomic_write, mmap_bytes, write_text
from fedssl.datasets.decoding import DECODE_LOG_INTERVAL, VERSION, PixelBuffer, memory_buffer
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

MIN_SECONDS_TO_CACHE = 1.0  # estimated decoding time from which a file pays
# Decoding time on one core, measured with images of 32 to 500 pixels: per image, and per encoded byte.
_SECONDS_PER_IMAGE, _SECONDS_PER_BYTE = 1e-4, 5e-8
_LOCK_POLL_SECONDS = 0.2

log = logging.getLogger("fedssl")


@dataclass(frozen=True)
class CacheKey:
    """Everything that the pixels of a data set depend on."""

    name: str  # readable part of the folder's name
    files: Sequence[Path]  # files with the encoded images
    num_images: int  # number of images in the files
    settings: Mapping[str, Any]  # all other settings, as JSON values


@contextmanager
def open_buffer(location: str | None, cache_key: CacheKey, shape: tuple[int, int, int, int]) -> Iterator[PixelBuffer]:
    """Open the buffer of a data set's pixels; decode into it unless it is ``complete``.

    Unreadable images are removed and the pixels are stored when the block ends without an exception. ``location`` is
    the folder of all caches, or "auto"; None decodes into the memory of this process, as for small data sets. ``shape``
    is ``(images to decode, channels, size, size)``. Raise an `InputError` if the disk or the memory is too small.
    """
    entry = None if location is None else _entry(location, cache_key, num_images=shape[0])
    stored = None if entry is None else entry.read()
    if stored is not None:
        yield stored
        return
    lock = None if entry is None else _open_lock(entry, required=location != "auto")
    if entry is None or lock is None:
        buffer = memory_buffer(shape)
        yield buffer
        buffer.drop_unreadable()
        return
    with lock:
        entry.wait_for(lock)
        stored = entry.read()  # another process may have decoded the images meanwhile
        buffer = stored or entry.new_buffer(shape)
        yield buffer
        if stored is None:
            entry.store(buffer)


def cache_folder(location: str) -> Path:
    """Return the folder that ``dataset.cache`` names."""
    if location != "auto":
        return Path(location).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "fedssl"


def cache_error(folder: Path, error: OSError) -> InputError:
    """Make the error for a folder that cannot be written."""
    return InputError(
        f"{folder} cannot be written ({error.strerror or error}); name another folder with dataset.cache=FOLDER, or "
        "decode into memory with dataset.cache=null"
    )


def _entry(location: str, cache_key: CacheKey, *, num_images: int) -> "CacheEntry | None":
    """Return the cache of these images; None if decoding them takes less than `MIN_SECONDS_TO_CACHE`."""
    num_bytes, digest = _digest(cache_key)
    seconds = num_images * (_SECONDS_PER_IMAGE + _SECONDS_PER_BYTE * num_bytes / cache_key.num_images)
    if seconds < MIN_SECONDS_TO_CACHE:
        return None
    return CacheEntry(cache_folder(location) / f"{re.sub(r'[^-.0-9A-Za-z]+', '-', cache_key.name)}-{digest}")


def _digest(cache_key: CacheKey) -> tuple[int, str]:
    """Return the size of all files in bytes, and a digest of everything that the pixels depend on."""
    settings = {"version": VERSION, "Pillow": PIL.__version__, **cache_key.settings}
    hashed = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    num_bytes = 0
    for file in cache_key.files:
        status = file.stat()
        hashed.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
        num_bytes += status.st_size
    return num_bytes, hashed.hexdigest()[:16]


def _open_lock(entry: "CacheEntry", *, required: bool) -> IO[str] | None:
    """Make the folder and open its lock file; None if the folder is not ``required`` and cannot be made."""
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        return (entry.folder / "lock").open("w")
    except OSError as error:
        if required:
            raise cache_error(entry.folder, error) from error
        log.warning("%s cannot be made (%s): images are decoded into memory", entry.folder, error.strerror)
        return None


class CacheEntry:
    """Folder with the decoded images of one data set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about, self._pixels = folder / "about.npz", folder / "pixels"
        self._partial, self._note = folder / "partial", folder / "note.json"

    def read(self) -> PixelBuffer | None:
        """Map the stored pixels; None if there are none or they are damaged."""
        try:
            with np.load(self._about, allow_pickle=False) as about:
                columns = dict(about)  # the archive has a checksum of each
            if columns["stamp"].tolist() != _stamp(self._pixels):
                raise ValueError("its pixels have been changed")
            shape = columns["shape"].tolist()
            images = mmap_bytes(self._pixels, size=math.prod(shape)).view(*shape)
            unreadable = dict(zip(columns["unreadable"].tolist(), columns["reasons"].tolist(), strict=True))
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise any exception
            log.warning("%s is damaged (%s): its images are decoded again", self.folder, error)
            return None
        count = len(images) + len(unreadable)
        return PixelBuffer(images, count=count, done=count, unreadable=unreadable)

    def wait_for(self, lock: IO[str]) -> None:
        """Lock the folder; another process holds the lock until it has decoded the images or has ended."""
        last_logged = -math.inf
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - last_logged > DECODE_LOG_INTERVAL:
                    last_logged = time.monotonic()
                    done = f"{self._progress()[0]:,}"
                    log.info("another process decodes the images of %s (%s so far); waiting for it", self.folder, done)
                time.sleep(_LOCK_POLL_SECONDS)
            except OSError as error:  # a file system without locks
                raise cache_error(self.folder, error) from error

    def new_buffer(self, shape: tuple[int, int, int, int]) -> PixelBuffer:
        """Open the partly decoded pixels, or make a file for all of them; needs the lock."""
        num_bytes = math.prod(shape)
        with _cache_errors(self.folder):
            for old in (self._about, self._pixels):
                old.unlink(missing_ok=True)
            if not self._partial.is_file() or self._partial.stat().st_size != num_bytes:
                self._note.unlink(missing_ok=True)
                self._partial.unlink(missing_ok=True)
                _reserve(self._partial, num_bytes)
            pixels = np.memmap(self._partial, dtype=np.uint8, mode="r+", shape=shape)
        done, unreadable = self._progress()
        log.info("decoding %s images into %s (%s)", f"{shape[0] - done:,}", self.folder, gigabytes(num_bytes))
        return _MmapBuffer(pixels, self._note, done=done, unreadable=unreadable)

    def store(self, buffer: PixelBuffer) -> None:
        """Remove unreadable images, store the pixels, and map them into the buffer; needs the lock."""
        buffer.drop_unreadable()
        with _cache_errors(self.folder):
            with self._partial.open("r+b") as stream:
                stream.truncate(buffer.images.nbytes)
                os.fsync(stream)
            self._partial.replace(self._pixels)
            atomic_write(self._about, lambda stream: self._write_about(stream, buffer))
            self._note.unlink(missing_ok=True)
        stored = self.read()
        if stored is None:
            raise InputError(f"{self.folder} was changed while its images were decoded; start again")
        buffer.images = stored.images

    def _write_about(self, stream: BinaryIO, buffer: PixelBuffer) -> None:
        np.savez(
            stream,
            shape=np.array(buffer.images.shape),
            stamp=np.array(_stamp(self._pixels)),
            unreadable=np.array(list(buffer.unreadable), dtype=np.int64),
            reasons=np.array(list(buffer.unreadable.values()), dtype=np.str_),
        )

    def _progress(self) -> tuple[int, dict[int, str]]:
        """Return the number of decoded images and the unreadable ones; 0 and none if the note is unreadable."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return int(note["done"]), {int(index): str(reason) for index, reason in note["unreadable"].items()}
        except Exception:  # a damaged file can raise any exception
            return 0, {}


class _MmapBuffer(PixelBuffer):
    """A buffer in a mapped file, with its progress in a note beside it."""

    def __init__(self, pixels: np.memmap, note: Path, *, done: int, unreadable: dict[int, str]) -> None:
        super().__init__(torch.from_numpy(pixels), count=len(pixels), done=done, unreadable=unreadable)
        self._file, self._note = pixels, note

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        super().save_progress(done, unreadable)
        with _cache_errors(self._note.parent):
            self._file.flush()  # first: noted images must be on the disk even if the machine crashes
            write_text(self._note, json.dumps({"done": self.done, "unreadable": self.unreadable}))


def _stamp(file: Path) -> list[int]:
    """Return size and modification time, which change with the content."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _reserve(file: Path, size: int) -> None:
    """Make a file of ``size`` bytes and reserve its disk space."""
    free = shutil.disk_usage(file.parent).free
    try:
        if size > free:  # some file systems write all bytes before they fail
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with file.open("wb") as stream:
            if sys.platform == "linux":
                os.posix_fallocate(stream.fileno(), 0, size)
            else:
                stream.truncate(size)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise InputError(
            f"{file.parent} has no room for the decoded images ({error.strerror}): they need {gigabytes(size)}, and "
            f"{gigabytes(free)} are free; name another folder with dataset.cache=FOLDER, or lower dataset.limit or "
            "dataset.size"
        ) from error


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cache_error(folder, error) from error
