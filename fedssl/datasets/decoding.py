"""Decoding of encoded images to uint8 pixels in the data set's channels and size."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.lib import format as npy
from PIL import Image, UnidentifiedImageError

from fedssl.config.constraints import check_arguments
from fedssl.datasets.formats import FORMATS, register_formats
from fedssl.datasets.pixels import BACKGROUND, check_window, to_array
from fedssl.machine.memory import decode_slot
from fedssl.safe_io import FilePath, open_regular_file, sanitize

Encoded = bytes | FilePath  # the bytes of an image, or its file
Shape = tuple[int, int, int, int]  # (images, channels, height, width)

MAX_PIXELS = 50_000_000  # per image, default of dataset.max_pixels
_MAX_BYTES_PER_PIXEL = 8  # in an uncompressed file
_BYTES_PER_PIXEL = 16  # in memory: the decoded image, and a turned, a converted and an opaque copy
THREADS = 8  # maximum number of decoding threads
VERSION = 4  # of decoded pixels and cache files; increase it if the same images give other pixels

log = logging.getLogger("fedssl")

register_formats()

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit here is lower
warnings.filterwarnings("ignore", "Palette images with Transparency")  # `to_array` respects it


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings on which the pixels of encoded images depend; see `fedssl.datasets.pixels.to_array`."""

    channels: int
    size: int
    background: int = BACKGROUND
    window: Sequence[float] | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        check_arguments("dataset", **vars(self))
        check_window(self.window)

    def __call__(self, source: Encoded) -> np.ndarray:
        """Decode the first frame of an image as `fedssl.datasets.pixels.to_array` returns it.

        Exceptions can have any type: the file is not regular, damaged, of no format of `FORMATS`, or has more than
        ``max_pixels``.
        """
        with open_image(source, max_pixels=self.max_pixels) as image:
            needed = _BYTES_PER_PIXEL * image.width * image.height if "progressive" in image.info else 0
            # A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: a phone's image in a fifth of
            # the time. Twice the target size is enough for the resampling filter. Other formats ignore it.
            image.draft(None, (2 * self.size, 2 * self.size))
            needed += _BYTES_PER_PIXEL * image.width * image.height
            with decode_slot(needed, largest=2 * _BYTES_PER_PIXEL * self.max_pixels):
                return to_array(
                    image,
                    channels=self.channels,
                    size=self.size,
                    background=self.background,
                    window=self.window,
                )


def max_file_bytes(max_pixels: int) -> int:
    """Return the maximum size of an image file."""
    return _MAX_BYTES_PER_PIXEL * max_pixels + 2**20


@contextmanager
def open_image(source: Encoded, *, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image of `FORMATS` with at most ``max_pixels``, without decoding it; exceptions as in `Decoding`."""
    stream = (
        BytesIO(source)
        if isinstance(source, bytes)
        else open_regular_file(source, max_bytes=max_file_bytes(max_pixels))
    )
    with stream, _open_array(source) or Image.open(stream, formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError(
                f"it has {image.width:,} x {image.height:,} pixels, more than dataset.max_pixels={max_pixels}"
            )
        yield image


def _open_array(source: Encoded) -> Image.Image | None:
    """Return the image of an NPY file; None for other files."""
    if not isinstance(source, bytes) or not source.startswith(npy.MAGIC_PREFIX):
        return None
    return Image.fromarray(npy.read_array(BytesIO(source), allow_pickle=False))


def unreadable_reason(error: Exception) -> str:
    """Return why an image cannot be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return sanitize(f"{kind}{text}")[:200]
