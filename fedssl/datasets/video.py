"""Frames of videos at an interval, read by PyAV: the first at or after each multiple of it, from the first frame on.

Frames are turned as the file states. Only the file itself is read: its container is that of its magic number, so that
no playlist is opened, and references to other files are refused.
"""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from typing import IO, Any, NoReturn

import av
import numpy as np
from PIL import Image

from fedssl.datasets.formats import HEAD_BYTES, video_container
from fedssl.datasets.pages import Pages, check_count, check_shape
from fedssl.datasets.raster import Raster

_BYTES_PER_PAGE = 16  # of the file, at least
_MAX_SKIPPED = 16  # pages that are decoded rather than searched
_INDEXED = ("mov", "avi", "matroska")  # MPEG has no index, and its times after a search may be wrong
_EPSILON = 1e-6  # seconds, by which rounded times may differ


class _Frames(Pages):
    def __init__(self, stream: IO[bytes], kind: str, *, max_pixels: int, interval: float) -> None:
        self._stream, self._kind, self._max_pixels, self._interval = stream, kind, max_pixels, interval
        self._size = stream.seek(0, 2)
        self._container: Any = None
        self._video: Any = None
        self._next, self._chosen = 0, self._from(0)

    def close(self) -> None:
        """Close the file."""
        if self._container is not None:
            self._container.close()

    @property
    def count(self) -> int:
        """Number of the intervals, by the times of all packets: a declared duration may be that of the sound."""
        first = self._open()
        times = [_time(packet) for packet in self._container.demux(self._video) if packet.size]
        last = max((time for time in times if time is not None), default=first)
        count = 1 + max(0, math.floor((last - first) / self._interval + _EPSILON))
        check_count(count)
        if count > 1 + self._size // _BYTES_PER_PAGE:
            raise ValueError(f"it has {self._size:,} bytes, and its times are those of {count:,} frames")
        self._next, self._chosen = 0, self._from(0)
        return count

    def page(self, number: int) -> Image.Image | Raster:
        if not self._next <= number < self._next + _MAX_SKIPPED:
            self._next, self._chosen = number, self._from(number)
        frame = next(islice(self._chosen, number - self._next, None), None)
        self._next = number + 1
        if frame is None:
            raise EOFError(f"it ends before {number * self._interval:g} seconds")
        self._check(frame)
        bits = max(component.bits for component in frame.format.components)
        is_gray = len(frame.format.components) == 1 and not frame.format.has_palette
        turns = round(frame.rotation / 90)
        if bits <= 8:
            values = frame.to_ndarray(format="gray" if is_gray else "rgb24")
            return Image.fromarray(np.ascontiguousarray(np.rot90(values, turns)))
        height, width = (frame.height, frame.width)[:: -1 if turns % 2 else 1]
        kind = "gray16le" if is_gray else "rgb48le"
        shape = (height, width, 1 if is_gray else 3)
        return Raster(shape=shape, load=lambda: np.rot90(frame.to_ndarray(format=kind), turns))

    def _check(self, frame: Any) -> None:
        check_shape((frame.height, frame.width, 1), max_pixels=self._max_pixels)

    def _open(self) -> float:
        """Open the file at its start; return the time of its first frame."""
        self.close()
        self._stream.seek(0)
        options = {"max_pixels": str(self._max_pixels)}
        self._container = av.open(self._stream, format=self._kind, options=options, io_open=_refuse)
        pictures = av.stream.Disposition.attached_pic
        videos = [video for video in self._container.streams.video if not video.disposition & pictures]
        if not videos:
            raise ValueError("it has no video")
        self._video = videos[0]
        self._video.codec_context.thread_count = 1  # there are several decoding threads
        self._check(self._video.codec_context)
        return float((self._video.start_time or 0) * self._video.time_base)

    def _from(self, number: int) -> Iterator[Any]:
        """Yield the frames from a number on."""
        first = self._open()
        frames = self._decoded()
        if number and self._kind in _INDEXED:
            with suppress(av.error.FFmpegError):  # to a key frame before it
                self._container.seek(int((first + number * self._interval) / self._video.time_base), stream=self._video)
            head = next(frames, None)
            if head is None or head[0] > first + number * self._interval:
                self._open()
                frames = self._decoded()
            else:
                frames = chain([head], frames)
        for time, frame in frames:
            while time - first >= number * self._interval - _EPSILON:
                yield frame
                number += 1

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        """Yield the frames with their times; what cannot be decoded is left out."""
        for packet in self._container.demux(self._video):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                continue
            for frame in frames:
                time = _time(frame)
                if time is None:
                    raise ValueError("its frames have no times; convert it to MP4")
                if not frame.is_corrupt:
                    yield time, frame


@contextmanager
def opened(stream: IO[bytes], *, max_pixels: int, interval: float) -> Iterator[Pages]:
    """Open a file; the arguments are those of `fedssl.datasets.pages.open_pages`."""
    kind = video_container(stream.read(HEAD_BYTES))
    assert kind is not None
    with closing(_Frames(stream, kind, max_pixels=max_pixels, interval=interval)) as pages:
        yield pages


def _refuse(*_: object) -> NoReturn:
    raise ValueError("it refers to another file")


def _time(timed: Any) -> float | None:
    """Return the time of a packet or a frame in seconds; None if it has none."""
    stamp = timed.pts if timed.pts is not None else timed.dts
    return None if stamp is None else float(stamp * timed.time_base)
