"""Labeled images of an evaluation: their subsets and their domains."""

from dataclasses import dataclass

from torch import Tensor

from fedssl.datasets.base import ImageData, Split
from fedssl.errors import sanitize

# Splits that an evaluation needs, with their names in messages.
SPLITS: dict[Split, str] = {"train": "training", "test": "test"}

MAX_DOMAINS = 12  # of the test, of which each is evaluated: owners may be thousands of writers


@dataclass(frozen=True, eq=False)
class LabeledImages(ImageData):
    """Images ``(n, channels, height, width)`` with labels, int64 ``(n,)``; `NO_LABEL` if no label is needed."""

    labels: Tensor

    def class_name(self, label: int) -> str:
        """Return the name of a class for a message, or its number if it has no name."""
        return repr(sanitize(self.classes[label])) if label < len(self.classes) else str(label)

    def subset(self, rows: Tensor) -> "LabeledImages":
        """Return the images at ``rows``, int64, with their labels."""
        return self.of(self.images.subset(rows), rows)

    def domains(self) -> dict[str, Tensor]:
        """Return the rows of each domain by its name, if there are several and at most `MAX_DOMAINS`."""
        if self.owners is None or not 1 < len(found := self.owners.unique().tolist()) <= MAX_DOMAINS:
            return {}
        names = self.owner_names or tuple(map(str, range(found[-1] + 1)))
        return {sanitize(names[owner]): (self.owners == owner).nonzero().flatten() for owner in found}
