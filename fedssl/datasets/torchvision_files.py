"""Data sets in the files that `torchvision.datasets` downloads and reads, such as ``cifar-10-batches-py``.

torchvision compares pickles and files of MATLAB with their published MD5 before it opens them, so that no other pickle
is loaded.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.config.literal import user_path
from fedssl.config.overrides import did_you_mean
from fedssl.datasets.image_index import Place, Query, RecordSequence, SequenceIndex
from fedssl.datasets.npy import as_images, npy_bytes
from fedssl.datasets.splits import split_of_word
from fedssl.errors import InputError
from fedssl.logs import log_once

_PLACES: Mapping[str, str] = {  # of the files below the root, by class of `torchvision.datasets`
    "CIFAR10": "cifar-10-batches-py",
    "CIFAR100": "cifar-100-python",
    "SVHN": "train_32x32.mat",
    "STL10": "stl10_binary",
    "MNIST": "MNIST/raw",
    "FashionMNIST": "FashionMNIST/raw",
    "KMNIST": "KMNIST/raw",
}
_ARCHIVES = {
    "CIFAR10": "cifar-10-python.tar.gz",
    "CIFAR100": "cifar-100-python.tar.gz",
    "STL10": "stl10_binary.tar.gz",
}
_SPLITS: Mapping[str, tuple[str, ...]] = {"SVHN": ("train", "test", "extra"), "STL10": ("train", "test", "unlabeled")}
_LABELS = (None, "label", "labels", "fine_label")


def root_of(path: str, name: str, *, required: bool) -> Path | None:
    """Return torchvision's root of the files of the class ``name`` that ``path`` has; None if there are none.

    ``path`` is the root or the folder with the files. Raise an `InputError` for another class, and without files if
    they are ``required``.
    """
    if name not in _PLACES:
        raise InputError(
            f"dataset.torchvision={name} is not read{did_you_mean(name, _PLACES)}; allowed are {', '.join(_PLACES)}"
        )
    folder, place = user_path(path).absolute(), Path(_PLACES[name])
    if (folder / place).exists():
        return folder
    above = Path(*folder.parts[: -len(place.parts)])
    if above / place == folder and folder.exists():
        return above
    _check_unpacked(folder, name)
    if required:
        raise InputError(
            f"{path} has no {place} of torchvision's {name}; give the root of torchvision.datasets.{name} with its "
            "unpacked archive, or set dataset.torchvision=null"
        )
    return None


def _check_unpacked(folder: Path, name: str) -> None:
    """Raise an `InputError` if a path is the archive of a class, or a folder that has it in place of parquet files."""
    if name not in _ARCHIVES:
        return
    archive = folder if folder.name == _ARCHIVES[name] else folder / _ARCHIVES[name]
    if archive.is_file() and not any(folder.glob("**/*.parquet")):
        command = shlex.join(["tar", "xf", str(archive), "-C", str(archive.parent)])
        raise InputError(
            f"{archive} is the archive of torchvision's {name}; unpack it with {command} and give dataset.path="
            f"{shlex.quote(str(archive.parent))}"
        )


def class_of(path: str) -> str | None:
    """Return the class of `torchvision.datasets` whose files a path has, see `root_of`; None without any."""
    return next((name for name in _PLACES if root_of(path, name, required=False) is not None), None)


def index_torchvision(root: Path, name: str, query: Query) -> SequenceIndex | None:
    """Return the images of a split of a class of `torchvision.datasets`; None if it has no such split."""
    for setting in ("owner", "group"):
        if getattr(query, setting) is not None:
            raise InputError(
                f"dataset.{setting}={getattr(query, setting)} is a column, which torchvision's files lack; "
                f"set dataset.{setting}=null"
            )
    if query.label not in _LABELS:
        raise InputError(
            f"dataset.label={query.label} is not in torchvision's files of {name}; remove it, set dataset.label=null, "
            "or use parquet files of the Hub"
        )
    split = split_of_word(query.split) or query.split
    if split not in _SPLITS.get(name, ("train", "test")):
        return None
    data = _read(root, name, split)
    labels = np.asarray(data.labels if hasattr(data, "labels") else data.targets, dtype=np.int64)
    place = root / _PLACES[name]
    log_once(logging.INFO, f"{root}: {split} of torchvision's {name}, {len(labels):,} images")
    return _TorchvisionIndex(
        name=query.name,
        count=len(labels),
        decoding=query.decoding,
        files=sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else [root / data.filename],
        num_in_files=len(labels),
        key={"reader": "torchvision", "class": name, "split": split},
        images=_Images(cache(partial(_arrays, root, name, split, query.decoding.channels)), np.arange(len(labels))),
        labels=None if query.label is None else labels,
        classes=() if query.label is None else tuple(getattr(data, "classes", ())),
    )


def _read(root: Path, name: str, split: str) -> Any:
    """Return torchvision's data set, with all its images in memory."""
    import torchvision.datasets  # slow

    which = {"split": split} if name in _SPLITS else {"train": split == "train"}
    try:
        return getattr(torchvision.datasets, name)(root, **which)
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(
            f"{root / _PLACES[name]}: files of torchvision's {name} are missing or damaged; unpack its archive again"
        ) from error


def _arrays(root: Path, name: str, split: str, channels: int) -> np.ndarray:
    """Return the images ``(n, height, width, channels)``."""
    array = np.asarray(_read(root, name, split).data)
    return as_images(array[..., None] if array.ndim == 3 else array, channels)


class _TorchvisionIndex(SequenceIndex):
    images: "_Images"

    def places(self, rows: np.ndarray) -> list[Place]:
        return [Place(self.files[0], str(row)) for row in self.images.rows[rows]]


class _Images(RecordSequence):
    """Rows of the array that ``load`` returns, as NPY files; it is read when it is used."""

    def __init__(self, load: Callable[[], np.ndarray], rows: np.ndarray) -> None:
        self._load, self.rows = load, rows

    def at(self, rows: np.ndarray) -> "_Images":
        return _Images(self._load, self.rows[rows])

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        """Return a row as an NPY file."""
        return npy_bytes(self._load()[self.rows[index]])
