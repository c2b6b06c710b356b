"""Domains: every client's images come from one domain, such as photos, sketches or one hospital's scanner.

FedBN (Li et al., ICLR 2021) gives each domain of Digits, Office-Caltech and DomainNet one client, and for its analysis
equally many clients, with equal parts of the images. FPL (Huang et al., CVPR 2023) draws the number of clients of a
domain. Here the numbers of clients differ by at most one, as in FedBN: a domain with many images dominates neither the
rounds nor their sampling.
"""

from dataclasses import replace

import numpy as np
import torch

from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.partition.partition import Partition, PartitionInput
from fedssl.partition.partitioners import divide_classes, iid
from fedssl.seeding import derive_seed


def domain(data: PartitionInput, *, alpha: float | None, min_size: int) -> Partition:
    r"""Give client k images of domain k mod D; the clients of a domain share its images.

    $$
    D_k \subseteq \{ i : o_i = k \bmod D \}
    $$

    with $o_i$ the domain of image i, in the order of their names.
    """
    check_arguments("partition", owner="domain", alpha=alpha, min_size=min_size)
    if data.owners is None:
        raise InputError(
            "partition=domain needs the domain of every image but the images have none; name their column "
            "(dataset.owner=COLUMN) or make their folders (dataset.folders=domain/class), or give partition=iid"
        )
    if alpha is not None and data.labels is None:
        raise InputError(
            f"partition.alpha={alpha} divides the classes of a domain but the images have no labels; set "
            "partition.alpha=null for equal sizes"
        )
    codes, owners = np.unique(data.owners.numpy(), return_inverse=True)
    names = [data.owner_names[code] if data.owner_names else str(code) for code in codes]
    if data.num_clients < len(names):
        raise InputError(
            f"partition=domain with num_clients={data.num_clients} leaves {len(names) - data.num_clients} of "
            f"{len(names)} domains without a client; set num_clients={len(names)} or more, or partition=natural, which "
            "gives a client several"
        )
    parts: list[np.ndarray] = [np.empty(0, np.int64)] * data.num_clients
    for number, name in enumerate(names):
        rows, clients = np.flatnonzero(owners == number), range(number, data.num_clients, len(names))
        if len(rows) < len(clients) * min_size:
            raise InputError(
                f"the domain {name!r} has {len(rows)} images for {len(clients)} of num_clients={data.num_clients} "
                f"clients, fewer than partition.min_size={min_size} for each; lower num_clients, leave the domain out, "
                "or lower partition.min_size"
            )
        shared = _shared(data, rows, f"the {len(clients)} clients of {name!r}", len(clients), alpha, min_size)
        for client, part in zip(clients, shared, strict=True):
            parts[client] = rows[part]
    return Partition(parts, torch.from_numpy(owners), "domain", tuple(names))


def _shared(
    data: PartitionInput, rows: np.ndarray, clients: str, num_clients: int, alpha: float | None, min_size: int
) -> list[np.ndarray]:
    """Divide the images of a domain among its clients."""
    chosen = torch.from_numpy(rows)
    part = replace(
        data,
        labels=None if data.labels is None else data.labels[chosen],
        owners=None,
        images=replace(data.images, rows=data.images.rows[chosen]),
        num_clients=num_clients,
        seed=derive_seed(data.seed, "partition", "domain", int(rows[0])),
    )
    if alpha is None:
        return iid(part)
    return divide_classes(part, "domain", clients, alpha=alpha, min_size=min_size, self_balancing=False)
