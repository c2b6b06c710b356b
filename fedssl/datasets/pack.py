"""Index of encoded images in a cache: which of them are readable, and their bytes if the source has no place for them.

An image is readable if it can be decoded, which the making of an index tries once. Images in their own files and in
arrow files are read where they are. Those of parquet files, whose columns are compressed, and those that a column names
are copied:

===========  ==============================================================
``partial``  the encoded images while they are copied, one after another
``lengths``  their numbers of bytes, int64
``pack``     the encoded images of a complete index
===========  ==============================================================
"""

import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedssl.datasets.buffers import EncodedInput, RecordBuffer
from fedssl.datasets.cache_entry import CacheEntry, cache_error, cache_errors, stamp, sync_and_rename
from fedssl.datasets.decoding import Shape, max_file_bytes
from fedssl.datasets.encoded_images import pack_records
from fedssl.datasets.images import EncodedImages
from fedssl.errors import InputError
from fedssl.machine.memory import gigabytes
from fedssl.safe_io import read_bytes

log = logging.getLogger("fedssl")


class IndexEntry(CacheEntry):
    """Folder with the index of encoded images of one data set, which are described by ``encoded``."""

    def __init__(self, folder: Path, encoded: EncodedInput) -> None:
        super().__init__(folder)
        self.encoded = encoded
        self.pack, self.lengths = folder / "pack", folder / "lengths"

    def new_buffer(self, shape: Shape) -> RecordBuffer:
        with cache_errors(self.folder):
            for old in (self._about, self.pack):
                old.unlink(missing_ok=True)
            done, unreadable = self.progress()
            what = "checking" if self.encoded.records is not None else "copying"
            log.info("%s %s encoded images of %s", what, f"{shape[0] - done:,}", self.folder)
            if self.encoded.records is not None:
                return _IndexBuffer(self, shape, done=done, unreadable=unreadable)
            return _PackBuffer(self, shape, done=done, unreadable=unreadable)

    def _open(self, columns: Mapping[str, np.ndarray], unreadable: Mapping[int, str]) -> EncodedImages:
        count, records = int(columns["count"]), self.encoded.records
        if records is None:
            lengths = columns["lengths"]
            if columns["stamp"].tolist() != stamp(self.pack) or len(lengths) != count:
                raise ValueError("its pack has been changed")
            records = pack_records(self.pack, lengths)
        if len(records) != count:
            raise ValueError("it has another number of images")
        readable = np.delete(np.arange(count), list(unreadable))
        return EncodedImages(records, readable, self.encoded.decoding)

    def _store(self, buffer: RecordBuffer) -> dict[str, np.ndarray]:
        columns = {"count": np.array(buffer.count)}
        if isinstance(buffer, _PackBuffer):
            lengths = buffer.close()
            sync_and_rename(self.partial, int(lengths.sum()), self.pack)
            self.lengths.unlink(missing_ok=True)
            columns |= {"lengths": lengths, "stamp": np.array(stamp(self.pack))}
        return columns


class _IndexBuffer(RecordBuffer):
    """Encoded images that stay where they are, with the progress of their check in a note."""

    def __init__(self, entry: IndexEntry, shape: Shape, *, done: int, unreadable: Mapping[int, str]) -> None:
        super().__init__(shape, entry.encoded, done=done, unreadable=unreadable)
        self._entry = entry

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        super().save_progress(done, unreadable)
        with cache_errors(self._entry.folder):
            self._flush()
            self._entry.write_progress(self)

    def _flush(self) -> None:
        pass


class _PackBuffer(_IndexBuffer):
    """Encoded images that are copied into a pack, from the first on which the note does not count."""

    def __init__(self, entry: IndexEntry, shape: Shape, *, done: int, unreadable: Mapping[int, str]) -> None:
        lengths = np.fromfile(entry.lengths, dtype=np.int64, count=done) if entry.lengths.is_file() else np.empty(0)
        copied = int(lengths.sum()) if len(lengths) == done else 0
        if len(lengths) != done or not entry.partial.is_file() or entry.partial.stat().st_size < copied:
            done, unreadable, copied = 0, {}, 0
        super().__init__(entry, shape, done=done, unreadable=unreadable)
        _check_disk(entry.folder, entry.encoded.num_bytes - copied)
        self._pack, self._lengths = (
            _append_after(file, size) for file, size in ((entry.partial, copied), (entry.lengths, 8 * done))
        )

    def receive(self, batch: Sequence[bytes | Path]) -> None:
        contents = [self._content(source) for source in batch]
        try:
            _write(self._pack, b"".join(contents))
            _write(self._lengths, np.array([len(content) for content in contents], dtype=np.int64).tobytes())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise cache_error(self._entry.folder, error) from error
            raise InputError(
                f"the disk of {self._entry.folder} became full while encoded images were copied to it; free "
                f"{gigabytes(self._entry.encoded.num_bytes)} in all and start again, which continues the copy, or name "
                "another folder with dataset.cache=FOLDER"
            ) from error

    def _content(self, source: bytes | Path) -> bytes:
        """Return the bytes to copy; none of a file that cannot be read, as decoding finds."""
        if isinstance(source, bytes):
            return source
        try:
            return read_bytes(source, max_bytes=max_file_bytes(self._entry.encoded.decoding.max_pixels))
        except (OSError, ValueError):
            return b""

    def _flush(self) -> None:
        for descriptor in (self._pack, self._lengths):
            os.fsync(descriptor)

    def close(self) -> np.ndarray:
        """Close the files; return the lengths of all images."""
        for descriptor in (self._pack, self._lengths):
            os.close(descriptor)
        return np.fromfile(self._entry.lengths, dtype=np.int64)


def _append_after(file: Path, size: int) -> int:
    """Open a file for writing after its first ``size`` bytes, and remove the rest."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.ftruncate(descriptor, size)
    os.lseek(descriptor, size, os.SEEK_SET)
    return descriptor


def _write(descriptor: int, content: bytes) -> None:
    """Write all bytes; the system may write a part of them."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _check_disk(folder: Path, needed: int) -> None:
    """Raise an `InputError` if the disk has no room for a copy of the encoded images."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder} has no room for a copy of the encoded images: it needs {gigabytes(needed)}, and "
            f"{gigabytes(free)} are free; set dataset.cache=FOLDER, lower dataset.limit, or give "
            "arrow files, which are read where they are, in dataset.path"
        )
