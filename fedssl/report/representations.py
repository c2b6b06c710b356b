"""Representations of the same pictures by the global model and by the clients' models, as a run folder keeps them."""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = "representations.npz"


@dataclass(frozen=True)
class Representations:
    """What models make of the same pictures, every vector divided by its length.

    Attributes
    ----------
    clients : ndarray
        int64, ``(clients,)``: whose models follow the global one.
    h : ndarray
        float16, ``(1 + clients, n, dim)``: representations by the global model, then by the clients' models.
    z : ndarray or None
        float16, ``(1 + clients, n, 3)``: projections, where the projector's output has 3 numbers.
    labels : ndarray or None
        int64, ``(n,)``: classes of the pictures, where they are known.
    """

    clients: np.ndarray
    h: np.ndarray
    z: np.ndarray | None = None
    labels: np.ndarray | None = None

    @property
    def names(self) -> list[str]:
        """What the models are called, in their order."""
        return ["global model", *(f"client {client}" for client in self.clients)]

    def save(self, folder: Path, *, round: int) -> None:
        """Write them into a run folder, in place of those of an earlier round."""
        arrays: dict[str, Any] = {"round": np.array(round), "clients": self.clients, "h": self.h}
        arrays |= {name: array for name, array in (("z", self.z), ("labels", self.labels)) if array is not None}
        partial = folder / f"{FILE}.partial"
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)
        os.replace(partial, folder / FILE)


def read_representations(folder: Path) -> tuple[int, Representations] | None:
    """The round and what `Representations.save` wrote; None if nothing was kept or the file cannot be read."""
    try:
        with np.load(folder / FILE) as file:
            arrays = dict(file)
        return int(arrays.pop("round")), Representations(**arrays)
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
        return None
