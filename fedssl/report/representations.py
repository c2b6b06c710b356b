"""Representations of the same pictures by the global models and by the clients' models, as a run folder keeps them."""

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.files import write_whole

FILE = "representations.npz"


@dataclass(frozen=True)
class Representations:
    """What models make of the same pictures, every vector divided by its length.

    Attributes
    ----------
    names : ndarray
        Words, ``(models,)``: what the models are called.
    globals : ndarray
        int64, ``()``: how many of them, from the first on, are global models; the others are clients'.
    h : ndarray
        float16, ``(models, n, dim)``: representations.
    z : ndarray or None
        float16, ``(models, n, 3)``: projections, where the projector's output has 3 numbers.
    labels : ndarray or None
        int64, ``(n,)``: classes of the pictures, where they are known.
    """

    names: np.ndarray
    globals: np.ndarray
    h: np.ndarray
    z: np.ndarray | None = None
    labels: np.ndarray | None = None

    def save(self, folder: Path, *, round: int) -> None:
        """Write them into a run folder, in place of those of an earlier round."""
        arrays: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        known = {name: array for name, array in arrays.items() if array is not None}

        def write(partial: Path) -> None:
            with partial.open("wb") as stream:  # to a path NumPy would add an ending
                np.savez(stream, round=np.array(round), **known)

        write_whole(folder / FILE, write)


def read_representations(folder: Path) -> tuple[int, Representations] | None:
    """Read the round and what `Representations.save` wrote; None if nothing was kept or the file cannot be read."""
    try:
        with np.load(folder / FILE) as file:
            arrays = dict(file)
        return int(arrays.pop("round")), Representations(**arrays)
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
        return None
