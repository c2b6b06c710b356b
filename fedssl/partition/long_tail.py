"""Long-tailed classes of the clients' images, before the partition (Cao et al., NeurIPS 2019, LDAM: CIFAR-10-LT)."""

import numpy as np
from torch import Tensor

from fedssl.datasets.holdout import NO_LABEL
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator


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
