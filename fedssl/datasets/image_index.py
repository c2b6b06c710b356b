"""Encoded images of a split, in order, with their labels and owners: what the reader of a format finds."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedssl.datasets.decoding import Decoding, Encoded, Shape
from fedssl.errors import InputError
from fedssl.safe_io import FilePath, sanitize

_MAX_LISTED = 5  # images listed in a warning


@dataclass(frozen=True, kw_only=True)
class ImageIndex(ABC):
    """Encoded images of a split; see `fedssl.datasets.base.ImageData` for the last five fields."""

    name: str  # readable part of the name of their folder in a cache
    count: int  # number of the images
    decoding: Decoding
    files: Sequence[FilePath]  # files with the encoded images
    num_in_files: int  # number of images in the files
    key: Mapping[str, Any]  # what else the pixels depend on, as JSON values
    labels: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.count, self.decoding.channels, self.decoding.size, self.decoding.size

    @abstractmethod
    def batches(self, start: int) -> Iterator[Sequence[Encoded]]:
        """Yield the images from index ``start`` on, as tasks of a decoding thread."""

    @abstractmethod
    def sample(self, readable: np.ndarray) -> Iterable[Encoded]:
        """Return some of the images, given the indices of those that can be read."""

    @abstractmethod
    def image_name(self, index: int) -> str:
        """Return the name of an image for a message."""

    @abstractmethod
    def records(self) -> Sequence[Encoded] | None:
        """Return the images where they are; None if they must be copied to be found again."""

    def num_bytes(self) -> int:
        """Return the approximate size of a copy of the images."""
        return 0

    def unreadable_warnings(self, unreadable: Mapping[int, str]) -> tuple[str, ...]:
        """Return one warning about unreadable images, by index with their reasons; empty if there are none.

        Raise an `InputError` if all images are unreadable.
        """
        if not unreadable:
            return ()
        reasons = list(unreadable.items())[:_MAX_LISTED]
        listed = "; ".join(f"{self.image_name(index)} ({reason})" for index, reason in reasons)
        listed += f"; and {len(unreadable) - _MAX_LISTED} more" if len(unreadable) > _MAX_LISTED else ""
        if len(unreadable) == self.count:
            raise InputError(f"none of the {self.count} images can be read: {listed}; check dataset.path")
        return (sanitize(f"{len(unreadable)} of {self.count} images cannot be read, the rest is used: {listed}"),)
