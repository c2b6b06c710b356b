"""Decoding of encoded images to pixels in the data set's channels and size.

An encoded image is a file or its bytes, or one page of a file: a page of TIFF, a frame of DICOM, a slice of a volume.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedssl.config.constraints import check_arguments
from fedssl.datasets.formats import FORMATS, register_formats
from fedssl.datasets.pages import Pages, open_pages, stacked
from fedssl.datasets.pixels import to_array
from fedssl.datasets.raster import PixelSettings, Raster, convert, widest
from fedssl.errors import InputError, sanitize
from fedssl.machine.memory import decode_slot
from fedssl.safe_io import FilePath


class Page(NamedTuple):
    """One of several images in a file."""

    file: FilePath
    number: int  # from 0
    depth: int = 1  # number of successive pages that are the channels of the image

    def __str__(self) -> str:
        return f"{self.file}[{self.number}]"


class Bands(NamedTuple):
    """An image whose channels are in files of their own, of any resolutions."""

    files: tuple[FilePath, ...]  # of one folder


Encoded = bytes | FilePath | Page | Bands  # the bytes of an image, its file, its page, or its files
Value = TypeVar("Value")
Shape = tuple[int, int, int, int]  # (images, channels, height, width)

MAX_PIXELS = 50_000_000  # per image, default of dataset.max_pixels
_BYTES_PER_PIXEL = 16  # in memory: the decoded image, and a turned, a converted and an opaque copy
_SAMPLE = 16  # images whose dtypes are compared, at equal distances
THREADS = 8  # maximum number of decoding threads
VERSION = 11  # of decoded pixels and cache files; increase it if the same images give other pixels

register_formats()

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit here is lower
warnings.filterwarnings("ignore", "Palette images with Transparency")  # `to_array` respects it
warnings.filterwarnings("ignore", "Corrupt EXIF data")  # of TIFF, whose magic number DICOM may have; pixels are checked


@dataclass(frozen=True, kw_only=True)
class Decoding(PixelSettings):
    """Settings of encoded images; those with more than ``max_pixels`` are unreadable.

    With ``dtype="auto"``, ``found_dtype`` is that of a sample of the images: images that need a wider one are
    unreadable. None for no sample: each image has its own dtype.
    """

    max_pixels: int = MAX_PIXELS
    video_interval: float = 1.0
    found_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arguments("dataset", max_pixels=self.max_pixels, video_interval=self.video_interval)

    @property
    def pixel_dtype(self) -> str:
        """Dtype of all pixels; an `AssertionError` if it is not known."""
        dtype = self.found_dtype if self.dtype == "auto" else self.dtype
        assert dtype is not None, "the images have no common dtype"
        return dtype

    def with_found_dtype(self, sample: Iterable[Encoded]) -> "Decoding":
        """Return the settings with ``found_dtype`` of a sample of the images, unless the dtype is known."""
        if self.dtype != "auto" or self.found_dtype is not None:
            return self
        listed = list(islice(sample, 4 * _SAMPLE))
        images = self.each(listed[:: -(-len(listed) // _SAMPLE) or 1])  # also of the last classes
        found = {str(image.dtype) for image in images if isinstance(image, np.ndarray)}
        return replace(self, found_dtype=widest(found))

    def __call__(self, source: Encoded) -> np.ndarray:
        """Decode an image as `fedssl.datasets.pixels.to_array` returns it.

        Exceptions can have any type: the file is not regular, damaged, of no known format, or too large.
        """
        if isinstance(source, Bands):
            band = replace(self, channels=1)
            return np.concatenate([band(file) for file in source.files])
        with open_source(source, self) as (_, image):
            return _decode(image, self)

    def each(self, sources: Iterable[Encoded]) -> Iterator[np.ndarray | Exception]:
        """Yield each decoded image, or the exception in its place. A file is opened once for successive pages."""
        for is_image, group in groupby(sources, lambda source: isinstance(source, Bands)):
            if is_image:
                yield from (_attempt(partial(self, source)) for source in group)
            else:
                yield from self.each_opened(group, lambda _, image: _decode(image, self))

    def each_opened(
        self, sources: Iterable[Encoded], use: Callable[[Pages, Image.Image | Raster], Value]
    ) -> Iterator[Value | Exception]:
        """Yield what ``use`` returns for the file and the image of each source, or the exception in its place."""
        for file, group in groupby(map(_place, sources), lambda place: place[0]):
            places = list(group)
            try:
                with _open(file, self) as opened:
                    while places:
                        _, number, depth = places.pop(0)
                        yield _attempt(lambda: use(opened, _picture(opened, number, depth, self)))  # noqa: B023, called at once
            except Exception as error:  # while the file was opened
                yield from [error] * len(places)


@contextmanager
def open_source(source: Encoded, decoding: Decoding) -> Iterator[tuple[Pages, Image.Image | Raster]]:
    """Open a source, without decoding it; yield its file and the image. Exceptions as in `Decoding`."""
    file, number, depth = _place(source)
    with _open(file, decoding) as pages:
        yield pages, _picture(pages, number, depth, decoding)


def _place(source: Encoded) -> tuple[bytes | FilePath, int, int]:
    """Return the file of a source, the first of several, the number of its first page and the number of pages."""
    if isinstance(source, Page):
        return source
    return (source.files[0] if isinstance(source, Bands) else source), 0, 1


def _open(file: bytes | FilePath, decoding: Decoding) -> AbstractContextManager[Pages]:
    return open_pages(
        file,
        max_pixels=decoding.max_pixels,
        channels=decoding.channels,
        size=decoding.size,
        video_interval=decoding.video_interval,
    )


def unreadable_reason(error: Exception) -> str:
    """Return why an image cannot be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return sanitize(f"{kind}{text}")[:200]


def _picture(pages: Pages, number: int, depth: int, decoding: Decoding) -> Image.Image | Raster:
    if depth > 1:
        return stacked(pages, number, depth, decoding, max_pixels=decoding.max_pixels)
    image = pages.page(number)
    if decoding.channels not in (1, 3) and pages.count > 1:
        _check_page(image, count=pages.count, channels=decoding.channels)
    return image


def _check_page(image: Image.Image | Raster, *, count: int, channels: int) -> None:
    """Raise an `InputError` for a page with one of several channels: tifffile stores an array as pages by default."""
    height, width, found = (
        image.shape if isinstance(image, Raster) else (image.height, image.width, len(image.getbands()))
    )
    if found > 1:
        return
    if width == channels != height:
        remedy = "if its last axis has channels, save it with photometric='minisblack', planarconfig='contig'"
    elif count % channels == 0:
        remedy = "set dataset.pages=channels"
    else:
        remedy = "set dataset.channels=1, with one number in dataset.mean and dataset.std"
    raise InputError(
        f"it has {count} pages of 1 channel, {width} x {height} pixels, but dataset.channels={channels}; {remedy}"
    )


def _attempt(decode: Callable[[], Value]) -> Value | Exception:
    try:
        return decode()
    except Exception as error:  # a damaged file can raise any exception in the decoder of its format
        return error


def _decode(image: Image.Image | Raster, decoding: Decoding) -> np.ndarray:
    if isinstance(image, Raster):
        needed = _BYTES_PER_PIXEL * math.prod(image.shape)
    else:
        needed = _BYTES_PER_PIXEL * image.width * image.height if "progressive" in image.info else 0
        # A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: a phone's image in a fifth of the
        # time. Twice the target size is enough for the resampling filter. Other formats ignore it.
        image.draft(None, (2 * decoding.size, 2 * decoding.size))
        needed += _BYTES_PER_PIXEL * image.width * image.height
    with decode_slot(needed, largest=2 * _BYTES_PER_PIXEL * decoding.max_pixels):
        pixels = to_array(image, decoding)
    if decoding.found_dtype is None:
        return pixels
    if widest([str(pixels.dtype), decoding.found_dtype]) != decoding.found_dtype:
        raise InputError(
            f"it needs dtype {pixels.dtype}, and a sample of the images {decoding.found_dtype}; set "
            f"dataset.dtype={pixels.dtype}, or dataset.dtype=uint8 for 8 bits"
        )
    return convert(pixels, decoding.found_dtype)
