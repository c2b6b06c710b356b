"""Decoding of encoded images to uint8 pixels in the data set's channels and size."""

import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from fedssl.config.constraints import check_arguments
from fedssl.datasets.formats import FORMATS, HEIF_INSTALLED
from fedssl.datasets.pixels import BACKGROUND, to_array
from fedssl.errors import InputError
from fedssl.machine.memory import decode_slot
from fedssl.machine.process import available_cores
from fedssl.safe_io import open_regular_file, sanitize

if TYPE_CHECKING:
    from fedssl.datasets.images import ImageSource

Shape = tuple[int, int, int, int]  # (images, channels, height, width)

MAX_PIXELS = 50_000_000  # per image, default of dataset.max_pixels
_MAX_BYTES_PER_PIXEL = 8  # in an uncompressed file
_BYTES_PER_PIXEL = 16  # in memory: the decoded image, and a turned, a converted and an opaque copy
_MAX_LISTED = 5  # images listed in a warning
THREADS = 8  # maximum number of decoding threads
DECODE_LOG_INTERVAL = 10.0  # seconds between two progress lines
VERSION = 4  # of decoded pixels and cache files; increase it if the same images give other pixels

log = logging.getLogger("fedssl")

if HEIF_INSTALLED:
    import_module("pillow_heif").register_heif_opener(thumbnails=False)

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit here is lower
warnings.filterwarnings("ignore", "Palette images with Transparency")  # `to_array` respects it


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings on which the pixels of encoded images depend; see `fedssl.datasets.pixels.to_array`."""

    channels: int
    size: int
    background: int = BACKGROUND
    max_value: float | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        check_arguments("dataset", **vars(self))

    def __call__(self, source: bytes | Path) -> np.ndarray:
        """Decode an image, see `read_image`."""
        return read_image(source, **vars(self))


def read_image(
    source: bytes | Path,
    *,
    channels: int,
    size: int,
    background: int = BACKGROUND,
    max_value: float | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode the first frame of an image as `fedssl.datasets.pixels.to_array` returns it.

    Exceptions can have any type: the file is not regular, damaged, of no format of `FORMATS`, or has more than
    ``max_pixels``.
    """
    with open_image(source, max_pixels=max_pixels) as image:
        pixels = image.width * image.height
        # A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: a phone's image in a fifth of
        # the time. Twice the target size is enough for the resampling filter. Other formats ignore it.
        image.draft(None, (2 * size, 2 * size))
        needed = _BYTES_PER_PIXEL * image.width * image.height + (
            _BYTES_PER_PIXEL * pixels if "progressive" in image.info else 0
        )
        with decode_slot(needed, largest=2 * _BYTES_PER_PIXEL * max_pixels):
            return to_array(image, channels=channels, size=size, background=background, max_value=max_value)


def max_file_bytes(max_pixels: int) -> int:
    """Return the maximum size of an image file."""
    return _MAX_BYTES_PER_PIXEL * max_pixels + 2**20


@contextmanager
def open_image(source: bytes | Path, *, max_pixels: int) -> Iterator[ImageFile.ImageFile]:
    """Open an image of `FORMATS` with at most ``max_pixels``, without decoding it; exceptions as in `read_image`."""
    stream = (
        BytesIO(source)
        if isinstance(source, bytes)
        else open_regular_file(source, max_bytes=max_file_bytes(max_pixels))
    )
    with stream, Image.open(stream, formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels, more than dataset.max_pixels={max_pixels}"
            )
        yield image


def unreadable_summary(unreadable: Mapping[int, str], name: Callable[[int], str], *, count: int) -> tuple[str, ...]:
    """Return one warning about unreadable images, with the first few and their reasons; empty if there are none.

    ``unreadable`` maps indices to reasons, ``name`` an index to the name of the image. Raise an `InputError` if all
    ``count`` images are unreadable.
    """
    if not unreadable:
        return ()
    listed = "; ".join(f"{name(index)} ({reason})" for index, reason in list(unreadable.items())[:_MAX_LISTED])
    listed += f"; and {len(unreadable) - _MAX_LISTED} more" if len(unreadable) > _MAX_LISTED else ""
    if len(unreadable) == count:
        raise InputError(f"none of the {count} images can be read: {listed}; check dataset.path")
    return (sanitize(f"{len(unreadable)} of {count} images cannot be read, the rest is used: {listed}"),)


def unreadable_reason(error: Exception) -> str:
    """Return why an image cannot be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return sanitize(f"{kind}{text}")[:200]


class DecodeBuffer(ABC):
    """Target of decoding, and its progress.

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

    source: "ImageSource"

    def __init__(self, shape: Shape, *, done: int = 0, unreadable: Mapping[int, str] | None = None) -> None:
        self.shape, self.count = shape, shape[0]
        self.done, self.unreadable = done, dict(unreadable or {})

    @property
    def complete(self) -> bool:
        """Whether all images are decoded."""
        return self.done == self.count

    @property
    def readable(self) -> np.ndarray:
        """Sorted indices of the readable images, int64."""
        return np.delete(np.arange(self.count), list(self.unreadable))

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        """Record the number of decoded images and the unreadable ones among them."""
        self.done = done
        self.unreadable = {index: reason for index, reason in sorted(unreadable.items()) if index < done}

    @abstractmethod
    def receive(self, batch: Sequence[bytes | Path]) -> None:
        """Take the next encoded images, before they are decoded; called in their order."""

    @abstractmethod
    def write(self, index: int, image: np.ndarray) -> None:
        """Store a decoded image ``(channels, size, size)``; called by all threads, in any order."""

    @abstractmethod
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
