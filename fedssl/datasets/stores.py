"""The two storages: decoded images (`Pixels`), and encoded ones (`Records`), in memory or in files of a cache.

Decoded images are one array, which all processes map. An encoded image is readable if it can be decoded, which is tried
once. Images in their own files and in arrow files are read where they are. Those of parquet files, whose columns are
compressed, and those that a column names are copied into memory, or into a file of the cache:

===========  ==============================================================
``pixels``   decoded images
``pack``     the encoded images of a complete index
``partial``  either of them while it is made
``lengths``  numbers of bytes of encoded images while they are copied, int64
===========  ==============================================================
"""

import errno
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from fedssl.atomic_files import fsync_folder, map_file
from fedssl.datasets.decoding import Bands, Encoded, Page
from fedssl.datasets.image_index import FileRecords, ImageIndex, OpenFiles
from fedssl.datasets.images import EncodedImages, MappedImages, TensorImages
from fedssl.datasets.pages import max_file_bytes
from fedssl.datasets.raster import torch_dtype
from fedssl.datasets.storage import Storage, cache_error, cache_errors, check_memory, stamp, sync_and_rename
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.machine.memory import gigabytes
from fedssl.safe_io import read_bytes

_COPY_CHUNK = 1024  # decoded images copied at a time


class Pixels(Storage):
    """Decoded images ``images``, of the index's shape and dtype."""

    images: np.ndarray

    def _start(self) -> None:
        shape, dtype, num_bytes = self.index.shape, self.index.decoding.pixel_dtype, self.index.num_pixel_bytes
        if self.folder is None:
            check_memory(
                num_bytes,
                f"{shape[0]:,} images of {shape[1]} x {shape[2]} x {shape[3]}",
                "decode them into a file with dataset.cache=auto or dataset.cache=FOLDER, leave them encoded with "
                "dataset.storage=encoded",
            )
            self.images = np.empty(shape, dtype)
            return
        partial = self.file("partial")
        with cache_errors(self.folder):
            for old in ("about.npz", "pixels"):
                self.file(old).unlink(missing_ok=True)
            if not partial.is_file() or partial.stat().st_size != num_bytes:
                self.file("note.json").unlink(missing_ok=True)
                partial.unlink(missing_ok=True)
                _reserve(partial, num_bytes)
            self.images = np.memmap(partial, dtype, mode="r+", shape=shape)
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
        about = {"shape": self.images.shape, "dtype": str(self.images.dtype), "stamp": stamp(pixels)}
        return {name: np.array(value) for name, value in about.items()}

    def _open(self, columns: Mapping[str, np.ndarray]) -> MappedImages:
        pixels = self.file("pixels")
        if columns["stamp"].tolist() != stamp(pixels):
            raise ValueError("its pixels have been changed")
        count, channels, height, width = columns["shape"].tolist()
        shape, dtype = (count, channels, height, width), torch_dtype(str(columns["dtype"]))
        return MappedImages(map_file(pixels, size=math.prod(shape) * dtype.itemsize), shape, dtype)


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


class Records(Storage):
    """Encoded images, whose pixels are discarded after the check."""

    def __init__(self, index: ImageIndex, folder: Path | None) -> None:
        super().__init__(index, folder)
        self.records = index.records()
        self._copies: list[Encoded] = []
        self._files: list[FileIO] = []  # pack and lengths

    def _start(self) -> None:
        num_bytes = self.index.num_bytes()
        if self.folder is None:
            if self.records is None:
                remedy = "copy them into a file with dataset.cache=auto or dataset.cache=FOLDER"
                check_memory(num_bytes, f"{self.count:,} encoded images", remedy)
            return
        with cache_errors(self.folder):
            for old in ("about.npz", "pack"):
                self.file(old).unlink(missing_ok=True)
            self.done, self.unreadable = self._noted()
            what = "checking" if self.records is not None else "copying"
            log.info("%s %s encoded images of %s", what, f"{self.count - self.done:,}", self.folder)
            if self.records is None:
                self._continue_copy(num_bytes)

    def _continue_copy(self, num_bytes: int) -> None:
        """Open the files after the images that the note counts."""
        pack, lengths = self.file("partial"), self.file("lengths")
        sizes = np.fromfile(lengths, dtype=np.int64, count=self.done) if lengths.is_file() else np.empty(0)
        copied = int(sizes.sum()) if len(sizes) == self.done else 0
        if len(sizes) != self.done or not pack.is_file() or pack.stat().st_size < copied:
            self.done, self.unreadable, copied = 0, {}, 0
        free = shutil.disk_usage(pack.parent).free
        if num_bytes - copied > free:
            raise InputError(
                f"{self.folder} has no room for a copy of the encoded images: it needs "
                f"{gigabytes(num_bytes - copied)}, and {gigabytes(free)} are free; set dataset.cache=FOLDER, lower "
                "dataset.limit, or give arrow files, which are read where they are, in dataset.path"
            )
        self._files = [_append_after(pack, copied), _append_after(lengths, 8 * self.done)]

    def receive(self, batch: Sequence[Encoded]) -> None:
        if self.records is not None:
            return
        if self.folder is None:
            self._copies += batch
            return
        contents = [self._content(source) for source in batch]
        sizes = np.array([len(content) for content in contents], dtype=np.int64)
        try:
            for stream, data in zip(self._files, (b"".join(contents), sizes.tobytes()), strict=True):
                _write(stream, data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise cache_error(self.folder, error) from error
            raise InputError(
                f"the disk of {self.folder} became full while encoded images were copied to it; free "
                f"{gigabytes(self.index.num_bytes())} in all and start again, which continues the copy, or name "
                "another folder with dataset.cache=FOLDER"
            ) from error

    def _content(self, source: Encoded) -> bytes:
        """Return the bytes to copy; none of a file that cannot be read, as decoding finds."""
        if isinstance(source, bytes):
            return source
        try:
            assert not isinstance(source, Page | Bands)  # their files stay where they are
            return read_bytes(source, max_bytes=max_file_bytes(self.index.decoding.max_pixels))
        except (OSError, ValueError):
            return b""

    def _flush(self) -> None:
        for stream in self._files:
            os.fsync(stream.fileno())

    def close(self) -> None:
        for stream in self._files:
            stream.close()

    def _in_memory(self) -> EncodedImages:
        return self._images(self._copies if self.records is None else self.records)

    def _complete_files(self) -> dict[str, np.ndarray]:
        columns = {"count": np.array(self.count)}
        if self.records is None:
            pack, sizes = self.file("pack"), np.fromfile(self.file("lengths"), dtype=np.int64)
            sync_and_rename(self.file("partial"), int(sizes.sum()), pack)
            self.file("lengths").unlink(missing_ok=True)
            columns |= {"lengths": sizes, "stamp": np.array(stamp(pack))}
        return columns

    def _open(self, columns: Mapping[str, np.ndarray]) -> EncodedImages:
        records = self.records
        if records is None:
            pack, sizes = self.file("pack"), columns["lengths"]
            if columns["stamp"].tolist() != stamp(pack):
                raise ValueError("its pack has been changed")
            ends = np.cumsum(sizes, dtype=np.int64)
            records = FileRecords(OpenFiles([pack]), np.broadcast_to(0, len(sizes)), ends - sizes, sizes)
        if not self.count == int(columns["count"]) == len(records):
            raise ValueError("it has another number of images")
        return self._images(records)

    def _images(self, records: Sequence[Encoded]) -> EncodedImages:
        return EncodedImages(records, self.readable, self.index.decoding)


def _append_after(file: Path, size: int) -> FileIO:
    """Open a file for writing after its first ``size`` bytes, and remove the rest."""
    stream = file.open("ab", buffering=0)
    stream.truncate(size)
    return stream


def _write(stream: FileIO, content: bytes) -> None:
    """Write all bytes; the system may write a part of them."""
    left = memoryview(content)
    while left:
        left = left[stream.write(left) :]
