"""Conversion of an image of any mode to uint8 pixels in the data set's channels and size."""

from collections.abc import Sequence

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

from fedssl.datasets.geometry import fit_image
from fedssl.errors import InputError

BACKGROUND = 255  # default of dataset.background
# Times a value in [0, 1], rounded down. Also the upper 8 bits of a value of 9 to 16 bits divided by its maximum.
_LEVELS = np.float32(255.999)
_SIGNED = 2  # sample format of TIFF
# Keys of `info` of DICOM files, see `fedssl.datasets.dicom`.
FILE_WINDOW, BIT_RANGE, WHITE_IS_ZERO = "window", "range", "white_is_zero"
_MAXIMUM = 2**16 - 1  # of PGM


def to_array(
    image: Image.Image,
    *,
    channels: int,
    size: int,
    background: int = BACKGROUND,
    window: Sequence[float] | None = None,
) -> np.ndarray:
    """Convert an image to the data set's channels (1 or 3) and size: uint8, ``(channels, size, size)``.

    The image is turned upright by its EXIF orientation. Gray becomes RGB by repetition, RGB becomes gray by the luma of
    ITU-R 601. Gray values of more than 8 bits are scaled to 8 bits: linearly within a window, beyond which they
    are black or white. Images of another size are scaled by `fedssl.datasets.geometry.fit_image`.

    Parameters
    ----------
    image : Image
        It is loaded, but not changed.
    background : int
        Gray value behind transparent pixels, from 0 (black) to 255 (white).
    window : sequence of float or None
        The lowest and the highest value of gray images with more than 8 bits, except PGM files that state a maximum.
        None for those of the file (DICOM, `fedssl.datasets.dicom`), or 0 and the maximum of the image's format; 32-bit
        integers and floats have none and are then an `InputError`, and so are negative values.
    """
    limits = value_limits(image, window)
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # not of TIFF, which Pillow has turned
        image = ImageOps.exif_transpose(image)
    if is_deep(image):
        image = _eight_bits(image, limits, clip=window is not None)
    elif _tag(image, SAMPLEFORMAT) == _SIGNED:
        raise InputError("signed 8-bit values, which Pillow reads as unsigned; add an offset and save them as unsigned")
    if image.has_transparency_data:
        image = _composite(image, background)
    if image.mode == "LAB":  # Pillow converts it to RGB only
        image = image.convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    image = fit_image(image, size)
    # A third of the time of `numpy.asarray` with a transposition, which is half of that of decoding.
    content = b"".join([band.tobytes() for band in image.split()])
    return np.frombuffer(content, dtype=np.uint8).reshape(channels, size, size)


def is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with more than 8 bits."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def states_maximum(image: Image.Image) -> bool:
    """Return whether an image is a PGM file with its own maximum; ask before it is loaded."""
    if not isinstance(image, PpmImageFile) or image.mode != "I" or not image.tile:
        return False
    arguments = image.tile[0].args
    return isinstance(arguments, tuple) and arguments[1] != _MAXIMUM


def check_window(window: Sequence[float] | None) -> None:
    """Raise an `InputError` if ``dataset.window`` is not null or two ascending values."""
    if window is not None and not (len(window) == 2 and window[0] < window[1]):
        raise InputError(
            f"dataset.window=[{', '.join(f'{value:g}' for value in window)}] must be [LOWEST,HIGHEST], two ascending "
            "values, or null"
        )


def value_limits(image: Image.Image, window: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the values of black and white in an `is_deep` image that is not loaded yet; None if they are unknown."""
    if window is not None and not states_maximum(image):
        return window[0], window[1]
    of_file: tuple[float, float] | None = image.info.get(FILE_WINDOW) or image.info.get(BIT_RANGE)
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


def _eight_bits(image: Image.Image, limits: tuple[float, float] | None, *, clip: bool) -> Image.Image:
    """Convert an `is_deep` image to 8-bit gray, with transparency if one of its values is transparent.

    Without ``clip``, values below those of the image's format are an `InputError`.
    """
    if limits is None:
        raise InputError(
            f"wrong channels: 32-bit values (mode {image.mode}) of unknown range; set dataset.window to the values of "
            "black and white, or save it as gray, RGB, RGBA or palette with 8 or 16 bits"
        )
    values, (low, high) = np.asarray(image), limits
    lowest = values.min()
    if np.isnan(lowest):
        raise InputError("it has values that are not a number (NaN); replace them")
    if lowest < low and not clip and FILE_WINDOW not in image.info:
        raise InputError(f"its lowest value is {lowest}; set dataset.window=[LOWEST,HIGHEST], or add an offset")
    scaled = (values.astype(np.float32) - np.float32(low)) * (_LEVELS / np.float32(high - low))
    levels = np.clip(scaled, 0, 255).astype(np.uint8)
    inverted = image.info.get(WHITE_IS_ZERO) or _tag(image, PHOTOMETRIC_INTERPRETATION) == 0  # 0: white is zero
    gray = Image.fromarray(255 - levels if inverted else levels)
    if "transparency" in image.info:
        gray.putalpha(Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)))
    return gray


def _composite(image: Image.Image, background: int) -> Image.Image:
    """Put a transparent image on a gray level; an opaque one is unchanged."""
    with_alpha = image.convert("RGBA")
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
