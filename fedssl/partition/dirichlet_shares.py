"""Division of classes by Dirichlet shares, with the draws of flwr-datasets' `DirichletPartitioner`.

The time of that partitioner grows with the square of the number of clients in every draw that leaves a client too few
rows. Here it is proportional to the number of clients times that of classes. The results are identical wherever that
partitioner succeeds.
"""

import numpy as np

MAX_DRAWS = 11  # as flwr-datasets


def dirichlet(
    labels: np.ndarray, *, num_clients: int, alpha: float, min_size: int, seed: int, self_balancing: bool
) -> list[np.ndarray] | None:
    """Return the rows of each client, class by class; None if no draw gives all clients ``min_size`` rows.

    With ``self_balancing`` also None if no client can receive a class: all are full or have the share 0. Parameters are
    those of `fedssl.partition.partitioners.dirichlet`.
    """
    classes = [np.flatnonzero(labels == name) for name in np.unique(labels)]
    generator = np.random.default_rng(seed)
    average = len(labels) / num_clients
    for _ in range(MAX_DRAWS):
        sizes = np.zeros((len(classes), num_clients), dtype=np.int64)  # of each class and client
        for number, rows in enumerate(classes):
            shares = generator.dirichlet(np.full(num_clients, float(alpha)))
            if self_balancing:
                shares[sizes[:number].sum(axis=0) > average] = 0.0
                total = sum(shares.tolist())  # as flwr-datasets adds them; NumPy's order would change last bits
                if not total:
                    return None
                shares /= total
            if not np.isfinite(shares).all():
                return None
            ends = (np.cumsum(shares) * len(rows)).astype(np.int64)
            ends[-1] = len(rows)
            sizes[number] = np.diff(ends, prepend=0)
        if sizes.sum(axis=0).min() >= min_size:
            return _rows_of_clients(classes, sizes)
    return None


def _rows_of_clients(classes: list[np.ndarray], sizes: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each client, given the numbers of consecutive rows of each class ``(classes, clients)``."""
    clients = np.concatenate([np.repeat(np.arange(len(row)), row) for row in sizes])
    order = np.argsort(clients, kind="stable")
    return np.split(np.concatenate(classes)[order], np.cumsum(sizes.sum(axis=0))[:-1])
