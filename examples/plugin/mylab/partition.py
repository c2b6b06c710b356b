"""Clients of different sizes: each has a fixed multiple of the pictures of the one before."""

import numpy as np
from torch import Tensor

from fedssl.errors import InputError
from fedssl.partition import MIN_PICTURES, Images
from fedssl.seeding import numpy_generator


def growing(
    labels: Tensor | None,
    *,
    owners: Tensor | None,
    images: Images,
    num_pictures: int,
    num_clients: int,
    seed: int,
    factor: float,
) -> list[np.ndarray]:
    """Sorted int64 positions of every client's pictures, drawn without regard to class.

    Parameters
    ----------
    labels, owners : Tensor or None
        Not looked at, nor are ``images``.
    num_pictures, num_clients, seed : int
        Of the run.
    factor : float
        A client has so many times the pictures of the one before it; 1: all have the same number.

    Raises
    ------
    InputError
        A client would have fewer than two pictures.
    """
    shares = float(factor) ** np.arange(num_clients)
    cuts = np.rint(num_pictures * shares.cumsum() / shares.sum()).astype(int)[:-1]
    order = numpy_generator(seed, "growing").permutation(num_pictures)
    parts = [np.sort(part) for part in np.split(order, cuts)]
    smallest = min(len(part) for part in parts)
    if smallest < MIN_PICTURES:
        raise InputError(
            f"partition.factor={factor} leaves a client with {smallest} of {num_pictures} pictures but each needs "
            f"{MIN_PICTURES}; bring it closer to 1 or lower num_clients={num_clients}"
        )
    return parts
