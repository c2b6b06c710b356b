"""Decoding of many images by a pool of threads into a buffer, whose progress is logged and saved."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

import numpy as np

from fedssl.datasets.decoding import THREADS, Shape, unreadable_reason
from fedssl.datasets.images import ImageSource
from fedssl.machine.process import available_cores

DECODE_LOG_INTERVAL = 10.0  # seconds between two progress lines

log = logging.getLogger("fedssl")


class DecodeBuffer:
    """Target of decoding, and its progress. Subclasses store the images, encoded or decoded.

    Attributes
    ----------
    shape : tuple
        ``(images to decode, channels, size, size)``.
    done : int
        Number of images, from the first, that are decoded or unreadable.
    unreadable : dict
        Index of every unreadable image to the reason, sorted.
    source : ImageSource
        All readable images; exists after `finish`.
    """

    source: ImageSource

    def __init__(self, shape: Shape, *, done: int = 0, unreadable: Mapping[int, str] | None = None) -> None:
        self.shape, self.count = shape, shape[0]
        self.done, self.unreadable = done, dict(unreadable or {})

    @property
    def complete(self) -> bool:
        """Return whether all images are decoded."""
        return self.done == self.count

    @property
    def readable(self) -> np.ndarray:
        """Sorted indices of the readable images, int64."""
        return np.delete(np.arange(self.count), list(self.unreadable))

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        """Record the number of decoded images and the unreadable ones among them."""
        self.done = done
        self.unreadable = {index: reason for index, reason in sorted(unreadable.items()) if index < done}

    def receive(self, batch: Sequence[bytes | Path]) -> None:
        """Take the next encoded images, before they are decoded; called in their order."""

    def write(self, index: int, image: np.ndarray) -> None:
        """Store a decoded image ``(channels, size, size)``; called by all threads, in any order."""

    def finish(self) -> None:
        """Make `source`, after all images are decoded."""


def decode(
    batches: Iterable[Sequence[bytes | Path]], buffer: DecodeBuffer, read: Callable[[bytes | Path], np.ndarray]
) -> None:
    """Decode the images that are not in the buffer yet, with a pool of threads.

    A thread fetches the next batch only when it is free, so that memory holds at most one batch per thread. The
    progress is logged and saved every `DECODE_LOG_INTERVAL` seconds. ``batches`` are encoded images or files from image
    ``buffer.done`` on. Images for which ``read`` raises an exception count as unreadable, and are not written.
    """
    work = _Work(batches, buffer, read)
    threads = min(THREADS, available_cores())
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work.run) for _ in range(threads)]
        try:
            while wait(running, timeout=DECODE_LOG_INTERVAL, return_when=FIRST_EXCEPTION).not_done and not work.failed(
                running
            ):
                buffer.save_progress(*work.progress())
                work.log_progress()
        finally:  # also after Ctrl-C
            work.stopped = True
            wait(running)
            buffer.save_progress(*work.progress())
    for future in running:
        future.result()


class _Work:
    """Batches to decode, shared by threads that process one at a time."""

    def __init__(
        self,
        batches: Iterable[Sequence[bytes | Path]],
        buffer: DecodeBuffer,
        read: Callable[[bytes | Path], np.ndarray],
    ) -> None:
        self.stopped, self._read = False, read
        self._buffer, self._unreadable = buffer, dict(buffer.unreadable)
        self._start, self._start_time = buffer.done, time.monotonic()
        self._batches, self._next = iter(batches), buffer.done
        self._lock, self._open = Lock(), set[int]()

    def run(self) -> None:
        while not self.stopped:
            with self._lock:
                batch = next(self._batches, None)
                if batch is None:
                    return
                self._buffer.receive(batch)
                start = self._next
                self._next += len(batch)
                self._open.add(start)
            self._decode(batch, start)
            with self._lock:
                self._open.discard(start)

    def _decode(self, batch: Sequence[bytes | Path], start: int) -> None:
        for index, source in enumerate(batch, start):
            try:
                image = self._read(source)
            except Exception as error:  # a damaged file can raise any exception in the decoder of its format
                self._unreadable[index] = unreadable_reason(error)
            else:
                self._buffer.write(index, image)

    def progress(self) -> tuple[int, dict[int, str]]:
        """Return the number of images, from the first, that are done, and the unreadable ones."""
        with self._lock:
            return min(self._open, default=self._next), dict(self._unreadable)

    def log_progress(self) -> None:
        done, count = self.progress()[0], self._buffer.count
        if done > self._start:
            seconds = (time.monotonic() - self._start_time) / (done - self._start) * (count - done)
            remaining = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            log.info("decoding %s of %s images, %s left", f"{done:,}", f"{count:,}", remaining)

    @staticmethod
    def failed(running: Sequence[Future[None]]) -> bool:
        return any(future.done() and future.exception() is not None for future in running)
