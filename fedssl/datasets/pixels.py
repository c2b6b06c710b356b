"""Conversion of an image of any mode to uint8 pixels in the data set's channels and size."""

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
_MAXIMUM = 2**16 - 1  # of PGM


def to_array(
    image: Image.Image, *, channels: int, size: int, background: int = BACKGROUND, max_value: float | None = None
) -> np.ndarray:
    """Convert an image to the data set's channels (1 or 3) and size: uint8, ``(channels, size, size)``.

    The image is turned upright by its EXIF orientation. Gray becomes RGB by repetition, RGB becomes gray by the luma of
    ITU-R 601. Values of more than 8 bits are divided by ``max_value``, or by the maximum of their format. Images of
    another size are scaled by `fedssl.datasets.geometry.fit_image`.

    Parameters
    ----------
    image : Image
        It is loaded, but not changed.
    background : int
        Gray value behind transparent pixels, from 0 (black) to 255 (white).
    max_value : float or None
        Value that becomes white in gray images with more than 8 bits, except PGM files that state another one. None for
        the maximum of the image's format; 32-bit integers and floats have none and are then an `InputError`, and so are
        negative values.
    """
    white = white_value(image, max_value)
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # not of TIFF, which Pillow has turned
        image = ImageOps.exif_transpose(image)
    if is_deep(image):
        image = _eight_bits(image, white)
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


def white_value(image: Image.Image, max_value: float | None) -> float | None:
    """Return the value of white in an `is_deep` image that is not loaded yet; None if its range is unknown."""
    if max_value is not None and not states_maximum(image):
        return max_value
    bits = _tag(image, BITSPERSAMPLE)
    if image.mode.startswith("I;16"):
        return (1 << (bits or 16)) - 1  # 12 bits of TIFF, too
    if image.mode == "I" and isinstance(image, PpmImageFile):
        return _MAXIMUM  # Pillow divides the values by the file's maximum
    if image.mode == "I" and bits == 16:  # signed
        return 2**15 - 1
    return None


def _eight_bits(image: Image.Image, white: float | None) -> Image.Image:
    """Convert an `is_deep` image to 8-bit gray, with transparency if one of its values is transparent."""
    if white is None:
        raise InputError(
            f"wrong channels: 32-bit values (mode {image.mode}) of unknown range; set dataset.max_value to the value "
            "of white, or save it as gray, RGB, RGBA or palette with 8 or 16 bits"
        )
    values = np.asarray(image)
    lowest = values.min()
    if not lowest >= 0:  # also NaN
        raise InputError(f"its lowest value is {lowest}, and pixels are 0 or more; add an offset to its values")
    levels = np.minimum(values.astype(np.float32) * (_LEVELS / np.float32(white)), 255).astype(np.uint8)
    gray = Image.fromarray(255 - levels if _tag(image, PHOTOMETRIC_INTERPRETATION) == 0 else levels)  # 0: white is zero
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
