"""Targets of decoding in the memory of this process: pixels, or encoded images that are known to be readable."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedssl.datasets.decode_buffer import DecodeBuffer
from fedssl.datasets.decoding import Decoding, Shape
from fedssl.datasets.images import EncodedImages, ImageSource, TensorImages
from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes

_COPY_CHUNK = 1024  # images copied at a time


@dataclass(frozen=True)
class EncodedInput:
    """Encoded images as their source offers them."""

    records: Sequence[bytes | Path] | None  # by index, where they are; None if they must be copied to be found again
    num_bytes: int  # of a copy, approximately
    decoding: Decoding


class StoredBuffer(DecodeBuffer):
    """Images that an earlier process has decoded completely."""

    def __init__(self, source: ImageSource, *, count: int, unreadable: Mapping[int, str]) -> None:
        super().__init__((count, *source.shape[1:]), done=count, unreadable=unreadable)
        self.source = source


class PixelBuffer(DecodeBuffer):
    """Decoded images ``images``, a uint8 array of the buffer's shape."""

    def __init__(self, images: np.ndarray, *, done: int = 0, unreadable: Mapping[int, str] | None = None) -> None:
        count, channels, size, _ = images.shape
        super().__init__((count, channels, size, size), done=done, unreadable=unreadable)
        self.images = images

    def write(self, index: int, image: np.ndarray) -> None:
        self.images[index] = image

    def drop_unreadable(self) -> None:
        """Move the readable images together, in their order."""
        if not self.unreadable:
            return
        unreadable, kept = self.unreadable, self.readable
        self.save_progress(0, {})  # after an interruption all images must be decoded again
        for start in range(min(unreadable), len(kept), _COPY_CHUNK):
            rows = kept[start : start + _COPY_CHUNK]
            self.images[start : start + len(rows)] = self.images[rows]
        self.images = self.images[: len(kept)]
        self.done, self.unreadable = self.count, unreadable

    def finish(self) -> None:
        self.drop_unreadable()
        self.source = TensorImages(torch.from_numpy(self.images))


class RecordBuffer(DecodeBuffer):
    """Encoded images that stay where they are, or are copied into the memory of this process.

    Decoding finds the unreadable ones, since a correct header is no proof of a readable image. Pixels are discarded.
    """

    def __init__(
        self, shape: Shape, encoded: EncodedInput, *, done: int = 0, unreadable: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(shape, done=done, unreadable=unreadable)
        self._decoding = encoded.decoding
        self.records: Sequence[bytes | Path] | None = encoded.records
        self._copies: list[bytes | Path] = []

    def receive(self, batch: Sequence[bytes | Path]) -> None:
        if self.records is None:
            self._copies += batch

    def finish(self) -> None:
        records = self._copies if self.records is None else self.records
        self.source = EncodedImages(records, self.readable, self._decoding)


def memory_buffer(shape: Shape) -> PixelBuffer:
    """Return a buffer in memory for images of this shape; `InputError` if memory is too small."""
    _check_memory(
        math.prod(shape),
        f"{shape[0]:,} images of {shape[1]} x {shape[2]} x {shape[3]}",
        "decode them into a file with dataset.cache=auto or dataset.cache=FOLDER, leave them encoded with "
        "dataset.storage=encoded",
    )
    return PixelBuffer(np.empty(shape, dtype=np.uint8))


def record_buffer(shape: Shape, encoded: EncodedInput) -> RecordBuffer:
    """Return a buffer of encoded images without a file; `InputError` if they are copied and memory is too small."""
    if encoded.records is None:
        remedy = "copy them into a file with dataset.cache=auto or dataset.cache=FOLDER"
        _check_memory(encoded.num_bytes, f"{shape[0]:,} encoded images", remedy)
    return RecordBuffer(shape, encoded)


def _check_memory(needed: int, what: str, remedy: str) -> None:
    free = available_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{what} need {gigabytes(needed)} of memory, and {gigabytes(free)} are available; {remedy}, or lower "
            "dataset.limit or dataset.size"
        )
