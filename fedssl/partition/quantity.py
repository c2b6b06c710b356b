"""Unequal numbers of images: log-normal or power-law client sizes, optionally with unequal classes.

LEAF (Caldas et al. 2018) and FedProx (Li et al., MLSys 2020) describe devices whose numbers of images follow a power
law; the code of FedProx and of FedDyn (Acar et al., ICLR 2021) draws log-normal numbers. As in FedDyn, ``alpha`` gives
each client its own mix of classes, and a class that is used up is replaced by the others. flwr-datasets'
`InnerDirichletPartitioner` needs the sizes and draws image by image.
"""

import numpy as np

from fedssl.config.constraints import check_arguments
from fedssl.datasets.holdout import rounded
from fedssl.errors import InputError
from fedssl.partition.partition import PartitionInput
from fedssl.partition.partitioners import image_order, labeled, with_unlabeled
from fedssl.seeding import numpy_generator


def quantity(
    data: PartitionInput, *, distribution: str, spread: float, alpha: float | None, min_size: int
) -> list[np.ndarray]:
    r"""Draw the number of images of every client, and then its images.

    $$
    n_k \approx m + (n - K m) \frac{w_k}{\sum_j w_j} \qquad
    w_k = \exp(\sigma z_k), \; z_k \sim \mathcal{N}(0, 1) \quad \text{or} \quad w_k = r_k^{-\sigma}
    $$

    with m the ``min_size``, $\sigma$ the ``spread``, and r a random order of the clients, from 1 to K.
    """
    check_arguments(
        "partition", owner="quantity", distribution=distribution, spread=spread, alpha=alpha, min_size=min_size
    )
    labels, order = (None, image_order(data)) if alpha is None else labeled(data, "quantity")
    if len(order) < data.num_clients * min_size:
        raise InputError(
            f"partition.min_size={min_size} for num_clients={data.num_clients} needs "
            f"{data.num_clients * min_size} images and there are {len(order)}; lower either"
        )
    generator = numpy_generator(data.seed, "partition", "sizes")
    if distribution == "lognormal":
        weights = np.exp(spread * generator.standard_normal(data.num_clients))
    else:
        weights = (1.0 + generator.permutation(data.num_clients)) ** -spread
    rest = len(order) - data.num_clients * min_size
    sizes = min_size + rounded(weights / weights.sum() * rest, rest)
    if labels is None or alpha is None:
        return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]
    parts = _mixed(order, labels[order], sizes, alpha, numpy_generator(data.seed, "partition", "mixes"))
    return with_unlabeled(parts, data, labels)


def _mixed(
    order: np.ndarray, labels: np.ndarray, sizes: np.ndarray, alpha: float, generator: np.random.Generator
) -> list[np.ndarray]:
    """Draw each client's images by its own mix of classes, one client after another in random order."""
    left = [order[labels == name] for name in np.unique(labels)]
    parts: list[np.ndarray] = [order[:0]] * len(sizes)
    for client in generator.permutation(len(sizes)):
        mix = generator.dirichlet(np.full(len(left), float(alpha)))
        drawn: list[np.ndarray] = []
        while missing := int(sizes[client]) - sum(len(rows) for rows in drawn):
            available = np.array([len(rows) for rows in left])
            shares = np.where(available > 0, mix, 0.0)
            shares = available / available.sum() if not shares.sum() > 0 else shares / shares.sum()
            counts = np.minimum(rounded(shares * missing, missing), available)
            drawn += [rows[:count] for rows, count in zip(left, counts, strict=True)]
            left = [rows[count:] for rows, count in zip(left, counts, strict=True)]
        parts[client] = np.concatenate([order[:0], *drawn])
    return parts
