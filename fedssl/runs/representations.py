"""Representations of the same images by the global models and by the clients' models, saved in the run folder."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.datasets.holdout import NO_LABEL
from fedssl.safe_io import corrupt_file_error
from fedssl.tensor_file import read_arrays, write_arrays

FILE_NAME = "representations.npz"
MAX_BYTES = 2**30  # bytes of the file


@dataclass(frozen=True)
class Representations:
    """Normalized representations of the same images by several models."""

    names: np.ndarray  # text, ``(models,)``
    globals: np.ndarray  # int64, ``()``: number of global models, which come first; the others are clients'
    h: np.ndarray  # float16, ``(models, n, dim)``
    z: np.ndarray | None = None  # float16, ``(models, n, 3)``: projections, if the projector's output has 3 dimensions
    labels: np.ndarray | None = None  # int64, ``(n,)``: classes, `NO_LABEL` if unknown; None if all are

    def save(self, folder: Path, *, round: int) -> None:
        """Write the file of a run folder; it replaces that of an earlier round."""
        arrays: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {name: array for name, array in arrays.items() if array is not None}
        write_arrays(folder / FILE_NAME, {"round": np.array(round), **known})


def read_representations(folder: Path) -> tuple[int, Representations] | None:
    """Read the round and its representations; None without a file. Raise an `InputError` if it is damaged."""
    file = folder / FILE_NAME
    try:
        arrays = read_arrays(file, max_bytes=MAX_BYTES)
        round, representations = int(arrays.pop("round")), Representations(**arrays)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise corrupt_file_error(file, error.strerror or "it is not a NumPy file") from error
    except Exception as error:  # reading a damaged or foreign file can raise any exception
        raise corrupt_file_error(file, "it does not contain representations") from error
    if not _is_valid(representations):
        raise corrupt_file_error(file, "it does not contain representations")
    return round, representations


def _is_valid(arrays: Representations) -> bool:
    """Return whether shapes and dtypes are those of `Representations`, and all numbers finite."""
    vectors = [arrays.h] if arrays.z is None else [arrays.h, arrays.z]
    if not all(
        array.dtype.kind == "f" and array.ndim == 3 and array.size and np.isfinite(array).all() for array in vectors
    ):
        return False
    models, n, _ = arrays.h.shape
    return (
        all(array.shape[:2] == (models, n) for array in vectors)
        and (arrays.z is None or arrays.z.shape[2] == 3)
        and (arrays.names.dtype.kind, arrays.names.shape) == ("U", (models,))
        and (arrays.globals.dtype.kind, arrays.globals.ndim) == ("i", 0)
        and (
            arrays.labels is None
            or ((arrays.labels.dtype.kind, arrays.labels.shape) == ("i", (n,)) and arrays.labels.min() >= NO_LABEL)
        )
    )
