"""Conversion of an image of Pillow, of any mode, to pixels in the data set's channels and size."""

import numpy as np
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

from fedssl.datasets.geometry import fit_image
from fedssl.datasets.raster import PixelSettings, Raster, convert, raster_to_array
from fedssl.errors import InputError

_SIGNED = 2  # sample format of TIFF
NO_DATA = 42113  # tag of GDAL
_PALETTE = 3  # photometric interpretation of TIFF
# Keys of `info` of DICOM files, see `fedssl.datasets.dicom`.
FILE_WINDOW, BIT_RANGE, WHITE_IS_ZERO, RASTER, MODALITY = "window", "range", "white_is_zero", "raster", "modality"
SIGMOID = "sigmoid"
FILE_BITS = "bits"  # key of AVIF and HEIC
_MAXIMUM = 2**16 - 1  # of PGM
_MODES = ("L", "LA", "RGB", "RGBA", "CMYK")  # with one byte per channel
_TURNS = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def to_array(image: Image.Image | Raster, settings: PixelSettings) -> np.ndarray:
    """Convert an image to the settings' channels and size, ``(channels, size, size)`` of a dtype of `MAXIMA`.

    The image is loaded, but not changed. It is turned upright by its EXIF orientation. Gray becomes RGB by repetition,
    RGB becomes gray by the luma of ITU-R 601. Values of more than 8 bits are scaled as `raster_to_array` does, and so
    are images for other numbers of channels than 1 and 3, which must have as many. Images of another size are scaled by
    `fedssl.datasets.geometry.fit_image`.
    """
    if isinstance(image, Raster):
        return raster_to_array(image, settings)
    raster = deep_raster(image) if settings.channels in (1, 3) else raster_of(image)
    if raster is not None:
        return raster_to_array(raster, settings)
    levels = _levels(image, settings)
    return levels if settings.dtype == "auto" else convert(levels, settings.dtype)


def deep_raster(image: Image.Image) -> Raster | None:
    """Return an image with more than 8 bits, gray or of DICOM, as a `Raster`, not loaded yet; None for other images."""
    if isinstance(image, ImageFile) and RASTER in image.info:  # not in its copies
        raster: Raster = image.info[RASTER]
        return raster
    if not (image.mode in ("I", "F") or image.mode.startswith("I;16")):
        return None
    window, limits = image.info.get(FILE_WINDOW), _format_limits(image)
    transparency = image.info.get("transparency")
    return Raster(
        shape=(image.height, image.width, 1),
        load=lambda: np.asarray(upright(image)),
        limits=limits if window is None else window,
        is_window=window is not None,
        is_sigmoid=bool(image.info.get(SIGMOID)),
        is_wide=image.format == "DICOM",
        is_fixed=_states_maximum(image),
        white_is_zero=bool(image.info.get(WHITE_IS_ZERO)) or is_min_is_white(image),
        transparent=transparency if isinstance(transparency, int) else None,
        dtype=None if limits is None and window is None else "uint16",  # integers of 16 bits at most
    )


def is_deep_color(image: Image.Image) -> bool:
    """Return whether an image, which is not loaded yet, has color of 16 bits in its file."""
    tiles = image.tile if isinstance(image, ImageFile) else []
    deep = any(";16" in str(tile.args) for tile in tiles) or (_tag(image, BITSPERSAMPLE) or 8) > 8
    return deep and image.mode in ("RGB", "RGBA", "LA", "CMYK")


def is_misread(image: Image.Image) -> bool:
    """Return whether Pillow changes values of a TIFF file: deep color, 16-bit palette, uint32, pixels without data."""
    bits, is_unsigned = _tag(image, BITSPERSAMPLE) or 8, (_tag(image, SAMPLEFORMAT) or 1) == 1
    is_palette = _tag(image, PHOTOMETRIC_INTERPRETATION) == _PALETTE
    has_no_data = _tag(image, NO_DATA) is not None
    return is_deep_color(image) or (bits > 8 and is_palette) or (bits == 32 and is_unsigned) or has_no_data


def raster_of(image: Image.Image) -> Raster:
    """Return an image, which is not loaded yet, as a `Raster` with its own channels."""
    raster = deep_raster(image)
    if raster is not None:
        return raster
    image = upright(image)
    if image.mode not in _MODES:
        own = "L" if image.mode == "1" else "RGB"
        image = image.convert("RGBA" if image.has_transparency_data else own)
    return Raster(shape=(image.height, image.width, len(image.getbands())), load=lambda: np.asarray(image))


def _levels(image: Image.Image, settings: PixelSettings) -> np.ndarray:
    """Convert an image of 8 bits to 1 or 3 channels and a size, uint8 ``(channels, size, size)``."""
    _scale_transparent(image)
    image = upright(image)
    if _tag(image, SAMPLEFORMAT) == _SIGNED:
        raise InputError("signed 8-bit values, which Pillow reads as unsigned; add an offset and save them as unsigned")
    if image.has_transparency_data:
        image = _composite(image, settings.background)
    if image.mode == "LAB":  # Pillow converts it to RGB only
        image = image.convert("RGB")
    mode = "L" if settings.channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    image = fit_image(image, settings.size)
    # A third of the time of `numpy.asarray` with a transposition, which is half of that of decoding.
    content = b"".join([band.tobytes() for band in image.split()])
    return np.frombuffer(content, dtype=np.uint8).reshape(settings.channels, settings.size, settings.size)


def _scale_transparent(image: Image.Image) -> None:
    """Scale the transparent value of PNG with 2 or 4 bits, as Pillow scales the pixels; they are not loaded yet."""
    if isinstance(image, PngImageFile) and isinstance(image.info.get("transparency"), int):
        image.info["transparency"] *= 255 // white_of_file(image)


def white_of_file(image: Image.Image) -> int:
    """Return the value in its file that is 255 in a gray image of 8 bits, which is not loaded yet: Pillow scales it."""
    arguments = image.tile[0].args if isinstance(image, ImageFile) and image.tile else None
    mode, *others = arguments if isinstance(arguments, list | tuple) else (arguments,)
    if isinstance(image, PpmImageFile) and others:
        return int(others[0])
    return {"L;2": 3, "L;4": 15}.get(str(mode)[:3], 255)  # with "I" if white is 0, and "R" for the order of bits


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if there is none, if it is unknown, or if EXIF is damaged."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF can raise any exception, and the pixels are intact
        return 1
    return int(orientation) if orientation in _TURNS else 1


def is_min_is_white(image: Image.Image) -> bool:
    """Return whether 0 is white in a TIFF file; Pillow inverts its values of up to 8 bits."""
    return _tag(image, PHOTOMETRIC_INTERPRETATION) == 0


def upright(image: Image.Image) -> Image.Image:
    """Load an image and turn it by its EXIF orientation, without writing EXIF as Pillow's own function does."""
    image.load()
    turn = _TURNS.get(orientation_of(image))  # none of TIFF, which Pillow has turned
    return image if turn is None else image.transpose(turn)


def _states_maximum(image: Image.Image) -> bool:
    """Return whether an image is a PGM file with its own maximum."""
    if not isinstance(image, PpmImageFile) or image.mode != "I" or not image.tile:
        return False
    arguments = image.tile[0].args
    return isinstance(arguments, tuple) and arguments[1] != _MAXIMUM


def _format_limits(image: Image.Image) -> tuple[float, float] | None:
    """Return the values of black and white in a gray image's format; None if it has none."""
    of_file: tuple[float, float] | None = image.info.get(BIT_RANGE)
    if of_file is not None:
        return of_file
    bits = _tag(image, BITSPERSAMPLE)
    if image.mode.startswith("I;16"):
        return 0, (1 << (bits or 16)) - 1  # 12 bits of TIFF, too
    if image.mode == "I" and isinstance(image, PpmImageFile):
        return 0, _MAXIMUM  # Pillow divides the values by the file's maximum
    if image.mode == "I" and bits == 16:  # signed
        return 0, 2**15 - 1
    return None


def _composite(image: Image.Image, background: int) -> Image.Image:
    """Put a transparent image on a gray level; an opaque one is unchanged."""
    with_alpha = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    alpha = with_alpha.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return image
    canvas = Image.new("RGB", image.size, (background,) * 3)
    canvas.paste(with_alpha, mask=alpha)
    return canvas


def _tag(image: Image.Image, number: int) -> int | None:
    """Return the first value of a tag of a TIFF file; None for other files."""
    if not isinstance(image, TiffImageFile):
        return None
    value = image.tag_v2.get(number)
    first: int | None = value[0] if isinstance(value, tuple) else value
    return first
