"""Images of a data set, loaded once per process and shared by all its callers.

Large data sets are decoded once per host, or stay encoded, see `fedssl.datasets.cache` and `fedssl.datasets.images`.

A data set is a YAML file under ``conf/dataset`` whose ``_target_`` is a function

    read(split, *, channels, size, limit, ...) -> ImageData | None

with the file's own keys as further arguments. The YAML key ``splits`` names the source's splits: the images of the
clients (``federated``), the labeled training images of evaluations (``train``) and the test images (``test``). Two keys
with the same source split share one object, so that nothing is decoded twice.
"""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch

from fedssl.config.constraints import check_arguments
from fedssl.config.settings import DataSettings, check_channels
from fedssl.datasets.holdout import NO_LABEL, domain_rows
from fedssl.datasets.image_index import ImageIndex, columns_at
from fedssl.datasets.images import ImageSource, SelectedImages
from fedssl.datasets.raster import MAXIMA
from fedssl.datasets.sample_checks import constant_warnings, sample_of
from fedssl.datasets.storage import Storage
from fedssl.errors import InputError
from fedssl.logs import log_once
from fedssl.safe_io import FilePath
from fedssl.seeding import numpy_generator, python_seed

Split = Literal["federated", "train", "test"]

# Images in memory of each index, with all that they depend on, see `fedssl.datasets.cache`.
decoded: dict[str, tuple[tuple[str, str], ImageSource, Storage]] = {}

_SPLITS = 16  # that are in memory: evaluations may use several data sets

# The limited subset depends on the data, not on the run's seed.
_FIXED_SEED = 0


@dataclass(frozen=True)
class ImageData:
    """Images with their labels and owners, if known."""

    images: ImageSource  # ``(n, channels, height, width)``; `TensorImages` for those of a tensor
    labels: torch.Tensor | None  # int64, ``(n,)``, `NO_LABEL` if unknown; None if no image has a label
    classes: tuple[str, ...] = ()  # names, ``classes[label]``; empty if unknown
    owners: torch.Tensor | None = None  # int64, ``(n,)``, such as writers, devices or hospitals; None if unknown
    owner_names: tuple[str, ...] = ()  # ``owner_names[owner]``; empty if unknown
    groups: torch.Tensor | None = None  # int64, ``(n,)``, such as patients, scenes or videos; None if unknown
    warnings: tuple[str, ...] = ()  # such as unreadable files; logged by every process that loads the images
    failed_files: tuple[FilePath, ...] = ()  # that could not be read, and may be later
    origin: tuple[ImageIndex, np.ndarray] | None = None  # what was read, and the rows of its images; None if unknown
    folder: Path | None = None  # of the cache that has the images; None if there is none

    def of(self, images: ImageSource, rows: torch.Tensor) -> Self:
        """Return ``images``, which are those at ``rows``, with all that is known about them."""
        origin = None if self.origin is None else (self.origin[0], self.origin[1][rows.numpy()])
        return replace(self, images=images, origin=origin, **columns_at(self, rows))


def load_split(data: DataSettings, split: Split) -> ImageData | None:
    """Return the images of one split; the same object for every caller in this process; None if there are none."""
    check_data_settings(data)
    source = source_split(data, split) or (data.train if data.held_out else None)
    if source is None:
        return None
    images = replace(data, mean=(), std=())  # which change no stored pixel
    if data.held_out:
        return _read_domains(images, source, split == "test")
    return _read_split(images, source, data.test_limit if split == "test" else data.limit)


def source_split(data: DataSettings, split: Split) -> str | None:
    """Return the source's name of a split; None if the settings have none."""
    return {"federated": data.federated, "train": data.train, "test": data.test}[split]


def load_federated(data: DataSettings) -> ImageData:
    """Return the images of the clients, as `load_split` does; raise an `InputError` if there are none."""
    image_data = load_split(data, "federated")
    if image_data is None:
        raise InputError(
            f"dataset.splits.federated={data.federated} names no images; "
            "name each file or folder after its split (train-0.parquet, test-0.parquet) and check dataset.path"
        )
    return image_data


def check_data_settings(data: DataSettings) -> None:
    """Validate the settings of a data set, before an image is read."""
    names = ("channels", "size", "mean", "std", "limit", "test_limit", "num_classes")
    check_arguments("dataset", **{name: getattr(data, name) for name in names})
    check_channels(data)


def find_changes() -> None:
    """List the files again at the next call, and log what they hold; those that have changed are decoded again."""
    _read_split.cache_clear()
    _read_domains.cache_clear()
    log_once.cache_clear()


def forget_images() -> None:
    """Read all images again at the next call, because files have changed."""
    find_changes()
    decoded.clear()


def subsample_indices(count: int, limit: int | None) -> np.ndarray:
    """Draw ``min(count, limit)`` sorted indices, always the same; all indices if ``limit`` is None."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(numpy_generator(_FIXED_SEED, "limit").permutation(count)[:limit])


@lru_cache(maxsize=_SPLITS)
def _read_domains(data: DataSettings, source: str, is_test: bool) -> ImageData | None:
    """Return the images of the domains that are held out, or those of the others.

    Test images come from the test split, or from the training split if the test split has none.
    """
    for name in dict.fromkeys([source, data.train or source] if is_test else [source]):
        image_data = _read_split(data, name, data.test_limit if is_test and name == data.test else data.limit)
        if image_data is None:
            continue
        rows = domain_rows(image_data.owners, image_data.owner_names, data.held_out, held_out=is_test)
        if is_test and name != data.test:
            rows = rows[subsample_indices(len(rows), data.test_limit)]
        if len(rows):
            return select(image_data, torch.from_numpy(rows))
    return None


def select(image_data: ImageData, rows: torch.Tensor) -> ImageData:
    """Return some of the images, which are not copied."""
    chosen = image_data.of(SelectedImages(image_data.images, rows), rows)
    is_labeled = chosen.labels is not None and (chosen.labels != NO_LABEL).any()
    return chosen if is_labeled else replace(chosen, labels=None)


@lru_cache(maxsize=_SPLITS)
def _read_split(data: DataSettings, source: str, limit: int | None) -> ImageData | None:
    with python_seed(0):
        image_data: ImageData | None = data.reader.instantiate(source, limit=limit)
    if image_data is None:
        return None
    _check_read(image_data, data)
    for warning in (*image_data.warnings, *constant_warnings(image_data.images)):
        log_once(logging.WARNING, warning)
    if image_data.labels is None:
        return image_data
    highest = int(image_data.labels.max())
    if highest == NO_LABEL:
        return replace(image_data, labels=None)
    if data.num_classes is not None and highest >= data.num_classes:
        count = max(highest + 1, len(image_data.classes))
        raise InputError(
            f"dataset.num_classes={data.num_classes} but the class {highest} exists; set dataset.num_classes={count}, "
            "or check dataset.path and dataset.label"
        )
    return image_data


def _check_read(image_data: ImageData, data: DataSettings) -> None:
    """Raise `InputError` unless a reader has returned images of the settings, and a label for each or none."""
    name, kind = data.reader.name, type(image_data).__name__
    if not isinstance(image_data, ImageData):
        raise InputError(f"{name} returns a {kind}; return fedssl.datasets.base.ImageData(images, labels)")
    images, labels = image_data.images, image_data.labels
    if not isinstance(images, ImageSource):
        raise InputError(
            f"{name} returns images as {type(images).__name__}; return fedssl.datasets.images.TensorImages(images)"
        )
    dtype, expected = str(images.dtype).removeprefix("torch."), (data.channels, data.size, data.size)
    if dtype not in MAXIMA:
        raise InputError(
            f"{name} returns images of dtype {dtype}; return {', '.join(MAXIMA)}, of which white is "
            f"{', '.join(map(str, MAXIMA.values()))}"
        )
    if not len(images) or tuple(images.shape[1:]) != expected:
        raise InputError(
            f"{name} returns images of shape {tuple(images.shape)}; return one or more of shape {expected}"
        )
    if images.dtype == torch.float32:
        sample = sample_of(images)
        low, high = float(sample.min()), float(sample.max())
        if not 0 <= low <= high <= 1:
            raise InputError(f"{name} returns float32 images from {low:g} to {high:g}; return values in [0, 1]")
    if labels is not None and not (
        isinstance(labels, torch.Tensor) and labels.dtype == torch.int64 and labels.shape == (len(images),)
    ):
        found = f"{labels.dtype} of shape {tuple(labels.shape)}" if hasattr(labels, "shape") else type(labels).__name__
        raise InputError(f"{name} returns labels as {found}; return torch.int64 of shape ({len(images)},), or None")
