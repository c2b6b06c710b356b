"""Values of a DICOM frame: the modality transformation, the window, the range of its bits, and padding."""

from typing import Any

import numpy as np
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi

from fedssl.datasets.dicom_checks import MAX_TABLE
from fedssl.datasets.pixels import BIT_RANGE, FILE_WINDOW

PADDING = ["PixelPaddingValue", "PixelPaddingRangeLimit"]
TABLES = ["ModalityLUTSequence", "VOILUTSequence"]


def transforms(dataset: Any) -> bool:
    """Return whether the stored values differ from those of the modality, or from those to show."""
    return any(dataset.get(name) for name in (*TABLES, "WindowWidth")) or _rescale(dataset) != (1, 0)


def _rescale(dataset: Any) -> tuple[float, float]:
    """Return the slope and the intercept, either of which may be missing or empty."""
    slope, intercept = (_first(dataset.get(name)) for name in ("RescaleSlope", "RescaleIntercept"))
    return 1.0 if slope is None else slope, intercept or 0.0


def _window(dataset: Any) -> tuple[float, float] | None:
    """Return the lowest and the highest value of the first window; None if there is none."""
    center, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is None or width is None or width <= 0:
        return None
    if dataset.get("VOILUTFunction") in ("LINEAR_EXACT", "SIGMOID") or width < 1:  # below 1: of small fractions
        return center - width / 2, center + width / 2
    return center - 0.5 - (width - 1) / 2, center - 0.5 + max(width - 1, 1) / 2


def limits_of(dataset: Any) -> tuple[float, float, str]:
    """Return the values of black and white, and their key in ``info``."""
    window = _window(dataset)
    if window is not None:
        return *window, FILE_WINDOW
    if dataset.get("VOILUTSequence"):
        return 0.0, 2.0 ** dataset.VOILUTSequence[0].LUTDescriptor[2] - 1, FILE_WINDOW
    if dataset.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** dataset.ModalityLUTSequence[0].LUTDescriptor[2] - 1, BIT_RANGE
    if "BitsStored" not in dataset:
        return 0.0, 1.0, BIT_RANGE
    bits, signed = int(dataset.BitsStored), bool(dataset.PixelRepresentation)
    stored = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = _rescale(dataset)
    low, high = sorted(slope * value + intercept for value in stored)
    return low, high, BIT_RANGE


def _first(value: Any) -> float | None:
    """Return the first value of a tag that may have several."""
    if value is None or isinstance(value, str | bytes):
        return float(value) if value else None  # not a number: the file is unreadable
    first = next(iter(value), None) if hasattr(value, "__iter__") else value
    return None if first in (None, "") else float(first)


def values_of(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return a frame, ``(rows, columns)`` after the modality transformation, or RGB ``(rows, columns, 3)``."""
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        return apply_color_lut(_clipped(values, dataset.RedPaletteColorLookupTableDescriptor), dataset)
    if values.ndim == 3:
        return values
    if dataset.get("ModalityLUTSequence"):
        values = apply_modality_lut(values, dataset)
    elif (rescale := _rescale(dataset)) != (1, 0):
        values = values * np.float64(rescale[0]) + rescale[1]
    if dataset.get("VOILUTSequence") and _window(dataset) is None:
        values = apply_voi(_clipped(values, dataset.VOILUTSequence[0].LUTDescriptor), dataset)
    return values


def is_beside_image(stored: np.ndarray, dataset: Any) -> np.ndarray | None:
    """Return which pixels are beside the image, by their stored values (PS3.3 C.7.5.1.1.2); None if unknown."""
    values = [value for name in PADDING if isinstance(value := dataset.get(name), int)]
    if PADDING[0] not in dataset or not values or stored.dtype.kind not in "iu":
        return None
    limits = np.array(values, np.int64).astype(stored.dtype)  # a negative one may be stated by its bits, and vice versa
    is_beside: np.ndarray = (stored >= limits.min()) & (stored <= limits.max())
    return is_beside


def _clipped(values: np.ndarray, descriptor: Any) -> np.ndarray:
    """Replace values beyond a table by its last, since pydicom's index of a table with 8 bits has 8 bits, too."""
    entries, first = descriptor[0] or MAX_TABLE, descriptor[1]
    clipped: np.ndarray = np.minimum(values.astype(np.int32), first + entries - 1)
    return clipped


def eight_bits(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return the upper 8 bits of the values of a color image."""
    bits = int(dataset.BitsStored)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":  # a table may have fewer bits than it states
        bits = min(int(dataset.RedPaletteColorLookupTableDescriptor[2]), 8 * values.itemsize)
    return values if bits == 8 else values.astype(np.float32) * np.float32(255.999 / (2**bits - 1))
