"""Images of a data set in one of three storages: a tensor, a mapped file of pixels, or encoded images.

All are indexed like an array and give the same pixels. `ImageSource.prefetch` reads ahead of its caller: the kernel
reads the rows of a mapped file, and threads decode encoded images.
"""

import math
import mmap
import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedssl.datasets.decoding import THREADS, Decoding, Encoded, unreadable_reason
from fedssl.datasets.raster import torch_dtype
from fedssl.errors import InputError
from fedssl.logs import log
from fedssl.machine.devices import free_memory, is_gpu
from fedssl.machine.memory import gigabytes
from fedssl.machine.process import available_cores

AHEAD = 4  # maximum number of batches that are read ahead
AHEAD_BYTES = 2**27  # of decoded images that are read ahead, but at least one batch
READ_AHEAD_BYTES = 2**15  # of a decoded image; smaller ones are copied in less time than a call of the kernel takes
_TASK = 8  # images decoded by a thread at a time


class ImageSource(ABC):
    """Images ``(n, channels, height, width)`` of a dtype of `fedssl.datasets.raster.MAXIMA`, on one device.

    ``images[rows]`` returns a tensor for indices, int64, or a slice. A copy of all images may not fit into memory.
    """

    shape: tuple[int, int, int, int]
    dtype = torch.uint8
    device = torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Size of all images as a tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def __getitem__(self, rows: Tensor | slice) -> Tensor: ...

    @abstractmethod
    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each batch of indices in order, and read some batches ahead."""

    @abstractmethod
    def subset(self, rows: Tensor) -> "ImageSource":
        """Return the images at ``rows``, in that order."""

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield all images in order, ``size`` at a time."""
        return self.prefetch(torch.arange(len(self)).split(size))

    def to(self, device: torch.device) -> "ImageSource":
        """Return the images on a device, or unchanged if they are no tensor."""
        return self

    def place(self, device: torch.device) -> "ImageSource":
        """Return the images on a device, or unchanged if they are no tensor or would fill half of its free memory.

        The other half remains for the model, its activations and other processes. On a CPU nothing is copied.
        """
        return self


class TensorImages(ImageSource):
    """Images of a tensor, which nothing needs to be read for."""

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            found = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise InputError(f"images are {found}; give a tensor of shape (n, channels, height, width)")
        count, channels, height, width = tensor.shape
        self.tensor, self.shape = tensor, (count, channels, height, width)
        self.dtype, self.device = tensor.dtype, tensor.device

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        return self.tensor[rows] if isinstance(rows, slice) else self.tensor.index_select(0, rows.to(self.device))

    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        return (self[rows] for rows in batches)

    def subset(self, rows: Tensor) -> "TensorImages":
        return TensorImages(self[rows])

    def chunks(self, size: int) -> Iterator[Tensor]:
        return iter(self.tensor.split(size))  # views

    def to(self, device: torch.device) -> ImageSource:
        return self if device == self.device else TensorImages(self.tensor.to(device))

    def place(self, device: torch.device) -> ImageSource:
        if is_gpu(device):
            free = free_memory(device)
            if 2 * self.nbytes > free:
                log.info(
                    "the images (%s) stay in host memory, because the GPU has %s free; batches are copied to the GPU",
                    *(gigabytes(self.nbytes), gigabytes(free)),
                )
                return self
        return self.to(device)


class MappedImages(TensorImages):
    """Decoded images in a mapped file, which all processes of a host share. Pages are reread if memory is scarce."""

    def __init__(self, mapped: mmap.mmap, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.uint8) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            super().__init__(torch.frombuffer(mapped, dtype=dtype).view(shape))
        self._mapped = mapped

    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        image_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        waiting: deque[Tensor] = deque()
        for rows in batches:
            self._read_ahead(rows)
            waiting.append(rows)
            if len(waiting) > _batches_ahead(len(rows) * image_bytes):
                yield self[waiting.popleft()]
        yield from (self[rows] for rows in waiting)

    def _read_ahead(self, rows: Tensor) -> None:
        """Let the kernel read the pages of some images, without waiting for them."""
        image_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if image_bytes < READ_AHEAD_BYTES:
            return
        for row in rows.tolist():
            start = row * image_bytes
            page = start - start % mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_WILLNEED, page, start + image_bytes - page)


class EncodedImages(ImageSource):
    """Encoded images that are decoded when they are used, by a pool of threads.

    ``rows`` are the indices of the readable ``records``, int64, ``(n,)``. The dtype of ``decoding`` is known.
    """

    def __init__(self, records: Sequence[Encoded], rows: np.ndarray, decoding: Decoding) -> None:
        self.shape = (len(rows), decoding.channels, decoding.size, decoding.size)
        self._records, self._rows, self._decoding = records, rows, decoding
        self.dtype = torch_dtype(decoding.pixel_dtype)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        chosen = rows if isinstance(rows, slice) else rows.numpy()
        return _finish(*self._start(self._rows[chosen]))

    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        started: deque[tuple[np.ndarray, list[Future[None]]]] = deque()
        try:
            for rows in batches:
                started.append(self._start(self._rows[rows.numpy()]))
                if len(started) > _batches_ahead(started[-1][0].nbytes):
                    yield _finish(*started.popleft())
            while started:
                yield _finish(*started.popleft())
        finally:
            for _, tasks in started:
                for task in tasks:
                    task.cancel()

    def subset(self, rows: Tensor) -> "EncodedImages":
        return EncodedImages(self._records, self._rows[rows.numpy()], self._decoding)

    def _start(self, rows: np.ndarray) -> tuple[np.ndarray, list[Future[None]]]:
        """Start the decoding of some records; return the array and the threads that fill it."""
        images = np.empty((len(rows), *self.shape[1:]), dtype=self._decoding.pixel_dtype)
        pieces = [slice(start, start + _TASK) for start in range(0, len(rows), _TASK)]
        return images, [_pool().submit(self._decode, rows[piece], images[piece]) for piece in pieces]

    def _decode(self, rows: np.ndarray, images: np.ndarray) -> None:
        for number, row in enumerate(rows):
            try:
                images[number] = self._decoding(self._records[row])
            except Exception as error:  # a changed file can raise any exception in the decoder of its format
                raise InputError(
                    f"image {row} of the data set was readable and is no longer ({unreadable_reason(error)}); start "
                    "again, and do not change the files of a data set during a run"
                ) from error


class SelectedImages(ImageSource):
    """Images of a source at ``rows``, int64 ``(n,)``, not copied; a subclass may change them when they are read."""

    def __init__(self, source: ImageSource, rows: Tensor) -> None:
        self.source, self.rows = source, rows.to(source.device)
        self.shape, self.dtype, self.device = (len(rows), *source.shape[1:]), source.dtype, source.device

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        chosen = self.rows[rows if isinstance(rows, slice) else rows.to(self.device)]
        return self.changed(self.source[chosen], chosen)

    def prefetch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        waiting: deque[Tensor] = deque()

        def chosen() -> Iterator[Tensor]:
            for batch in batches:
                waiting.append(self.rows[batch.to(self.device)])
                yield waiting[-1]

        for images in self.source.prefetch(chosen()):
            yield self.changed(images, waiting.popleft())

    def subset(self, rows: Tensor) -> "SelectedImages":
        return self.of(self.source, self.rows[rows.to(self.device)])

    def to(self, device: torch.device) -> "SelectedImages":
        return self.of(self.source.to(device), self.rows)

    def place(self, device: torch.device) -> "SelectedImages":
        return self.of(self.source.place(device), self.rows)

    def of(self, source: ImageSource, rows: Tensor) -> "SelectedImages":
        """Return images of another source, or at other rows of it, with the same changes."""
        return SelectedImages(source, rows)

    def changed(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images that belong to these rows of the source."""
        return images


def _finish(images: np.ndarray, tasks: Iterable[Future[None]]) -> Tensor:
    for task in tasks:
        task.result()
    return torch.from_numpy(images)


def _batches_ahead(num_bytes: int) -> int:
    """Return how many batches of this size are read ahead."""
    return min(max(AHEAD_BYTES // max(num_bytes, 1), 1), AHEAD)


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the decoding threads of this process."""
    return ThreadPoolExecutor(min(THREADS, available_cores()), thread_name_prefix="decode")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no threads
