"""Clients of different sizes: each has a fixed multiple of the images of the one before."""

import numpy as np
from torch import Tensor

from fedssl.errors import InputError
from fedssl.partition import MIN_IMAGES, ImageSubset
from fedssl.seeding import numpy_generator


def growing(
    labels: Tensor | None,
    *,
    owners: Tensor | None,
    images: ImageSubset,
    num_images: int,
    num_clients: int,
    seed: int,
    factor: float,
) -> list[np.ndarray]:
    """Sorted int64 positions of every client's images, drawn without regard to class.

    Parameters
    ----------
    labels, owners : Tensor or None
        Not looked at, nor are ``images``.
    num_images, num_clients, seed : int
        Of the run.
    factor : float
        A client has so many times the images of the one before it; 1: all have the same number.

    Raises
    ------
    InputError
        A client would have fewer than two images.
    """
    shares = float(factor) ** np.arange(num_clients)
    cuts = np.rint(num_images * shares.cumsum() / shares.sum()).astype(int)[:-1]
    order = numpy_generator(seed, "growing").permutation(num_images)
    parts = [np.sort(part) for part in np.split(order, cuts)]
    smallest = min(len(part) for part in parts)
    if smallest < MIN_IMAGES:
        raise InputError(
            f"partition.factor={factor} leaves a client with {smallest} of {num_images} images but each needs "
            f"{MIN_IMAGES}; bring it closer to 1 or lower num_clients={num_clients}"
        )
    return parts
