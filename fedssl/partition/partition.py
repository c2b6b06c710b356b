"""The partition of a run: the images of every client, and those that the server keeps for its calibration."""

import numpy as np
import torch

from fedssl.config.settings import PartitionSettings
from fedssl.datasets.base import ImageData
from fedssl.errors import InputError
from fedssl.partition.base import ImageSubset, Partition
from fedssl.partition.partitioners import MIN_IMAGES
from fedssl.seeding import numpy_generator


def client_indices(settings: PartitionSettings, image_data: ImageData) -> list[np.ndarray]:
    """Positions of every client's images, as `make_partition` gives them."""
    return make_partition(settings, image_data).client_indices


def make_partition(settings: PartitionSettings, image_data: ImageData) -> Partition:
    """Who holds what, and by what was divided, a pure function of the run's settings.

    Images that the server keeps for its calibration (see `server_indices`) are no client's.

    Parameters
    ----------
    settings : PartitionSettings
    image_data : ImageData
        Images that the clients share.

    Returns
    -------
    Partition
        Positions and groups are those of ``image_data``.

    Raises
    ------
    InputError
        If the images cannot be divided in this way.
    """
    number = len(image_data.images)
    rows = np.arange(number)
    if settings.server_fraction is not None:
        rows = np.delete(rows, server_indices(number, share=settings.server_fraction, seed=settings.seed))
    shared = torch.from_numpy(rows)
    labels, owners = (None if column is None else column[shared] for column in (image_data.labels, image_data.owners))
    made: list[np.ndarray] | Partition = settings.rule.instantiate(
        labels,
        owners=owners,
        images=ImageSubset(image_data.images, shared, settings.cache),
        num_images=len(rows),
        num_clients=settings.num_clients,
        seed=settings.seed,
    )
    partition = made if isinstance(made, Partition) else Partition(made)
    groups = partition.groups
    if groups is not None:
        groups = torch.full((number,), -1).index_copy(0, shared, groups)
    return Partition([rows[part] for part in partition.client_indices], groups, partition.kind)


def server_indices(num_images: int, *, share: float, seed: int) -> np.ndarray:
    """Positions of the images that the server calibrates with, a pure function of the seed.

    Parameters
    ----------
    num_images : int
        Images that there are.
    share : float
        Share of them that the server keeps, above 0 and at most 1.
    seed : int
        Seed of the run.

    Returns
    -------
    ndarray
        int64, sorted.

    Raises
    ------
    InputError
        If ``share`` is out of range or leaves fewer than two images.
    """
    number = round(share * num_images) if 0 < share <= 1 else 0
    if number < MIN_IMAGES:
        raise InputError(
            f"calibration.share={share} of {num_images} images gives the server {number}, but it needs at least "
            f"{MIN_IMAGES}; set calibration.share=0.1"
        )
    return np.sort(numpy_generator(seed, "auxiliary").choice(num_images, size=number, replace=False))
