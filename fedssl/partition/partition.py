"""The partition of a run: the images of every client, and the server's images for its calibration.

Long-tailed classes of the clients' images are those of Cao et al. (NeurIPS 2019, LDAM: CIFAR-10-LT).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedssl.config.constraint_table import MIN_IMAGES
from fedssl.config.settings import PartitionSettings
from fedssl.datasets.base import ImageData
from fedssl.datasets.holdout import NO_LABEL
from fedssl.datasets.images import ImageSource
from fedssl.errors import InputError
from fedssl.seeding import derive_seed, numpy_generator, python_seed


@dataclass(frozen=True, eq=False)
class ImageSubset:
    """Images to be partitioned. They may exceed the memory; load them in chunks."""

    source: ImageSource  # ``(N, channels, height, width)``, all images of the data set
    rows: Tensor  # int64, ``(n,)``, indices of the images to be partitioned
    cache: str | None = None  # folder for slow computations on the images, as ``dataset.cache``. None stores nothing

    def __len__(self) -> int:
        return len(self.rows)

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield the images in order, ``(m, channels, height, width)``, ``size`` at a time."""
        return self.source.prefetch(self.rows.split(size))


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionInput:
    """Input of a partitioner."""

    labels: Tensor | None  # int64, ``(n,)``, `NO_LABEL` if unknown; None if the data set has none
    owners: Tensor | None = None  # int64, ``(n,)``, owner of each image; None if unknown
    owner_names: tuple[str, ...] = ()  # ``owner_names[owner]``; empty if unknown
    images: ImageSubset
    num_clients: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise InputError(f"num_clients={self.num_clients} must be at least 1")
        if not self.num_images:
            raise InputError("the data set has no images to be partitioned; check dataset.path and dataset.limit")

    @property
    def num_images(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Partition:
    """Images of every client, and the groups by which a partitioner divides them."""

    client_indices: list[np.ndarray]  # sorted int64 indices of every client's images
    # int64, ``(n,)``, group of each image, from 0; -1 for images of no client. None if the partitioner divides by
    # classes, owners or nothing.
    groups: Tensor | None = None
    kind: str = "group"  # name of a group in table and figure
    group_names: tuple[str, ...] = ()  # ``group_names[group]``; empty: the kind and the number

    @property
    def names(self) -> tuple[str, ...]:
        if self.groups is None or self.group_names:
            return self.group_names
        return tuple(f"{self.kind} {number}" for number in range(self.groups.max() + 1))


def client_indices(settings: PartitionSettings, image_data: ImageData) -> list[np.ndarray]:
    """Return the indices of every client's images, see `make_partition`."""
    return _kept_partition(settings, image_data).client_indices


def labeled_indices(client_indices: Sequence[np.ndarray], labels: torch.Tensor | None) -> list[np.ndarray]:
    """Return the indices of every client's images that have a label."""
    assert labels is not None  # the method needs them
    return [rows[labels.numpy()[rows] != NO_LABEL] for rows in client_indices]


def make_partition(settings: PartitionSettings, image_data: ImageData) -> Partition:
    """Partition the images among the clients, as a pure function of the run's settings.

    The last result is kept: a process that runs server and clients, or several jobs of a sweep, computes it once. The
    server's images for its calibration (see `server_indices`), and those that `long_tail` leaves out, belong to no
    client. Indices and groups refer to ``image_data``. A user's rule is called twice, because every process calls it:
    `InputError` if the results differ.
    """
    is_new = not any(known == settings and images is image_data for known, images, _ in _last)
    partition = _kept_partition(settings, image_data)
    if is_new and not settings.rule.target.startswith("fedssl."):
        pairs = zip(partition.client_indices, _partition(settings, image_data).client_indices, strict=True)
        if not all(np.array_equal(first, second) for first, second in pairs):
            raise InputError(
                f"{settings.rule.name} returns other clients in a second call, as in another process; draw all random "
                "numbers from data.seed"
            )
    return partition


def _kept_partition(settings: PartitionSettings, image_data: ImageData) -> Partition:
    for known_settings, known_images, partition in _last:
        if known_settings == settings and known_images is image_data:
            return partition
    partition = _partition(settings, image_data)
    _last[:] = [(settings, image_data, partition)]
    return partition


_last: list[tuple[PartitionSettings, ImageData, Partition]] = []


def _partition(settings: PartitionSettings, image_data: ImageData) -> Partition:
    num_images = len(image_data.images)
    rows = np.arange(num_images)
    reasons = []
    if settings.server_fraction is not None:
        rows = np.delete(rows, server_indices(num_images, share=settings.server_fraction, seed=settings.seed))
        reasons.append(f"calibration.share={settings.server_fraction:g}")
    if settings.imbalance > 1:
        labels = None if image_data.labels is None else image_data.labels[torch.from_numpy(rows)]
        rows = rows[long_tail(labels, imbalance=settings.imbalance, seed=settings.seed)]
        reasons.append(f"imbalance={settings.imbalance:g}")
    shared = torch.from_numpy(rows)
    labels, owners = (None if column is None else column[shared] for column in (image_data.labels, image_data.owners))
    try:
        data = PartitionInput(
            labels=labels,
            owners=owners,
            owner_names=image_data.owner_names,
            images=ImageSubset(image_data.images, shared, settings.cache),
            num_clients=settings.num_clients,
            seed=settings.seed,
        )
        with python_seed(derive_seed(settings.seed, "partition")):
            # Positional: Hydra would convert a dataclass among the keywords to a configuration.
            result: Any = settings.rule.instantiate(data)
            result = list(result) if isinstance(result, Iterator) else result
    except InputError as error:
        if not reasons:
            raise
        raise InputError(
            f"{error} ({' and '.join(reasons)} of {num_images} images leaves the clients {len(rows)})"
        ) from error
    if not isinstance(result, Partition | Iterable) or isinstance(result, str | Mapping):
        raise InputError(
            f"{settings.rule.name} returns {type(result).__name__}; return a list with the indices of each client"
        )
    partition = result if isinstance(result, Partition) else Partition(list(result))
    parts = _checked_parts(
        partition.client_indices, num_images=len(rows), num_clients=settings.num_clients, name=settings.rule.name
    )
    groups = partition.groups
    if groups is not None:
        groups = torch.full((num_images,), -1).index_copy(0, shared, groups)
    return replace(partition, client_indices=[rows[part] for part in parts], groups=groups)


def _checked_parts(parts: Sequence[np.ndarray], *, num_images: int, num_clients: int, name: str) -> list[np.ndarray]:
    """Return the indices that a rule returns, int64; `InputError` unless each image has at most one of all clients."""
    if len(parts) != num_clients:
        raise InputError(
            f"{name} returns the images of {len(parts)} clients; return those of num_clients={num_clients}"
        )
    if not all(_is_flat(part) for part in parts):
        raise InputError(f"{name} returns other parts than lists of indices; return one array or list for each client")
    kinds = {np.asarray(part).dtype.kind for part in parts if len(part)}
    indices = np.concatenate([np.empty(0, np.int64), *parts])
    if not kinds <= {"i", "u"} or ((indices < 0) | (indices >= num_images)).any():
        raise InputError(f"{name} returns other indices than 0 to {num_images - 1}; return integers, arrays of NumPy")
    if len(indices) and np.bincount(indices.astype(np.int64)).max() > 1:
        raise InputError(f"{name} assigns an image to several clients; assign each to one")
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _is_flat(part: Any) -> bool:
    try:
        return np.ndim(part) == 1
    except ValueError:  # lists of several lengths
        return False


def rows_of_clients(clients: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """Return the ascending rows of each client from the client of every row ``(n,)``; -1 is none."""
    order = np.argsort(clients, kind="stable")
    return np.split(order, np.searchsorted(clients[order], np.arange(num_clients + 1)))[1:-1]


def clients_of_rows(parts: Iterable[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the client of every row, int64 ``(num_rows,)``, -1 for none, from the rows of each client."""
    clients = np.full(num_rows, -1)
    for client, rows in enumerate(parts):
        clients[rows] = client
    return clients


def server_indices(num_images: int, *, share: float, seed: int, min_images: int = MIN_IMAGES) -> np.ndarray:
    """Draw the sorted indices of the server's ``share`` of the images for its calibration, as a pure function."""
    size = round(share * num_images) if 0 < share <= 1 else 0
    if size < min_images:
        enough = max(math.ceil(100 * min_images / max(num_images, 1)) / 100, 0.1)
        raise InputError(
            f"calibration.share={share} of {num_images} images gives the server {size}, but it needs at least "
            f"{min_images}; {f'set calibration.share={enough:g}' if enough <= 1 else 'add images'}"
        )
    return np.sort(numpy_generator(seed, "auxiliary").choice(num_images, size=size, replace=False))


def long_tail(labels: Tensor | None, *, imbalance: float, seed: int) -> np.ndarray:
    r"""Return sorted indices of images whose class sizes fall exponentially, in the order of the classes.

    $$
    n_c = \lfloor n_0 \, \rho^{-c / (C - 1)} \rfloor
    $$

    with $\rho$ the ``imbalance``, and $n_0$ the largest number for which every class has enough images: all images of
    the first class, if classes are equally large. In the authors' code ``imb_factor`` is $1 / \rho$. Images without a
    label are left out. ``labels`` are int64, ``(n,)``; None if the data set has none.
    """
    column = np.empty(0, np.int64) if labels is None else labels.numpy()
    names, available = np.unique(column[column != NO_LABEL], return_counts=True)
    if len(names) < 2:
        raise InputError(
            f"imbalance={imbalance:g} needs images of several classes, and the clients' have "
            f"{'one class' if len(names) else 'no labels'}; set imbalance=1"
        )
    places = np.arange(len(names)) / (len(names) - 1)  # from 0 to 1
    shares = imbalance**-places
    sizes = np.floor(shares * (available / shares).min() + 1e-9).astype(np.int64)
    if not sizes[-1]:
        largest = np.floor((available[:-1] ** (1 / (1 - places[:-1]))).min())
        raise InputError(
            f"imbalance={imbalance:g} leaves the last of {len(names)} classes no image; set imbalance={largest:.0f} "
            "or less"
        )
    generator = numpy_generator(seed, "partition", "long tail")
    chosen = [
        generator.permutation(np.flatnonzero(column == name))[:size] for name, size in zip(names, sizes, strict=True)
    ]
    return np.sort(np.concatenate(chosen))
