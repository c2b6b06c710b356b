"""Images in an opened file: one, or its pages, frames or slices."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from io import SEEK_END, BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import IMAGEDESCRIPTION, TiffImageFile

from fedssl.config.constraint_table import MAX_CHANNELS
from fedssl.datasets.formats import (
    DICOM_MAGIC,
    DICOM_PREAMBLE,
    FORMATS,
    HEAD_BYTES,
    INSTALLED,
    PACKAGES,
    SEVERAL,
    is_zarr,
    module_of,
    require_package,
)
from fedssl.datasets.pixels import FILE_BITS, is_deep_color, is_misread, raster_of
from fedssl.datasets.raster import PixelSettings, Raster, narrowest_dtype, scaled_values, widest
from fedssl.datasets.tiff_chain import MAX_PAGES, image_pages
from fedssl.safe_io import FilePath, open_regular_file

_OME_ORDER, _OME_SIZE = re.compile(r'DimensionOrder="XY([ZCT]{3})"'), re.compile(r'Size([ZCT])="(\d{1,9})"')
_MAX_SAMPLES = 4  # per pixel of an image with as many pixels as are allowed; of smaller ones more
logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)  # it reports what tifffile then reads
_MAX_BYTES_PER_PIXEL = 8  # in an uncompressed file
_META_BYTES = 2**16  # of AVIF and HEIC, before the pixels
_FRAME_BYTES = 38  # of a frame of PNG without its pixels


Value = TypeVar("Value")


class Pages(ABC):
    """Images of an opened file."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of the images."""

    @abstractmethod
    def page(self, number: int) -> Image.Image | Raster:
        """Return an image, which is not loaded yet. It is valid until the next one is requested."""

    @property
    def description(self) -> str:
        """Return the text in the file that describes its images; empty without one."""
        return ""


class Successive(Generic[Value]):
    """Values of an iterator by their number, from 0; at little cost if they are requested in this order."""

    def __init__(self, start: Callable[[], Iterator[Value]]) -> None:
        self._start = start
        self._values, self._number = start(), -1
        self._value: Value | None = None
        self._error: Exception | None = None

    def __getitem__(self, number: int) -> Value | None:
        """Return a value; None after the last. What the iterator has raised is raised for all numbers after it."""
        if number < self._number:
            self._restart()
        if self._error is not None:
            raise self._error
        if number > self._number:
            skipped, self._number = number - self._number - 1, number
            try:
                self._value = next(islice(self._values, skipped, None), None)
            except Exception as error:
                self._error = error
                raise
        return self._value

    def _restart(self) -> None:
        self._values, self._number = self._start(), -1
        self._value = self._error = None


class _PillowPages(Pages):
    """Images of a file that Pillow reads."""

    def __init__(self, image: ImageFile.ImageFile, stream: IO[bytes], *, max_pixels: int, channels: int) -> None:
        self._image, self._stream, self._max_pixels, self._channels = image, stream, max_pixels, channels
        self._description = str(image.tag_v2.get(IMAGEDESCRIPTION, "")) if isinstance(image, TiffImageFile) else ""

    @property
    def description(self) -> str:
        return self._description

    @property
    def count(self) -> int:
        image: Any = self._image  # only some formats have frames
        if image.format == "TIFF":
            return len(self._numbers)
        count = int(image.n_frames) if image.format in SEVERAL else 1
        if image.format == "PNG":  # which states the number, and may have fewer
            count = max(1, min(count, _num_bytes(self._stream) // _FRAME_BYTES))
        check_count(count)
        return count

    @cached_property
    def _numbers(self) -> list[int]:
        """Numbers of the images among the pages of TIFF."""
        return image_pages(self._stream)

    def page(self, number: int) -> Image.Image | Raster:
        image = self._image
        if image.format == "TIFF":
            number = self._numbers[number] if number else image_pages(self._stream, limit=1)[0]
        if number != image.tell():
            image.seek(number)
        check_shape((image.height, image.width, 1), max_pixels=self._max_pixels)
        # Pillow drops bands beyond the third and divides by opacity, which may be another band.
        if image.format == "TIFF" and (self._channels not in (1, 3) or is_misread(image)):
            with _tiff_pages(self._stream, max_pixels=self._max_pixels) as pages:
                raster: Raster = pages.raster(number, as_rgb=image.mode == "CMYK" and self._channels in (1, 3))
                return raster
        if image.format == "PNG" and is_deep_color(image):
            if number:
                raise ValueError("it is an animated PNG with color of 16 bits; write each frame to an image")
            shape = (image.height, image.width, 4)
            key = image.info.get("transparency")
            return Raster(
                shape=shape,
                load=lambda: _png_values(self._stream, key),
                has_alpha=image.mode != "RGB" or key is not None,
            )
        return _deep_pixmap(image, self._stream) or image


@contextmanager
def open_pages(
    source: bytes | FilePath, *, max_pixels: int, channels: int, size: int = 1, video_interval: float = 1.0
) -> Iterator[Pages]:
    """Open a file or its bytes, without decoding it.

    ``channels`` are those of the data set, by which the axes of arrays are recognized. Of several resolutions one for
    ``size`` is opened. ``video_interval`` has the seconds between two frames. Exceptions can have any type, as in
    `fedssl.datasets.decoding.Decoding`.
    """
    if not isinstance(source, bytes) and is_zarr(source):
        require_package("ZARR")
        zarr = import_module("fedssl.datasets.zarr")
        with zarr.opened(Path(source), max_pixels=max_pixels, channels=channels, size=size) as pages:
            yield pages
        return
    with BytesIO(source) if isinstance(source, bytes) else open_regular_file(source) as stream:
        head = stream.read(HEAD_BYTES)
        num_bytes = stream.seek(0, SEEK_END)
        if not num_bytes:
            raise ValueError("the file is empty")
        stream.seek(0)
        module = module_of(head)
        if module == "tiff":
            with _open_tiff(stream, max_pixels=max_pixels, channels=channels) as pages:
                yield pages
        elif module is not None:
            if module.upper() in PACKAGES:
                require_package(module.upper())
            options = {"interval": video_interval} if module == "video" else {"channels": channels}
            with import_module(f"fedssl.datasets.{module}").opened(stream, max_pixels=max_pixels, **options) as pages:
                yield pages
        else:
            is_dicom = "DICOM" in INSTALLED and head.startswith(DICOM_MAGIC, DICOM_PREAMBLE)  # read frame by frame
            if num_bytes > max_file_bytes(max_pixels) and not is_dicom:  # Pillow may read it as a whole
                raise ValueError(f"it has {num_bytes:,} bytes but the maximum is {max_file_bytes(max_pixels):,}")
            with Image.open(stream, formats=("DICOM",) if is_dicom else FORMATS) as image:
                if image.format == "JPEG2000" and image.mode not in ("L", "I;16"):
                    _check_depth(stream)
                if image.format in ("AVIF", "HEIF"):
                    image.info[FILE_BITS] = _declared_bits(stream)
                yield _PillowPages(image, stream, max_pixels=max_pixels, channels=channels)


def _check_order(description: str) -> None:
    """Raise a ValueError if OME metadata have slices or times between the channels of an image."""
    found, sizes = _OME_ORDER.search(description), dict(_OME_SIZE.findall(description))
    order = found[1] if found and int(sizes.get("C", 1)) > 1 else "C"
    if any(int(sizes.get(axis, 1)) > 1 for axis in order.partition("C")[0]):
        raise ValueError(f"its pages are in the order XY{order}, channel by channel; save it with axes ZCYX or TCYX")


def stacked(pages: Pages, first: int, depth: int, settings: PixelSettings, *, max_pixels: int) -> Raster:
    """Return successive pages as the channels of one image; they are read at once.

    Pages with different values of black and white are scaled one by one.
    """
    if first + depth > pages.count:
        raise ValueError(f"it has {pages.count} pages, which are no multiple of dataset.channels={depth}")
    _check_order(pages.description)
    layers, rasters = list[np.ndarray](), list[Raster]()
    is_set = settings.window is not None or settings.percentiles is not None
    for number in range(first, first + depth):
        image = pages.page(number)
        raster = image if isinstance(image, Raster) else raster_of(image)
        check_shape((*raster.shape[:2], depth * raster.shape[2]), max_pixels=max_pixels)
        layer = raster.load()  # whose height and width are interchanged if it is turned upright
        layers.append(layer[..., None] if layer.ndim == 2 else layer)
        rasters.append(raster)
    pairs = list(zip(rasters, layers, strict=True))
    scales = {
        (raster.white_is_zero, raster.is_sigmoid, layer.dtype, None if is_set else raster.limits)
        for raster, layer in pairs
    }
    if len(scales) == 1:
        values = np.concatenate(layers, axis=2)
        return replace(rasters[-1], shape=values.shape, load=lambda: values)
    dtype = widest(raster.dtype or narrowest_dtype(layer.dtype) for raster, layer in pairs)
    values = np.concatenate([scaled_values(raster, layer, settings) for raster, layer in pairs], axis=2)
    return Raster(
        shape=values.shape,
        load=lambda: values,
        limits=(0, 1),
        is_fixed=True,
        dtype=dtype,
        file_percentiles=lambda _: (0.0, 1.0),
    )


def check_shape(shape: tuple[int, int, int], *, max_pixels: int) -> None:
    """Raise a `ValueError` for an image of absurd height, width or number of channels."""
    height, width, channels = shape
    if width * height > max_pixels:
        raise ValueError(f"it has {width:,} x {height:,} pixels, more than dataset.max_pixels={max_pixels}")
    if not 0 < channels <= MAX_CHANNELS:
        raise ValueError(f"it has {channels:,} channels, and {MAX_CHANNELS} are the maximum")
    if width * height * channels > _MAX_SAMPLES * max_pixels:
        found = f"{channels} channels of {width:,} x {height:,} pixels"
        raise ValueError(f"it has {found}, more than {_MAX_SAMPLES} times dataset.max_pixels={max_pixels}")


def check_count(count: int) -> None:
    """Raise a `ValueError` for an absurd number of images."""
    if not 0 < count <= MAX_PAGES:
        raise ValueError(f"it has {count:,} images, and {MAX_PAGES:,} are the maximum")


def max_file_bytes(max_pixels: int) -> int:
    """Return the maximum size of an image file."""
    return _MAX_BYTES_PER_PIXEL * max_pixels + 2**20


@contextmanager
def _open_tiff(stream: IO[bytes], *, max_pixels: int, channels: int) -> Iterator[Pages]:
    """Open a TIFF file by Pillow, or by tifffile if it has other channels or numbers than those of Pillow's modes."""
    try:
        image = Image.open(stream, formats=["TIFF"])
    except UnidentifiedImageError:
        stream.seek(0)
        with _tiff_pages(stream, max_pixels=max_pixels) as pages:
            yield pages
        return
    with image:
        yield _PillowPages(image, stream, max_pixels=max_pixels, channels=channels)


def _tiff_pages(stream: IO[bytes], *, max_pixels: int) -> Any:
    require_package("TIFF")
    return import_module("fedssl.datasets.tiff").opened(stream, max_pixels=max_pixels, channels=0)


def _num_bytes(stream: IO[bytes]) -> int:
    position = stream.tell()
    size = stream.seek(0, SEEK_END)
    stream.seek(position)
    return size


def _check_depth(stream: IO[bytes]) -> None:
    """Raise a `ValueError` for color of JPEG 2000 with more than 8 bits, which Pillow would reduce."""
    position = stream.tell()
    stream.seek(0)
    content = stream.read()
    stream.seek(position)
    start = content.find(b"\xff\x4f\xff\x51")  # of the header, which has the bits of the first channel
    if 0 <= start < len(content) - 42 and (bits := content[start + 42] % 128 + 1) > 8:
        raise ValueError(f"it is JPEG 2000 with {bits} bits of color; save it as TIFF or PNG")


def _declared_bits(stream: IO[bytes]) -> int:
    """Return the most bits of a channel of AVIF or HEIC, by its first box "pixi" (ISO 23008-12, 6.5.6), or 0."""
    position = stream.tell()
    stream.seek(0)
    _, _, box = stream.read(_META_BYTES).partition(b"pixi")
    stream.seek(position)
    return max(box[5 : 5 + box[4]], default=0) if len(box) > 5 else 0  # after version and number of channels


def _png_values(stream: IO[bytes], transparent: tuple[int, ...] | None) -> np.ndarray:
    """Return the values of PNG with color of 16 bits, which Pillow would reduce to 8; opacity instead of a color."""
    import torch  # slow imports, which devices may lack
    from torchvision.io import decode_image

    stream.seek(0)
    content = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)
    values: np.ndarray = decode_image(content, apply_exif_orientation=True).permute(1, 2, 0).numpy()
    if transparent is None:
        return values
    opacity = (values != transparent).any(axis=2, keepdims=True) * np.iinfo(values.dtype).max
    return np.concatenate([values, opacity.astype(values.dtype)], axis=2)


def _deep_pixmap(image: ImageFile.ImageFile, stream: IO[bytes]) -> Raster | None:
    """Return a binary PPM file with color of 16 bits, which Pillow would reduce to 8; None for other files."""
    arguments = image.tile[0].args if image.format == "PPM" and image.tile else None
    if image.mode != "RGB" or not isinstance(arguments, tuple) or arguments[1] <= 255:
        return None
    if image.tile[0].codec_name != "ppm":
        raise ValueError("it is plain PPM with more than 8 bits; save it as binary PPM or PNG")
    shape, offset = (image.height, image.width, 3), image.tile[0].offset

    def load() -> np.ndarray:
        stream.seek(offset)
        return np.frombuffer(stream.read(2 * int(np.prod(shape))), ">u2").astype(np.uint16).reshape(shape)

    return Raster(shape=shape, load=load, limits=(0, arguments[1]), is_fixed=True)
