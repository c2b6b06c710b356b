"""Image files of a data set with their classes and owners."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np


class FilePaths(Sequence[Path]):
    """Paths of files, of which only the text is in memory: a million of them need 150 MB."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> "FilePaths": ...
    def __getitem__(self, index: int | slice) -> "Path | FilePaths":
        return FilePaths(self._paths[index]) if isinstance(index, slice) else Path(self._paths[index])

    def at(self, indices: np.ndarray) -> "FilePaths":
        return FilePaths([self._paths[index] for index in indices])


@dataclass(frozen=True)
class FileList:
    """Image files with the classes and owners of their folders; see `ImageData` for the fields."""

    files: FilePaths
    labels: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def at(self, indices: np.ndarray) -> "FileList":
        labels, owners = (None if column is None else column[indices] for column in (self.labels, self.owners))
        return replace(self, files=self.files.at(indices), labels=labels, owners=owners)
