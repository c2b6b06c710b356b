"""What a partition's rule is given of the images themselves, and what it gives back."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


class ImageSubset:
    """The images that a rule divides, which may be more than the memory holds: a rule takes some at a time.

    No dataclass, for Hydra would make settings of its values.

    Parameters
    ----------
    source : Tensor
        uint8, ``(N, channels, height, width)``, all images of the data set; it may be mapped from a file.
    rows : Tensor
        int64, ``(n,)``, where those to be divided are.
    cache : str or None
        The folder for what takes long to compute of them, as ``dataset.cache`` says it; None: nothing is kept.
    """

    def __init__(self, source: Tensor, rows: Tensor, cache: str | None = None) -> None:
        self.source, self.rows, self.cache = source, rows, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Tensor:
        """Some of them, ``(m, channels, height, width)``, copied."""
        return self.source[self.rows[places]]


@dataclass(frozen=True)
class Partition:
    """Who holds what, from a rule that divides by something else than the images' classes.

    Attributes
    ----------
    client_indices : list of ndarray
        For every client the sorted int64 positions of its images.
    groups : Tensor or None
        int64, ``(n,)``, what was divided by: one of the numbers from 0 for each image, -1 for one that is nobody's.
        None: classes, owners or nothing, which the images say themselves.
    kind : str
        What a group is called, for people.
    """

    client_indices: list[np.ndarray]
    groups: Tensor | None = None
    kind: str = "group"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups."""
        return () if self.groups is None else tuple(f"{self.kind} {number}" for number in range(self.groups.max() + 1))
