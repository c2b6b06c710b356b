"""Pictures in memory, decoded once per process and shared by everything that runs in it.

A data set is a YAML file under ``conf/dataset`` whose ``_target_`` is a function

    read(split, *, channels, size, limit, ...) -> Pictures | None

with the file's own keys as further arguments. The YAML key ``splits`` says which of the source's splits the clients
share (``federated``), which is the labelled bank of the probes (``train``) and which the test (``test``). Where two of
them name the same source split they are one object, so that nothing is decoded twice.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from hydra.utils import get_method
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedssl.errors import InputError
from fedssl.seeding import numpy_generator

Split = Literal["federated", "train", "test"]

# Keys that every data set has and that its reader does not need; the other keys are the reader's arguments.
_NOT_FOR_READER = frozenset({"_target_", "splits", "limit", "test_limit", "mean", "std", "num_classes"})
# Which pictures are test pictures or belong to a limited set is a property of the data, not of a run.
_FIXED_SEED = 0


@dataclass(frozen=True)
class Pictures:
    """Decoded pictures with their labels and owners, where these are known.

    Attributes
    ----------
    images : Tensor
        uint8, ``(n, channels, height, width)``.
    labels : Tensor or None
        int64, ``(n,)``; None if the pictures have no labels.
    classes : tuple of str
        Names of the classes, ``classes[label]``; empty if unknown.
    owners : Tensor or None
        int64, ``(n,)``, who made each picture (a writer, a device, a hospital); None if unknown.
    owner_names : tuple of str
        Names of the owners, ``owner_names[owner]``; empty if unknown.
    """

    images: torch.Tensor
    labels: torch.Tensor | None
    classes: tuple[str, ...] = ()
    owners: torch.Tensor | None = None
    owner_names: tuple[str, ...] = ()


def load(settings: DictConfig, split: Split) -> Pictures | None:
    """Pictures of one split; the same object for every caller in this process.

    Parameters
    ----------
    settings : DictConfig
        The group ``dataset`` of the configuration.
    split : {"federated", "train", "test"}
        Pictures that the clients share; the labelled bank of the probes; the labelled test pictures.

    Returns
    -------
    Pictures or None
        None if the data set has no such pictures, or if they have no labels and ``split`` is not "federated".

    Raises
    ------
    InputError
        If a setting, file or folder cannot be used.
    """
    check(settings)
    source = settings.splits[split]
    limit = settings.test_limit if split == "test" else settings.limit
    pictures = None if source is None else _read(OmegaConf.to_yaml(settings, resolve=True), source, limit)
    if split == "federated":
        if pictures is None:
            raise InputError(
                f"dataset.splits.federated={source} names no pictures; "
                "name each file or folder after its split (train-0.parquet, test-0.parquet) and check dataset.path"
            )
        return pictures
    return None if pictures is None or pictures.labels is None else pictures


def check(settings: DictConfig) -> None:
    """Refuse settings that contradict each other, before a picture is read.

    Raises
    ------
    InputError
        If the channels, the size, the statistics or a limit cannot be used.
    """
    channels = settings.channels
    if channels not in (1, 3):
        raise InputError(f"dataset.channels={channels} gives wrong channels; allowed are 1 (grey) and 3 (RGB)")
    if settings.size < 1:
        raise InputError(f"dataset.size={settings.size} must be at least 1 pixel")
    if any(len(settings[name]) != channels for name in ("mean", "std")):
        proposal = " ".join(f"dataset.{name}={_spread(settings[name], channels)}" for name in ("mean", "std"))
        raise InputError(
            f"dataset.mean has {len(settings.mean)} and dataset.std {len(settings.std)} values "
            f"but dataset.channels={channels}; give one value per channel, e.g. {proposal}"
        )
    if not all(value > 0 for value in settings.std):
        raise InputError(f"dataset.std={list(settings.std)} must be above 0 in every channel")
    for name in ("limit", "test_limit"):
        if settings[name] is not None and settings[name] < 1:
            raise InputError(f"dataset.{name}={settings[name]} must be at least 1 picture, or null for all of them")


def choose(count: int, limit: int | None) -> np.ndarray:
    """Positions ``(min(count, limit),)`` of the pictures to use, sorted; always the same ones. None: all."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(numpy_generator(_FIXED_SEED, "limit").permutation(count)[:limit])


def hold_out(labels: np.ndarray, *, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split positions into training and test with equal shares of every class; always the same ones.

    Every class gives the floor of its share; the classes with the largest remainders give one picture more until the
    test set has ``round(n * fraction)`` pictures.

    Parameters
    ----------
    labels : ndarray
        ``(n,)``.
    fraction : float
        Share of the test set in [0, 1).

    Returns
    -------
    tuple of ndarray
        Sorted positions of the training and of the test pictures.
    """
    _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shares = sizes * fraction
    quota = np.floor(shares).astype(int)
    quota[np.argsort(quota - shares, kind="stable")[: round(len(labels) * fraction) - quota.sum()]] += 1
    generator = numpy_generator(_FIXED_SEED, "hold out")
    members = [generator.permutation(np.flatnonzero(codes == code)) for code in range(len(sizes))]
    test = np.concatenate([positions[:taken] for positions, taken in zip(members, quota, strict=True)])
    return np.setdiff1d(np.arange(len(labels)), test), np.sort(test)


def _spread(values: ListConfig, channels: int) -> str:
    """Write the mean of ``values`` once per channel, as on the command line."""
    return "[" + ",".join([f"{sum(values) / len(values):.3f}"] * channels) + "]"


@lru_cache(maxsize=4)
def _read(text: str, source: str, limit: int | None) -> Pictures | None:
    """Read one split of the source; ``text`` is the YAML of the settings, which makes them a cache key."""
    settings = OmegaConf.create(text)
    assert isinstance(settings, DictConfig)
    own = {str(key): value for key, value in settings.items() if key not in _NOT_FOR_READER}
    # Not hydra's instantiate: it would wrap the InputError of the reader.
    pictures: Pictures | None = get_method(settings._target_)(source, limit=limit, **own)
    num_classes = settings.num_classes
    if pictures is not None and pictures.labels is not None and num_classes is not None:
        highest = int(pictures.labels.max())
        if highest >= num_classes:
            raise InputError(f"dataset.num_classes={num_classes} but a label is {highest}; check dataset.path")
    return pictures
