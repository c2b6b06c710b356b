"""Decoded images in a cache, one array that all processes map.

===========  =================================
``partial``  the pixels while they are decoded
``pixels``   the pixels of all readable images
===========  =================================
"""

import errno
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedssl.atomic_files import map_file
from fedssl.datasets.buffers import PixelBuffer
from fedssl.datasets.cache_entry import CacheEntry, cache_errors, stamp, sync_and_rename
from fedssl.datasets.decoding import Shape
from fedssl.datasets.images import MappedImages
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

log = logging.getLogger("fedssl")


class PixelEntry(CacheEntry):
    """Folder with the decoded images of one data set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pixels = folder / "pixels"

    def new_buffer(self, shape: Shape) -> "_MmapBuffer":
        num_bytes = math.prod(shape)
        with cache_errors(self.folder):
            for old in (self._about, self._pixels):
                old.unlink(missing_ok=True)
            if not self.partial.is_file() or self.partial.stat().st_size != num_bytes:
                self.note.unlink(missing_ok=True)
                self.partial.unlink(missing_ok=True)
                _reserve(self.partial, num_bytes)
            pixels = np.memmap(self.partial, dtype=np.uint8, mode="r+", shape=shape)
        buffer = _MmapBuffer(pixels, self)
        log.info("decoding %s images into %s (%s)", f"{shape[0] - buffer.done:,}", self.folder, gigabytes(num_bytes))
        return buffer

    def _open(self, columns: Mapping[str, np.ndarray], unreadable: Mapping[int, str]) -> MappedImages:
        if columns["stamp"].tolist() != stamp(self._pixels):
            raise ValueError("its pixels have been changed")
        count, channels, height, width = columns["shape"].tolist()
        size = count * channels * height * width
        return MappedImages(map_file(self._pixels, size=size), (count, channels, height, width))

    def _store(self, buffer: PixelBuffer) -> dict[str, np.ndarray]:
        buffer.drop_unreadable()
        shape, num_bytes = buffer.images.shape, buffer.images.nbytes
        sync_and_rename(self.partial, num_bytes, self._pixels)
        return {"shape": np.array(shape), "stamp": np.array(stamp(self._pixels))}


class _MmapBuffer(PixelBuffer):
    """A buffer in a mapped file, with its progress in a note beside it."""

    def __init__(self, pixels: np.memmap, entry: PixelEntry) -> None:
        done, unreadable = entry.progress()
        super().__init__(pixels, done=done, unreadable=unreadable)
        self._file, self._entry = pixels, entry

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        super().save_progress(done, unreadable)
        with cache_errors(self._entry.folder):
            self._file.flush()  # first: noted images must be on the disk even if the machine crashes
            self._entry.write_progress(self)


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
            f"{gigabytes(free)} are free; set dataset.cache=FOLDER, leave the images encoded with "
            "dataset.storage=encoded, or lower dataset.limit or dataset.size"
        ) from error
