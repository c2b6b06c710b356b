"""Clients of different sizes: each has a fixed multiple of the previous client's images."""

import numpy as np

from fedssl.errors import InputError
from fedssl.partition import MIN_IMAGES, PartitionInput
from fedssl.seeding import numpy_generator


def growing(data: PartitionInput, *, factor: float) -> list[np.ndarray]:
    """Draw the sorted int64 indices of every client's images; ``factor`` is the ratio of sizes, 1 for equal sizes."""
    num_images, num_clients = data.num_images, data.num_clients
    shares = float(factor) ** np.arange(num_clients)
    cuts = np.rint(num_images * shares.cumsum() / shares.sum()).astype(int)[:-1]
    order = numpy_generator(data.seed, "growing").permutation(num_images)
    parts = [np.sort(part) for part in np.split(order, cuts)]
    smallest = min(len(part) for part in parts)
    if smallest < MIN_IMAGES:
        raise InputError(
            f"partition.factor={factor} leaves a client with {smallest} of {num_images} images but each needs "
            f"{MIN_IMAGES}; set it closer to 1 or lower num_clients={num_clients}"
        )
    return parts
