"""Data sets in the files that `torchvision.datasets` downloads and reads, such as ``cifar-10-batches-py``.

torchvision compares the files of CIFAR, SVHN and STL-10 with their published MD5 before it opens them, so that no other
pickle is loaded. Files of MNIST have numbers only.
"""

import logging
import shlex
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.config.literal import user_path
from fedssl.config.overrides import did_you_mean
from fedssl.datasets.image_index import Query, SequenceIndex, file_line
from fedssl.datasets.listing import exists, is_file
from fedssl.datasets.npz import ArrayImages, ArrayIndex, image_stack
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
    if exists(folder / place):
        return folder
    above = Path(*folder.parts[: -len(place.parts)])
    if above / place == folder and exists(folder):
        return above
    _check_unpacked(folder, name)
    if required:
        raise InputError(
            f"{path} has no {place} of torchvision's {name}; give the root of torchvision.datasets.{name} with its "
            "unpacked archive, or set dataset.torchvision=null"
        )
    return None


def _check_unpacked(folder: Path, name: str) -> None:
    """Raise an `InputError` if a path is the archive of a class, or a folder that has it in place of tables."""
    if name not in _ARCHIVES:
        return
    archive = folder if folder.name == _ARCHIVES[name] else folder / _ARCHIVES[name]
    others = chain.from_iterable(folder.glob(f"**/*{ending}") for ending in (".parquet", ".arrow"))
    if is_file(archive) and not any(others):
        command = shlex.join(["tar", "xf", str(archive), "-C", str(archive.parent)])
        raise InputError(
            f"{archive} is the archive of torchvision's {name}; unpack it with {command} and give dataset.path="
            f"{shlex.quote(str(archive.parent))}"
        )


def class_of(path: str) -> str | None:
    """Return the class of `torchvision.datasets` whose files a path has, see `root_of`; None without any."""
    return next((name for name in _PLACES if root_of(path, name, required=False) is not None), None)


def index_torchvision(root: Path, name: str, query: Query) -> SequenceIndex:
    """Return the images of a split of a class of `torchvision.datasets`."""
    for setting in ("owner", "group"):
        if getattr(query, setting) is not None:
            raise InputError(
                f"dataset.{setting}={getattr(query, setting)} is a column, which torchvision's files lack; "
                f"set dataset.{setting}=null"
            )
    if query.label not in (None, "label", *(["fine_label"] if name == "CIFAR100" else [])):
        raise InputError(
            f"dataset.label={query.label} is not in torchvision's files of {name}; remove it, set dataset.label=null, "
            "or use parquet files of the Hub"
        )
    split = split_of_word(query.split) or query.split
    splits = _SPLITS.get(name, ("train", "test"))
    if split not in splits:
        raise InputError(
            f"torchvision's {name} has no split {query.split!r}, only {', '.join(splits)}; name one of them in "
            "dataset.splits"
        )
    files = _files(root, name)
    load = partial(_read, root, name, split, "".join(str(file_line(file)) for file in files))
    data = load()
    labels = np.asarray(data.labels if hasattr(data, "labels") else data.targets, dtype=np.int64)
    if len(labels) != len(data.data):
        raise _damaged(root, name)
    log_once(logging.INFO, f"{root}: {split} of torchvision's {name}, {len(labels):,} images")
    return ArrayIndex(
        name=query.name,
        count=len(labels),
        decoding=query.decoding,
        files=files,
        num_in_files=len(labels),
        key={"reader": "torchvision", "class": name, "split": split},
        images=ArrayImages(
            [(files[0], split)],
            np.zeros(len(labels), np.int64),
            np.arange(len(labels)),
            read_array=cache(lambda _: image_stack(np.asarray(load().data), query.decoding.channels)),
        ),
        labels=None if query.label is None else labels,
        classes=() if query.label is None else tuple(getattr(data, "classes", ())),
    )


def _files(root: Path, name: str) -> list[Path]:
    """Return the files that torchvision may read, also of its older forms of MNIST."""
    if name == "SVHN":
        return sorted(root.glob("*_32x32.mat"))
    return sorted(file for file in (root / Path(_PLACES[name]).parts[0]).rglob("*") if is_file(file))


def _damaged(root: Path, name: str) -> InputError:
    return InputError(
        f"{root / _PLACES[name]}: files of torchvision's {name} are missing or damaged; unpack its archive again"
    )


@lru_cache(maxsize=1)  # the index needs the labels, and then the decoding the images
def _read(root: Path, name: str, split: str, stamp: str) -> Any:
    """Return torchvision's data set, with all its images in memory; ``stamp`` changes with its files."""
    import torchvision.datasets  # slow

    which = {"split": split} if name in _SPLITS else {"train": split == "train"}
    try:
        return getattr(torchvision.datasets, name)(root, **which)
    except MemoryError:
        raise
    except Exception as error:  # damaged files can raise anything
        raise _damaged(root, name) from error
