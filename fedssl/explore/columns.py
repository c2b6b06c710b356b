"""Values of images by which a page colors, lists and searches them: a number for each image and the text of each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedssl.pages import base64_of

MISSING = "(none)"
_MAX_NUMBERS = 20  # different numbers up to which each has a color; more are divided into ranges
_RANGES = 6
_DIGITS, _EXACT = 6, 17  # of the ends of ranges: usually, and of float64


@dataclass(frozen=True)
class Column:
    """Values of images by text.

    Attributes
    ----------
    title : str
        What the values are.
    values : tuple of str
        Text of each different value.
    codes : ndarray
        Index into ``values`` for each image, ``(n,)``.
    missing : int or None
        Index of the text for images without a value; None if all have one.
    """

    title: str
    values: tuple[str, ...]
    codes: np.ndarray
    missing: int | None = None

    def for_script(self) -> dict[str, object]:
        """Return plain values for the page's script."""
        codes = encode(self.codes.astype(np.uint32))
        return {"title": self.title, "values": self.values, "codes": codes, "missing": self.missing}


def encode(values: np.ndarray) -> str:
    """Return the bytes of an array, little-endian, in base64."""
    content = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return base64_of(lambda stream: stream.write(content))


def coded(title: str, codes: np.ndarray, names: Sequence[str]) -> Column:
    """Return a column of numbers ``(n,)`` with their names, where the negative ones are missing.

    Numbers without a name are their own names.
    """
    present, inverse = np.unique(codes, return_inverse=True)
    values = [MISSING if code < 0 else names[code] if code < len(names) else str(code) for code in present.tolist()]
    missing = 0 if len(present) and present[0] < 0 else None
    return Column(title, tuple(values), inverse.reshape(-1), missing)


def column_of(title: str, values: Sequence[object]) -> Column:
    """Return a column of any values; None, an empty text and not-a-number are missing.

    Many different numbers are divided into ranges with equal numbers of images.
    """
    texts = [MISSING if value is None or str(value).strip() in ("", "nan", "NaN") else str(value) for value in values]
    numbers = _numbers(texts)
    if numbers is not None and len(np.unique(numbers[~np.isnan(numbers)])) > _MAX_NUMBERS:
        return _ranges(title, numbers)
    value_of = {} if numbers is None else dict(zip(texts, numbers.tolist(), strict=True))
    present = sorted(set(texts), key=lambda text: (text != MISSING, value_of.get(text, 0.0), text))
    code_of = {text: code for code, text in enumerate(present)}
    missing = code_of.get(MISSING)
    return Column(title, tuple(present), np.array([code_of[text] for text in texts], np.int64), missing)


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Return texts as float64, not-a-number where one is missing; None if one is no number, or all are missing."""
    if any("_" in text for text in texts):  # a name, of which Python makes a number
        return None
    try:
        numbers = np.array([np.nan if text == MISSING else float(text) for text in texts])
    except ValueError:
        return None
    return None if np.isinf(numbers).any() or np.isnan(numbers).all() else numbers


def _ranges(title: str, numbers: np.ndarray) -> Column:
    known = ~np.isnan(numbers)
    edges = np.unique(np.quantile(numbers[known], np.linspace(0, 1, _RANGES + 1)))
    codes = np.where(known, np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2), -1)
    whole = len(f"{np.abs(edges).max():.0f}")  # digits, with which no number has an exponent
    for digits in range(min(max(_DIGITS, whole), _EXACT), _EXACT + 1):
        texts = [f"{edge:.{digits}g}" for edge in edges]
        if len({*texts}) == len(texts):
            break
    return coded(title, codes, [f"{low} to {high}" for low, high in itertools.pairwise(texts)])
