"""The partition of a run: the pictures of every client, and those that the server keeps for its calibration."""

import numpy as np
import torch

from fedssl.config.settings import PartitionSettings
from fedssl.datasets.base import Pictures
from fedssl.errors import InputError
from fedssl.partition.base import Division, Images
from fedssl.partition.rules import MIN_PICTURES
from fedssl.seeding import numpy_generator


def split(settings: PartitionSettings, pictures: Pictures) -> list[np.ndarray]:
    """Positions of every client's pictures, as `divide` gives them."""
    return divide(settings, pictures).parts


def divide(settings: PartitionSettings, pictures: Pictures) -> Division:
    """Who holds what, and by what was divided, a pure function of the run's settings.

    Pictures that the server keeps for its calibration (see `auxiliary`) are no client's.

    Parameters
    ----------
    settings : PartitionSettings
    pictures : Pictures
        Pictures that the clients share.

    Returns
    -------
    Division
        Positions and groups are those of ``pictures``.

    Raises
    ------
    InputError
        If the pictures cannot be divided in this way.
    """
    number = len(pictures.images)
    rows = np.arange(number)
    if settings.set_aside is not None:
        rows = np.delete(rows, auxiliary(number, share=settings.set_aside, seed=settings.seed))
    shared = torch.from_numpy(rows)
    labels, owners = (None if column is None else column[shared] for column in (pictures.labels, pictures.owners))
    made: list[np.ndarray] | Division = settings.rule.make(
        labels,
        owners=owners,
        images=Images(pictures.images, shared, settings.cache),
        num_pictures=len(rows),
        num_clients=settings.num_clients,
        seed=settings.seed,
    )
    division = made if isinstance(made, Division) else Division(made)
    groups = division.groups
    if groups is not None:
        groups = torch.full((number,), -1).index_copy(0, shared, groups)
    return Division([rows[part] for part in division.parts], groups, division.kind)


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
