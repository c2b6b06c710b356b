"""Images of any numbers and up to 64 channels, scaled to [0, 1] by their values of black and white.

They are stored as uint8, uint16 or float32 with the `MAXIMA` below: a stored number divided by its maximum is in [0,
1]. 16 bits keep every value of integers of up to 16 bits, and one part in 65,535 of a window.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from fedssl.config.constraints import check_arguments
from fedssl.datasets.geometry import fit_image
from fedssl.errors import InputError

if TYPE_CHECKING:  # devices may lack it
    import torch

BACKGROUND = 255  # default of dataset.background
MAXIMA = {"uint8": 255, "uint16": 65535, "float32": 1}  # by dtype, from the narrowest
WIDEST = 4  # bytes of a value
# Times a value in [0, 1], rounded down: the upper 8 bits of a value of 9 to 16 bits divided by its maximum.
_LEVELS = np.float32(255.999)
# Settings of the pixels that an encoder keeps, with their defaults.
PIXELS: Mapping[str, Any] = {"background": BACKGROUND, "window": None, "percentiles": None, "dtype": "auto"}
PERCENTILE_VALUES = 2**22  # of which percentiles are computed
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as Pillow's


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """Settings on which the pixels of an image depend; the data set's settings with these names."""

    channels: int
    size: int  # height and width in pixels
    dtype: str = "auto"  # or one of `MAXIMA`; "auto" for the narrowest that keeps the values of an image
    background: int = BACKGROUND
    # Values of black and white of images with more than 8 bits, or their percentiles in each file. None for the window
    # of the file, or the range of its format.
    window: Sequence[float] | None = None
    percentiles: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_arguments("dataset", **{field.name: getattr(self, field.name) for field in fields(PixelSettings)})
        for name, values in (("window", self.window), ("percentiles", self.percentiles)):
            if values is not None and not (len(values) == 2 and values[0] < values[1]):
                found = ", ".join(f"{value:g}" for value in values)
                raise InputError(f"dataset.{name}=[{found}] must be [LOWEST,HIGHEST], two ascending values, or null")
        if self.window is not None and self.percentiles is not None:
            raise InputError("dataset.window and dataset.percentiles are both set; set one of them to null")


@dataclass(frozen=True, kw_only=True)
class Raster:
    """An image with more than 8 bits or other than 1 or 3 channels, before it is scaled."""

    shape: tuple[int, int, int]  # height, width and number of channels
    load: Callable[[], np.ndarray]  # returns the values, ``(height, width)`` or ``(height, width, channels)``
    limits: tuple[float, float] | None = None  # values of black and white by the image's format; None if it has none
    is_window: bool = False  # whether ``limits`` are a window of the file, beyond which there are values
    is_sigmoid: bool = False  # whether that window is a sigmoid, which keeps values beyond it apart
    is_wide: bool = False  # whether the values of this format usually exceed the window that a user sets
    is_fixed: bool = False  # whether ``limits`` are the file's own maximum, which no setting replaces
    white_is_zero: bool = False  # whether black and white are interchanged
    transparent: float | None = None  # value of transparent pixels
    has_alpha: bool = False  # whether the last channel is opacity, for 1 or 3 channels of the settings
    is_premultiplied: bool = False  # whether the other channels are multiplied by opacity
    dtype: str | None = None  # the narrowest of `MAXIMA` that keeps the scaled values; None for that of the values
    # Returns two percentiles of the file that the image is a page of; None: `percentiles_of` its own values.
    file_percentiles: Callable[[tuple[float, float]], tuple[float, float]] | None = None


def pixel_metadata(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a data set's pixels that differ from the default, for the metadata of an encoder."""
    return {f"dataset.{key}": settings[key] for key, value in PIXELS.items() if settings.get(key, value) != value}


def pixel_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the pixels in an encoder's metadata; `InputError` if they are invalid."""
    settings = {key: metadata.get(f"dataset.{key}", value) for key, value in PIXELS.items()}
    PixelSettings(channels=1, size=1, **settings)
    return settings


def adopt_pixels(
    settings: Mapping[str, Any], encoder: Mapping[str, Any], *, keep: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings of a data set with the pixels of an encoder, where it has the defaults.

    ``encoder`` are the settings of the pixels that the encoder was trained on. Settings of ``keep`` stay.
    """
    usual = {key for key in PIXELS.keys() & settings.keys() if settings[key] == PIXELS[key]} - {*keep}
    limits = {"window", "percentiles"}
    if not limits <= usual:  # they exclude each other
        usual -= limits
    return {**settings, **{key: encoder[key] for key in usual & encoder.keys()}}


def scaled_values(raster: Raster, values: np.ndarray, settings: PixelSettings) -> np.ndarray:
    """Scale the values of an image to float32 in [0, 1]; those that are not a number become black."""
    low, high = _checked_limits(raster, values, settings)
    wide = "float64" if values.dtype.itemsize > 2 and values.dtype != np.float32 else "float32"
    scaled = (values.astype(wide) - np.array(low, wide)) * np.array(1 / (high - low) if high > low else 0, wide)
    if raster.is_sigmoid and settings.window is None and settings.percentiles is None:
        # 1 / (1 + exp(-4 (x - center) / width))
        scaled = 1 / (1 + np.exp((2 - 4 * scaled).clip(-80, 80)))
    scaled = scaled.clip(0, 1).astype(np.float32, copy=False)
    if raster.white_is_zero:
        scaled = 1 - scaled
    finite: np.ndarray = np.nan_to_num(scaled, copy=False, nan=0.0)
    return finite


def raster_to_array(raster: Raster, settings: PixelSettings) -> np.ndarray:
    """Scale an image to the channels and the size of the settings, ``(channels, size, size)`` of a dtype of `MAXIMA`.

    Values that are not a number become black. Gray becomes RGB by repetition, RGB becomes gray by the luma of ITU-R
    601. Other numbers of channels must be equal.
    """
    values = raster.load()
    scaled = scaled_values(raster, values, settings)
    background = np.float32(settings.background / MAXIMA["uint8"])
    if raster.transparent is not None:
        scaled = np.where(values == raster.transparent, background, scaled)
    channels = scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1)
    if raster.has_alpha and settings.channels in (1, 3):
        colors, opacity = channels[:-1], channels[-1]
        is_ready = raster.is_premultiplied
        channels = colors + background * (1 - opacity) if is_ready else background + (colors - background) * opacity
    fitted = [
        np.asarray(fit_image(Image.fromarray(np.ascontiguousarray(channel)), settings.size))
        for channel in _to_channels(channels, settings.channels)
    ]
    dtype = settings.dtype if settings.dtype != "auto" else raster.dtype or narrowest_dtype(values.dtype)
    return convert(np.stack(fitted), dtype)


def narrowest_dtype(dtype: np.dtype) -> str:
    """Return the narrowest dtype of `MAXIMA` that keeps values of a dtype after scaling."""
    if dtype in (np.uint8, np.bool_):
        return "uint8"
    return "uint16" if dtype.kind in "ui" and dtype.itemsize <= 2 else "float32"


def widest(dtypes: Iterable[str]) -> str:
    """Return the dtype of `MAXIMA` that keeps the values of all ``dtypes``."""
    return max(dtypes, key=list(MAXIMA).index, default="uint8")


def convert(images: np.ndarray, dtype: str) -> np.ndarray:
    """Convert images of a dtype of `MAXIMA` to another; a wider one keeps every value."""
    if images.dtype == dtype:
        return images
    if images.dtype == np.uint8 and dtype == "uint16":
        return images.astype(np.uint16) * np.uint16(257)  # 65535 / 255
    unit = images / np.float32(MAXIMA[str(images.dtype)])
    if dtype == "uint16":
        return np.rint(unit * np.float32(MAXIMA[dtype])).astype(np.uint16)
    return (unit * _LEVELS).astype(np.uint8) if dtype == "uint8" else unit


def torch_dtype(name: str) -> "torch.dtype":
    """Return the dtype of torch for one of `MAXIMA`."""
    import torch

    return torch.from_numpy(np.empty(0, name)).dtype


def maximum(dtype: "torch.dtype") -> int:
    """Return the number of `MAXIMA` for a dtype of torch."""
    return MAXIMA[str(dtype).removeprefix("torch.")]


def unit_values(images: "torch.Tensor") -> "torch.Tensor":
    """Return images of a dtype of `MAXIMA` as float32 in [0, 1]."""
    return images.float() / maximum(images.dtype)


def percentiles_of(values: np.ndarray, percentiles: tuple[float, float]) -> tuple[float, float]:
    """Return two percentiles of finite values, of which at most `PERCENTILE_VALUES` at equal distances are used."""
    part = values.reshape(-1)[:: -(-values.size // PERCENTILE_VALUES)]
    finite = part[np.isfinite(part)]
    if not finite.size:
        return 0.0, 1.0
    low, high = np.percentile(finite, percentiles)
    return float(low), float(high)


def limits_of(raster: Raster, values: np.ndarray, settings: PixelSettings) -> tuple[float, float] | None:
    """Return the values of black and white of an image with these values; None if they are unknown."""
    if values.dtype in (np.uint8, np.bool_):
        return 0, MAXIMA["uint8"] if values.dtype == np.uint8 else 1
    if settings.window is not None and not raster.is_fixed:
        return settings.window[0], settings.window[1]
    if settings.percentiles is not None:
        low, high = settings.percentiles
        of_file = raster.file_percentiles
        return percentiles_of(values, (low, high)) if of_file is None else of_file((low, high))
    if raster.limits is not None:
        return raster.limits
    is_uint16 = values.dtype.kind == "u" and values.dtype.itemsize == 2  # of either byte order
    return (0, MAXIMA["uint16"]) if is_uint16 else None


def _checked_limits(raster: Raster, values: np.ndarray, settings: PixelSettings) -> tuple[float, float]:
    limits = limits_of(raster, values, settings)
    if limits is None:
        raise InputError(
            f"its values are {values.dtype.name}, from {np.nanmin(values):g} to {np.nanmax(values):g}, without a known "
            "range; set dataset.window=[LOWEST,HIGHEST], or dataset.percentiles=[0.5,99.5] for a range of each file"
        )
    is_format = settings.window is None and settings.percentiles is None and not raster.is_window
    if is_format and (lowest := values.min()) < limits[0]:
        raise InputError(f"its lowest value is {lowest}; set dataset.window=[LOWEST,HIGHEST], or add an offset")
    return limits


def _to_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Convert between 1 and 3 channels, ``(channels, height, width)``."""
    if len(image) == channels:
        return image
    if len(image) == 1 and channels == 3:
        return image.repeat(3, axis=0)
    if len(image) == 3 and channels == 1:
        return np.tensordot(_LUMA, image, axes=1)[None]
    raise InputError(
        f"it has {len(image)} channels but dataset.channels={channels}; set dataset.channels={len(image)}, with one "
        "number each for all channels in dataset.mean and dataset.std"
    )
