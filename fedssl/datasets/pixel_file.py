"""Decoded images: one array, in memory or in the file ``pixels`` of a cache, which all processes map."""

import errno
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fedssl.atomic_files import fsync_folder, map_file
from fedssl.datasets.images import MappedImages, TensorImages
from fedssl.datasets.storage import Storage, cache_errors, check_memory, stamp, sync_and_rename
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes

_COPY_CHUNK = 1024  # images copied at a time

log = logging.getLogger("fedssl")


class Pixels(Storage):
    """Decoded images ``images``, uint8 of the index's shape."""

    images: np.ndarray

    def _start(self) -> None:
        shape, num_bytes = self.index.shape, math.prod(self.index.shape)
        if self.folder is None:
            check_memory(
                num_bytes,
                f"{shape[0]:,} images of {shape[1]} x {shape[2]} x {shape[3]}",
                "decode them into a file with dataset.cache=auto or dataset.cache=FOLDER, leave them encoded with "
                "dataset.storage=encoded",
            )
            self.images = np.empty(shape, dtype=np.uint8)
            return
        partial = self.file("partial")
        with cache_errors(self.folder):
            for old in ("about.npz", "pixels"):
                self.file(old).unlink(missing_ok=True)
            if not partial.is_file() or partial.stat().st_size != num_bytes:
                self.file("note.json").unlink(missing_ok=True)
                partial.unlink(missing_ok=True)
                _reserve(partial, num_bytes)
            self.images = np.memmap(partial, dtype=np.uint8, mode="r+", shape=shape)
        self.done, self.unreadable = self._noted()
        log.info("decoding %s images into %s (%s)", f"{self.count - self.done:,}", self.folder, gigabytes(num_bytes))

    def write(self, index: int, image: np.ndarray) -> None:
        self.images[index] = image

    def _flush(self) -> None:
        if isinstance(self.images, np.memmap):
            self.images.flush()

    def drop_unreadable(self) -> None:
        """Move the readable images together, in their order."""
        if not self.unreadable:
            return
        if self.folder is not None:
            self.file("note.json").unlink(missing_ok=True)  # after an interruption all images must be decoded again
            fsync_folder(self.folder)
        kept = self.readable
        for start in range(min(self.unreadable), len(kept), _COPY_CHUNK):
            rows = kept[start : start + _COPY_CHUNK]
            self.images[start : start + len(rows)] = self.images[rows]
        self.images = self.images[: len(kept)]

    def _in_memory(self) -> TensorImages:
        self.drop_unreadable()
        return TensorImages(torch.from_numpy(self.images))

    def _complete_files(self) -> dict[str, np.ndarray]:
        self.drop_unreadable()
        pixels = self.file("pixels")
        sync_and_rename(self.file("partial"), self.images.nbytes, pixels)
        return {"shape": np.array(self.images.shape), "stamp": np.array(stamp(pixels))}

    def _open(self, columns: Mapping[str, np.ndarray]) -> MappedImages:
        pixels = self.file("pixels")
        if columns["stamp"].tolist() != stamp(pixels):
            raise ValueError("its pixels have been changed")
        count, channels, height, width = columns["shape"].tolist()
        size = count * channels * height * width
        return MappedImages(map_file(pixels, size=size), (count, channels, height, width))


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
