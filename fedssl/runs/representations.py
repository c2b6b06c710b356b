"""Representations of the same images by the global models and by the clients' models, as a run folder keeps them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.atomic_files import atomic_write
from fedssl.untrusted import corrupt_file_error, read_arrays

FILE_NAME = "representations.npz"
MAX_BYTES = 2**30  # bytes of the file


@dataclass(frozen=True)
class Representations:
    """What models make of the same images, every vector divided by its length.

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
        int64, ``(n,)``: classes of the images, where they are known.
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
        atomic_write(folder / FILE_NAME, lambda stream: np.savez(stream, round=np.array(round), **known))


def read_representations(folder: Path) -> tuple[int, Representations] | None:
    """Read the round and what `Representations.save` wrote; None if nothing was kept.

    Raises
    ------
    InputError
        The file is damaged.
    """
    file = folder / FILE_NAME
    try:
        arrays = read_arrays(file, max_bytes=MAX_BYTES)
        round, found = int(arrays.pop("round")), Representations(**arrays)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise corrupt_file_error(file, error.strerror or "it is no file of NumPy") from error
    except Exception as error:  # there is no end to how reading a damaged or foreign file can fail
        raise corrupt_file_error(file, "it does not hold representations") from error
    if not _is_valid(found):
        raise corrupt_file_error(file, "it does not hold representations")
    return round, found


def _is_valid(one: Representations) -> bool:
    """Whether the arrays have the shapes and dtypes of `Representations`, and finite numbers."""
    vectors = [one.h] if one.z is None else [one.h, one.z]
    if not all(
        array.dtype.kind == "f" and array.ndim == 3 and array.size and np.isfinite(array).all() for array in vectors
    ):
        return False
    models, n, _ = one.h.shape
    return (
        all(array.shape[:2] == (models, n) for array in vectors)
        and (one.z is None or one.z.shape[2] == 3)
        and (one.names.dtype.kind, one.names.shape) == ("U", (models,))
        and (one.globals.dtype.kind, one.globals.ndim) == ("i", 0)
        and (one.labels is None or ((one.labels.dtype.kind, one.labels.shape) == ("i", (n,)) and one.labels.min() >= 0))
    )
