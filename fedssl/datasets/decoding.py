"""Encoded images to one uint8 tensor: any channels and any size become those of the data set."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from fedssl.errors import InputError
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.machine.room import decode_slot
from fedssl.machine.threads import available_cores
from fedssl.untrusted import open_regular_file, sanitize

# Formats of images that are opened, whatever a file is called: none of them runs a program or fetches a file.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 50_000_000  # of an image, unless dataset.max_pixels says otherwise
_MAX_PIXELS = 178_956_970  # that Pillow takes
_LARGEST_PIXEL = 8  # bytes of a pixel in a file without compression
_PER_PIXEL = 12  # bytes in memory: the decoded image, a turned and a converted copy
_NAMED = 5  # images that a warning names
THREADS = 8  # most threads that decode
DECODE_LOG_INTERVAL = 10.0  # seconds between two lines about a long decoding
VERSION = 2  # of the pixels: another number for other pixels of the same images
_MOVED = 1024  # images moved at a time

log = logging.getLogger("fedssl")

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit here is a lower one


def to_array(image: Image.Image, *, channels: int, size: int) -> np.ndarray:
    """Bring the pixels of an image into the data set's form.

    Grey becomes RGB by repetition, RGB becomes grey by the luma of ITU-R 601, transparency is dropped, 16 bits become
    the upper 8. Another size is brought to ``size`` by scaling the shorter side and cropping the centre.

    Parameters
    ----------
    image : PIL.Image.Image
        Any mode but 32-bit integers and floats, whose range is unknown.
    channels : {1, 3}
        Grey or RGB.
    size : int
        Height and width of the result in pixels.

    Returns
    -------
    ndarray
        uint8, ``(channels, size, size)``.

    Raises
    ------
    InputError
        If the channels cannot be converted.
    """
    if image.mode in ("I", "F"):
        raise InputError(
            f"wrong channels: 32-bit values (mode {image.mode}) of unknown range; "
            "save it as grey, RGB, RGBA or palette with 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels).transpose(2, 0, 1)


def read_image(source: bytes | Path, *, channels: int, size: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode one image, upright by its EXIF orientation, of several frames the first; see `to_array` for the result.

    Raises
    ------
    Exception
        Of any kind: it is no regular file, of no format of `FORMATS`, damaged, or has more than ``max_pixels``.
    """
    stream = (
        BytesIO(source)
        if isinstance(source, bytes)
        else open_regular_file(source, max_bytes=_LARGEST_PIXEL * max_pixels + 2**20)
    )
    with stream, Image.open(stream, formats=FORMATS) as image:
        pixels = image.width * image.height
        if pixels > max_pixels:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels, more than dataset.max_pixels={max_pixels}"
            )
        # A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: a phone's image in a fifth of
        # the time. Twice the target leaves the filter enough to work on. Other formats ignore it.
        image.draft(None, (2 * size, 2 * size))
        needed = _PER_PIXEL * image.width * image.height + (_PER_PIXEL * pixels if "progressive" in image.info else 0)
        with decode_slot(needed, largest=2 * _PER_PIXEL * max_pixels):
            ImageOps.exif_transpose(image, in_place=True)
            return to_array(image, channels=channels, size=size)


def unreadable_summary(unreadable: Mapping[int, str], name: Callable[[int], str], *, count: int) -> str:
    """One line about images that are left out: how many, and the first few with the reasons.

    Raises
    ------
    InputError
        It is all of them.
    """
    named = "; ".join(f"{name(position)} ({reason})" for position, reason in list(unreadable.items())[:_NAMED])
    named += f"; and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    if len(unreadable) == count:
        raise InputError(f"none of the {count} images can be read: {named}; check dataset.path")
    return sanitize(f"{len(unreadable)} of {count} images cannot be read, the rest is used: {named}")


def _reason(error: Exception) -> str:
    """Why an image cannot be decoded, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return sanitize(f"{kind}{text}")[:200]


class PixelBuffer:
    """Memory for the pixels of images, and how far they are decoded; this one is gone with the process.

    Attributes
    ----------
    pixels : ndarray
        uint8, ``(count, channels, size, size)``.
    done : int
        So many images from the first one on are decoded, or known to be unreadable.
    unreadable : dict
        Position of every image before ``done`` that could not be decoded, with the reason.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        self.done = 0
        self.unreadable: dict[int, str] = {}

    def save_progress(self, done: int, unreadable: Mapping[int, str]) -> None:
        """Keep in mind how far decoding has come."""
        self.done, self.unreadable = done, {at: reason for at, reason in unreadable.items() if at < done}

    def drop(self, positions: Collection[int]) -> np.ndarray:
        """Move the other images together, in their order; returns their positions from before."""
        kept = np.delete(np.arange(len(self.pixels)), list(positions))
        self.save_progress(0, {})  # who is stopped from here on must decode again
        for start in range(min(positions), len(kept), _MOVED):
            rows = kept[start : start + _MOVED]
            self.pixels[start : start + len(rows)] = self.pixels[rows]
        self.pixels = self.pixels[: len(kept)]
        return kept

    @property
    def images(self) -> torch.Tensor:
        """The pixels as a tensor."""
        return torch.from_numpy(self.pixels)


def memory_buffer(shape: tuple[int, int, int, int]) -> PixelBuffer:
    """A buffer for images ``(count, channels, size, size)``; raises `InputError` if they do not fit into memory."""
    needed, free = math.prod(shape), available_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{shape[0]:,} images of {shape[1]} x {shape[2]} x {shape[3]} need {gigabytes(needed)} of memory, and "
            f"{gigabytes(free)} are available; have them decoded into a file with dataset.cache=auto or "
            "dataset.cache=FOLDER, or lower dataset.limit or dataset.size"
        )
    return PixelBuffer(np.empty(shape, dtype=np.uint8))


def decode(
    batches: Callable[[int], Iterable[Sequence[bytes | Path]]], buffer: PixelBuffer, *, max_pixels: int = MAX_PIXELS
) -> dict[int, str]:
    """Decode all images that are not on the buffer yet, with a pool of threads.

    Threads fetch the next batch only when they are free, so that no more than one batch per thread waits in memory.
    Every `DECODE_LOG_INTERVAL` seconds a line says how far they have come, and the buffer takes note of it.

    Parameters
    ----------
    batches : callable
        Gives the encoded images or files from a position on, in batches: ``len(buffer.pixels)`` in all from 0 on.
    buffer : PixelBuffer
        Takes the pixels.
    max_pixels : int
        Most pixels of an image; one with more counts as one that cannot be decoded.

    Returns
    -------
    dict
        Position of every image that could not be decoded, with the reason, sorted; its pixels are arbitrary.

    Raises
    ------
    InputError
        If ``max_pixels`` is no number of pixels.
    """
    if not 1 <= max_pixels <= _MAX_PIXELS:
        raise InputError(f"dataset.max_pixels={max_pixels} must be from 1 to {_MAX_PIXELS}; most have 1 to 50 million")
    work = _Work(batches, buffer, max_pixels)
    threads = min(THREADS, available_cores())
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work.run) for _ in range(threads)]
        try:
            while wait(running, timeout=DECODE_LOG_INTERVAL, return_when=FIRST_EXCEPTION).not_done and not work.failed(
                running
            ):
                buffer.save_progress(*work.state())
                work.log_progress()
        finally:  # also where the user stops it
            work.stopped = True
            wait(running)
            buffer.save_progress(*work.state())
    for done in running:
        done.result()
    return dict(sorted(buffer.unreadable.items()))


class _Work:
    """What is left to decode, shared by threads that take it batch by batch."""

    def __init__(
        self, batches: Callable[[int], Iterable[Sequence[bytes | Path]]], buffer: PixelBuffer, max_pixels: int
    ) -> None:
        self.stopped, self._max_pixels = False, max_pixels
        self._pixels, self._unreadable = buffer.pixels, dict(buffer.unreadable)
        self._start, self._begun = buffer.done, time.monotonic()
        self._batches, self._next = iter(batches(buffer.done)), buffer.done
        self._lock, self._open = Lock(), set[int]()

    def run(self) -> None:
        """Decode batches until there are no more."""
        while not self.stopped:
            with self._lock:
                batch = next(self._batches, None)
                if batch is None:
                    return
                start = self._next
                self._next += len(batch)
                self._open.add(start)
            self._decode(batch, start)
            with self._lock:
                self._open.discard(start)

    def _decode(self, batch: Sequence[bytes | Path], start: int) -> None:
        _, channels, size, _ = self._pixels.shape
        for position, source in enumerate(batch, start):
            try:
                image = read_image(source, channels=channels, size=size, max_pixels=self._max_pixels)
                self._pixels[position] = image
            except Exception as error:  # a damaged file can raise almost anything inside the decoder of its format
                self._unreadable[position] = _reason(error)

    def state(self) -> tuple[int, dict[int, str]]:
        """So many images from the first one on are done, and those that could not be read so far."""
        with self._lock:
            return min(self._open, default=self._next), dict(self._unreadable)

    def log_progress(self) -> None:
        """Write a line of how far it is."""
        done, count = self.state()[0], len(self._pixels)
        if done > self._start:
            left = (time.monotonic() - self._begun) / (done - self._start) * (count - done)
            overrides = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
            log.info("decoding %s of %s images, %s left", f"{done:,}", f"{count:,}", overrides)

    @staticmethod
    def failed(running: Sequence[Future[None]]) -> bool:
        """Whether a thread has ended with an exception."""
        return any(one.done() and one.exception() is not None for one in running)
