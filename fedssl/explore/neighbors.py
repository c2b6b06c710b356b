"""Nearest neighbors, near-duplicates and outliers by the cosine of centered features, in blocks of constant memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_VALUES = 2**22  # cosines in memory
_ROUNDING = 1e-5  # of cosines


@dataclass(frozen=True)
class Pairs:
    """Pairs of images whose cosine is at least a threshold, the most similar first."""

    rows: np.ndarray  # int64, ``(m, 2)``, ascending in each pair
    cosines: np.ndarray  # float32, ``(m,)``
    total: int  # number of pairs, of which these are the first


def nearest_neighbors(unit: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, int64, and the cosines, float32, of the nearest other features, ``(n, min(count, n - 1))``.

    The nearest is the first. Equal ones are in the order of their rows.
    """
    n = len(unit)
    count = min(count, n - 1)
    rows, cosines = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
    for start, block in _blocks(unit) if count else ():
        own = np.arange(len(block))
        block[own, start + own] = -np.inf
        found = np.argpartition(block, n - count, axis=1)[:, n - count :]
        values = np.take_along_axis(block, found, axis=1)
        order = np.lexsort((found, -values), axis=1)
        part = slice(start, start + len(block))
        rows[part] = np.take_along_axis(found, order, axis=1)
        cosines[part] = np.take_along_axis(values, order, axis=1)
    return rows, cosines


def close_pairs(unit: np.ndarray, threshold: float, *, most: int) -> Pairs:
    """Return the ``most`` similar pairs with a cosine of at least ``threshold``, in [-1, 1], and count all."""
    total = 0
    rows, cosines = np.empty((0, 2), np.int64), np.empty(0, np.float32)
    for start, block in _blocks(unit):
        first, second = np.nonzero(block >= threshold - _ROUNDING)
        is_pair = first + start < second
        first, second = first[is_pair], second[is_pair]
        total += len(first)
        rows = np.concatenate([rows, np.column_stack([first + start, second])])
        cosines = np.concatenate([cosines, block[first, second]])
        kept = np.lexsort((rows[:, 1], rows[:, 0], -cosines))[:most]
        rows, cosines = rows[kept], cosines[kept]
    return Pairs(rows, cosines, total)


def outlier_scores(cosines: np.ndarray) -> np.ndarray:
    """Return the mean cosine distance, in [0, 2], to the nearest neighbors, ``(n,)``; 0 for an image without any."""
    if not cosines.shape[1]:
        return np.zeros(len(cosines), np.float32)
    scores: np.ndarray = 1 - cosines.mean(axis=1)
    return scores


def _blocks(unit: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of a block and its cosines with all features, ``(block, n)``."""
    size = max(1, BLOCK_VALUES // len(unit))
    for start in range(0, len(unit), size):
        yield start, np.clip(unit[start : start + size] @ unit.T, -1, 1)
