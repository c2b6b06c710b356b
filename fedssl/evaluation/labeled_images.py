"""Labeled images of an evaluation: their parts, their domains, and whether they can be classified."""

from dataclasses import dataclass

from torch import Tensor

from fedssl.datasets.base import ImageData, Split
from fedssl.datasets.holdout import NO_LABEL
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

    def labeled(self) -> "LabeledImages":
        """Return the images that have a label."""
        rows = (self.labels != NO_LABEL).nonzero().flatten()
        return self if len(rows) == len(self.labels) else self.subset(rows)

    def domains(self) -> dict[str, Tensor]:
        """Return the rows of each domain by its name, if there are several and at most `MAX_DOMAINS`."""
        if self.owners is None or not 1 < len(found := self.owners.unique().tolist()) <= MAX_DOMAINS:
            return {}
        names = self.owner_names or tuple(map(str, range(found[-1] + 1)))
        return {sanitize(names[owner]): (self.owners == owner).nonzero().flatten() for owner in found}


def label_problem(train: LabeledImages, test: LabeledImages) -> str | None:
    """Return why labeled images cannot be classified; None if they can."""
    for images, name in zip((train, test), SPLITS.values(), strict=True):
        if not len(images.labels):
            return f"no {name} image has a label"
    label = train.labels[0]
    if (train.labels != label).any() or (test.labels != label).any():
        return None
    return f"all labeled images of the data set are of the class {train.class_name(int(label))}"
