"""Encoded images in files that hold several of them."""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class RecordSequence(Sequence[bytes], ABC):
    """Encoded images that are read when they are used."""

    @abstractmethod
    def at(self, rows: np.ndarray) -> "RecordSequence":
        """Return the images at ``rows``."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return the place of an image."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Read an encoded image."""

    def __getitem__(self, index: Any) -> Any:
        return [self.read(row) for row in range(len(self))[index]] if isinstance(index, slice) else self.read(index)


class FileRecords(RecordSequence):
    """Byte strings in files, read when they are used.

    The files stay open, so that a replaced file does not change them. Reading, in place of a mapping, returns an error
    where a mapped file that was cut would end the process. ``file_numbers``, ``offsets`` and ``lengths``, ``(n,)``, are
    the index of each record's file, its first byte and its number of bytes.
    """

    def __init__(
        self, files: Sequence[Path], file_numbers: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> None:
        self._files, self._file_numbers, self._offsets, self._lengths = files, file_numbers, offsets, lengths
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors)
        for file in files:
            self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))

    def at(self, rows: np.ndarray) -> "FileRecords":
        return FileRecords(self._files, self._file_numbers[rows], self._offsets[rows], self._lengths[rows])

    def name_of(self, index: int) -> str:
        return f"byte {self._offsets[index]} of {self._files[self._file_numbers[index]]}"

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> bytes:
        """Read an encoded image; an OSError if its file has been cut."""
        number, length = int(self._file_numbers[index]), int(self._lengths[index])
        content = os.pread(self._descriptors[number], length, int(self._offsets[index]))
        if len(content) != length:
            raise OSError(0, f"{self._files[number].name} has been cut")
        return content


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
