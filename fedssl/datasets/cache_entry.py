"""The folder of one piece of decoded images.

=============  ====================================================================================
``lock``       held by the process that decodes, which the kernel lets go of when the process ends
``partial``    the pixels, while they are decoded
``note.json``  how far that is: who is next goes on from there
``pixels``     the pixels, when all are there
``about.npz``  labels, owners and names, and what ``pixels`` must look like; without it nothing counts
=============  ====================================================================================
"""

import fcntl
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch

from fedssl.atomic_files import atomic_write, mmap_bytes, write_text
from fedssl.datasets.base import ImageData
from fedssl.datasets.decoding import DECODE_LOG_INTERVAL, PixelBuffer
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

_PATIENCE = 0.2  # seconds between two looks at the lock

NewBuffer = Callable[[tuple[int, int, int, int]], PixelBuffer]

log = logging.getLogger("fedssl")


class CacheEntry:
    """One such folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about, self._pixels = folder / "about.npz", folder / "pixels"
        self._partial, self._note = folder / "partial", folder / "note.json"

    def read(self) -> ImageData | None:
        """The images, mapped; None if they are not there, or not as they were written."""
        try:
            with np.load(self._about, allow_pickle=False) as about:
                columns = dict(about)  # the archive has a checksum of each
            if columns["stamp"].tolist() != _stamp(self._pixels):
                raise ValueError("its pixels have been changed")
            images = mmap_bytes(self._pixels).view(*columns["shape"].tolist())
        except FileNotFoundError:
            return None
        except Exception as error:  # there is no end to how reading a damaged file can fail
            log.warning("%s is damaged (%s): its images are decoded again", self.folder, error)
            return None
        labels, owners = (torch.from_numpy(columns[name]) if name in columns else None for name in ("labels", "owners"))
        classes, owner_names, notices = (
            tuple(columns[name].tolist()) for name in ("classes", "owner_names", "notices")
        )
        return ImageData(images, labels, classes, owners, owner_names, notices)

    def open(self) -> IO[str]:
        """Make the folder and open its lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / "lock").open("w")

    def wait_for(self, lock: IO[str]) -> None:
        """Take the lock, which another process may have until it has decoded the images or has died."""
        told = -math.inf
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - told > DECODE_LOG_INTERVAL:
                    told = time.monotonic()
                    done = f"{self._noted()[0]:,}"
                    log.info("another process decodes the images of %s (%s so far); waiting for it", self.folder, done)
                time.sleep(_PATIENCE)
            except OSError as error:  # a file system without locks
                raise cache_error(self.folder, error) from error

    def write(self, make: Callable[[NewBuffer], ImageData | None]) -> ImageData | None:
        """Decode what is left to decode, and put the images in place; only with the lock."""
        for old in (self._about, self._pixels):
            old.unlink(missing_ok=True)
        image_data = make(self._buffer)
        if image_data is None:
            return None
        with _writing(self.folder):
            with self._partial.open("r+b") as stream:
                stream.truncate(image_data.images.nbytes)  # without the place of those that could not be read
                os.fsync(stream)
            self._partial.replace(self._pixels)
            atomic_write(self._about, lambda stream: self._write_about(stream, image_data))
            self._note.unlink(missing_ok=True)
        written = self.read()
        assert written is not None
        return written

    def _write_about(self, stream: BinaryIO, image_data: ImageData) -> None:
        arrays: dict[str, Any] = {
            "shape": np.array(image_data.images.shape),
            "stamp": np.array(_stamp(self._pixels)),
            "classes": np.array(image_data.classes, dtype=np.str_),
            "owner_names": np.array(image_data.owner_names, dtype=np.str_),
            "notices": np.array(image_data.warnings, dtype=np.str_),
        }
        known = {"labels": image_data.labels, "owners": image_data.owners}
        arrays |= {name: column.numpy() for name, column in known.items() if column is not None}
        np.savez(stream, **arrays)

    def _buffer(self, shape: tuple[int, int, int, int]) -> PixelBuffer:
        """The pixels so far, with room for all of them."""
        needed = math.prod(shape)
        with _writing(self.folder):
            if not self._partial.is_file() or self._partial.stat().st_size != needed:
                self._note.unlink(missing_ok=True)
                self._partial.unlink(missing_ok=True)
                _reserve(self._partial, needed)
            pixels = np.memmap(self._partial, dtype=np.uint8, mode="r+", shape=shape)
        done, unreadable = self._noted()
        log.info("decoding %s images into %s (%s)", f"{shape[0] - done:,}", self.folder, gigabytes(needed))
        return _MmapBuffer(pixels, self._note, done=done, unreadable=unreadable)

    def _noted(self) -> tuple[int, dict[int, str]]:
        """How far decoding has come; not at all where nothing readable says so."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return int(note["done"]), {int(at): str(reason) for at, reason in note["unreadable"].items()}
        except Exception:  # there is no end to how reading a damaged file can fail
            return 0, {}


class _MmapBuffer(PixelBuffer):
    """A buffer that is a file, with a note beside it of how far it is decoded."""

    def __init__(self, pixels: np.memmap, note: Path, *, done: int, unreadable: dict[int, str]) -> None:
        super().__init__(pixels)
        self.done, self.unreadable = done, unreadable
        self._file, self._note = pixels, note

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        super().save_progress(done, unreadable)
        with _writing(self._note.parent):
            self._file.flush()  # first: what the note says must be on the disk, whatever happens to the machine
            write_text(self._note, json.dumps({"done": self.done, "unreadable": self.unreadable}))


def _stamp(file: Path) -> list[int]:
    """Size and time of the last change: who writes into the file changes them."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _reserve(file: Path, size: int) -> None:
    """Make a file of this size whose place on the disk is sure."""
    free = shutil.disk_usage(file.parent).free
    try:
        with file.open("wb") as stream:
            if sys.platform == "linux":
                os.posix_fallocate(stream.fileno(), 0, size)
            else:
                stream.truncate(size)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise InputError(
            f"{file.parent} has no room for the decoded images ({error.strerror}): they need {gigabytes(size)}, and "
            f"{gigabytes(free)} are free; name another folder with dataset.cache=FOLDER, or decode into memory with "
            "dataset.cache=null"
        ) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one sentence what keeps the files of the folder from being written."""
    try:
        yield
    except OSError as error:
        raise cache_error(folder, error) from error


def cache_error(folder: Path, error: OSError) -> InputError:
    """Make the error for a folder that cannot be written."""
    return InputError(
        f"{folder} cannot be written ({error.strerror or error}); name another folder with dataset.cache=FOLDER, or "
        "decode into memory with dataset.cache=null"
    )
