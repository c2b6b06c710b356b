"""The partition of a run: the pictures of every client, and those that the server keeps for its calibration."""

import numpy as np
import torch

from fedssl.datasets.base import Pictures
from fedssl.errors import InputError
from fedssl.partition.rules import MIN_PICTURES
from fedssl.seeding import numpy_generator
from fedssl.settings import PartitionSettings


def split(settings: PartitionSettings, pictures: Pictures) -> list[np.ndarray]:
    """Positions of every client's pictures, a pure function of the run's settings.

    Pictures that the server keeps for its calibration (see `auxiliary`) are no client's.

    Parameters
    ----------
    settings : PartitionSettings
    pictures : Pictures
        Pictures that the clients share.

    Returns
    -------
    list of ndarray
        For every client sorted int64 positions in ``pictures``.

    Raises
    ------
    InputError
        If the pictures cannot be divided in this way.
    """
    number, labels, owners = len(pictures.images), pictures.labels, pictures.owners
    rows = np.arange(number)
    if settings.set_aside is not None:
        rows = np.delete(rows, auxiliary(number, share=settings.set_aside, seed=settings.seed))
        shared = torch.from_numpy(rows)
        labels, owners = (None if column is None else column[shared] for column in (labels, owners))
    parts: list[np.ndarray] = settings.rule.make(
        labels,
        owners=owners,
        num_pictures=len(rows),
        num_clients=settings.num_clients,
        seed=settings.seed,
    )
    return [rows[part] for part in parts]


def auxiliary(num_pictures: int, *, share: float, seed: int) -> np.ndarray:
    """Positions of the pictures that the server calibrates with, a pure function of the seed.

    Parameters
    ----------
    num_pictures : int
        Pictures that there are.
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
        If ``share`` is out of range or leaves fewer than two pictures.
    """
    number = round(share * num_pictures) if 0 < share <= 1 else 0
    if number < MIN_PICTURES:
        raise InputError(
            f"calibration.share={share} of {num_pictures} pictures gives the server {number}, but it needs at least "
            f"{MIN_PICTURES}; set calibration.share=0.1"
        )
    return np.sort(numpy_generator(seed, "auxiliary").choice(num_pictures, size=number, replace=False))
