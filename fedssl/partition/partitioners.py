"""Partitioners: every image belongs to exactly one client. A client may have no image.

``iid`` and ``dirichlet`` are those of flwr-datasets, bit for bit, without the imports of its package (5 s in every
process), and ``skew`` is the skewness of Dec-SSL (arXiv 2210.10947). They shuffle the images by the run's seed first,
so that the order of the data set has no effect.
``pathological`` assigns classes in turn: all classes are assigned, and their numbers of holders differ by at most one.
flwr-datasets' own assignment of several classes per client does not guarantee that. ``natural`` keeps the images of
one writer, device or hospital together. flwr-datasets' partitioners by owner need the number of owners per client
instead of the number of clients, and the last client may get fewer owners. ``feature_clusters`` of
`fedssl.partition.feature_clustering` divides by the images themselves. ``from_file`` reads a CSV file, such as the
partition of a published comparison.

``dirichlet``, ``pathological`` and ``skew`` divide by class; images without a label are dealt evenly, at random.

Differences from the authors' code: L-DAWA's code drops the images left over by rounding. Dec-SSL's code trains on the
first 80% of every client's images, which removes most of the uniform part. Here all images are used.

Every partitioner has this signature, with its own settings as keywords:

Parameters
----------
data : PartitionInput

Returns
-------
list of ndarray or Partition
    Sorted int64 indices of every client's images. A `Partition` also has the groups, unless these are classes or
    owners.

Raises
------
InputError
    If the settings do not fit the images.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from fedssl.config.constraints import check_arguments
from fedssl.csv_file import client_in, count_in, read_rows
from fedssl.datasets.holdout import NO_LABEL
from fedssl.errors import InputError
from fedssl.partition.partition import PartitionInput, clients_of_rows, rows_of_clients
from fedssl.seeding import derive_seed, numpy_generator

MAX_DRAWS = 11  # of Dirichlet shares, as flwr-datasets


def iid(data: PartitionInput) -> list[np.ndarray]:
    r"""Assign equal numbers of images at random.

    $$
    n_k = \left\lfloor \frac{n}{K} \right\rfloor + \begin{cases} 1 & k < n \bmod K \\ 0 & \text{else} \end{cases}
    $$
    """
    order = image_order(data)
    return [np.sort(part) for part in np.array_split(order, data.num_clients)]


def dirichlet(data: PartitionInput, *, alpha: float, min_size: int, self_balancing: bool = False) -> list[np.ndarray]:
    r"""Divide each class among the clients by shares from Dir(alpha, ..., alpha).

    $$
    (p_{c,1}, \dots, p_{c,K}) \sim \operatorname{Dir}(\alpha, \dots, \alpha) \qquad
    n_{c,k} = \Big\lfloor n_c \sum_{j=1}^{k} p_{c,j} \Big\rfloor - \Big\lfloor n_c \sum_{j=1}^{k-1} p_{c,j} \Big\rfloor
    $$

    with $n_c$ the images of class c, and $n_{c,k}$ those of client k. With ``self_balancing`` clients that have more
    than n / K images of earlier classes get none, and the other shares are scaled to the sum 1; classes are divided in
    the order of their numbers. Draws with fewer than ``min_size`` images of a client, or without a client that can get
    a class, are repeated (11 draws in total).
    """
    clients = f"num_clients={data.num_clients} clients"
    return divide_classes(data, "dirichlet", clients, alpha=alpha, min_size=min_size, self_balancing=self_balancing)


def divide_classes(
    data: PartitionInput, partition: str, clients: str, *, alpha: float, min_size: int, self_balancing: bool
) -> list[np.ndarray]:
    """Divide each class as `dirichlet`; errors name the ``partition`` and the ``clients``.

    Only ``dirichlet`` proposes another number of clients or seed: these change the domains and clusters of others.
    """
    check_arguments("partition", alpha=alpha, min_size=min_size)
    num_images, num_clients = data.num_images, data.num_clients
    labels, order = labeled(data, partition)

    def draw(num_clients: int, alpha: float, min_size: int, seed: int) -> list[np.ndarray] | None:
        if min_size * num_clients > num_images:
            return None
        dealt = (num_images - len(order)) // num_clients  # images without a label, at least, of every client
        return dirichlet_rows(
            labels[order],
            num_clients=num_clients,
            alpha=alpha,
            min_size=max(0, min_size - dealt),
            seed=derive_seed(seed, "partition", "shares"),
            self_balancing=self_balancing,
        )

    parts = draw(num_clients, alpha, min_size, data.seed)
    if parts is None:
        alphas = (value for value in (1, 10, 100) if value > alpha and draw(num_clients, value, min_size, data.seed))
        numbers = (num_clients // 2**power for power in range(1, num_clients.bit_length()))
        fewer = (number for number in numbers if draw(number, alpha, min_size, data.seed))
        seeds = (seed for seed in range(data.seed + 1, data.seed + 100) if draw(num_clients, alpha, min_size, seed))
        remedies = [f"partition.alpha={value}" for value in itertools.islice(alphas, 1)]
        is_own = partition == "dirichlet"
        remedies += [f"num_clients={number}" for number in itertools.islice(fewer, is_own)]
        unequal = draw(num_clients, alpha, 0, data.seed) if min_size else None
        if unequal is not None and max(map(len, unequal)) >= min_size:
            remedies += ["partition.min_size=0: clients with too few never train"]
        elif is_own:
            remedies += [f"seed={seed}" for seed in itertools.islice(seeds, 1)]
        few = f"some of {clients} with fewer than partition.min_size={min_size} of {num_images} images"
        full = f"a class to none of {clients} (partition.self_balancing=true)"
        reasons = [few] * bool(min_size or not self_balancing) + [full] * self_balancing
        raise InputError(
            f"partition.alpha={alpha} leaves {' or '.join(reasons)} in every draw; "
            f"set {', or '.join(remedies or ['another partition.alpha'])}"
        )
    return with_unlabeled([order[rows] for rows in parts], data, labels)


def dirichlet_rows(
    labels: np.ndarray, *, num_clients: int, alpha: float, min_size: int, seed: int, self_balancing: bool
) -> list[np.ndarray] | None:
    """Return the rows of each client, class by class; None if no draw gives all clients ``min_size`` rows.

    The draws are those of flwr-datasets' `DirichletPartitioner`, whose time grows with the square of the number of
    clients. With ``self_balancing`` that fails if a draw has no client for a class; here the next draw follows.
    """
    classes = [np.flatnonzero(labels == name) for name in np.unique(labels)]
    generator = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        sizes = _draw_sizes(
            [len(rows) for rows in classes], generator, num_clients, alpha=alpha, self_balancing=self_balancing
        )
        if sizes is not None and sizes.sum(axis=0).min() >= min_size:
            clients = np.concatenate([np.repeat(np.arange(num_clients), row) for row in sizes])
            by_class = np.concatenate(classes)
            return [by_class[rows] for rows in rows_of_clients(clients, num_clients)]
    return None


def _draw_sizes(
    counts: Sequence[int], generator: np.random.Generator, num_clients: int, *, alpha: float, self_balancing: bool
) -> np.ndarray | None:
    """Draw the number of images of each class and client, ``(classes, clients)``, from the classes' ``counts``.

    Return None if no client can receive a class: with ``self_balancing`` all are full or have the share 0.
    """
    average = sum(counts) / num_clients
    sizes = np.zeros((len(counts), num_clients), dtype=np.int64)
    for number, count in enumerate(counts):
        shares = generator.dirichlet(np.full(num_clients, float(alpha)))
        if self_balancing:
            shares[sizes[:number].sum(axis=0) > average] = 0.0
            total = sum(shares.tolist())  # as flwr-datasets adds them; NumPy's order would change last bits
            if not total:
                return None
            shares /= total
        if not np.isfinite(shares).all():
            return None
        ends = (np.cumsum(shares) * count).astype(np.int64)
        ends[-1] = count
        sizes[number] = np.diff(ends, prepend=0)
    return sizes


def pathological(data: PartitionInput, *, classes_per_client: int) -> list[np.ndarray]:
    r"""Assign exactly ``classes_per_client`` classes to every client; the holders of a class share it equally.

    Classes are assigned in turn, in an order drawn by the seed. With 10 classes, 2 per client and 5 clients, each
    class has one holder (FedU's setting). With 10 clients, it has two.

    $$
    \text{classes of client } k: \; \{ c_{s \bmod C} : s = km, \dots, km + m - 1 \}
    $$

    with $c_0, \dots, c_{C-1}$ the shuffled classes, and m the ``classes_per_client``.
    """
    num_clients, seed = data.num_clients, data.seed
    labels, order = labeled(data, "pathological")
    names, codes, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    if not 1 <= classes_per_client <= len(names):
        raise InputError(
            f"partition.classes_per_client={classes_per_client} must be from 1 to the {len(names)} classes of the data"
        )
    num_shards = num_clients * classes_per_client
    if num_shards < len(names):
        raise InputError(
            f"partition.classes_per_client={classes_per_client} for num_clients={num_clients} clients leaves "
            f"{len(names) - num_shards} of {len(names)} classes unassigned; "
            f"give at least {math.ceil(len(names) / num_clients)} classes per client or {len(names)} clients"
        )
    holders = math.ceil(num_shards / len(names))
    if sizes.min() < holders:
        raise InputError(
            f"partition.classes_per_client={classes_per_client} for num_clients={num_clients} clients divides each "
            f"class among {holders} of them but the smallest class has {sizes.min()} images; lower either"
        )
    rank = numpy_generator(seed, "partition", "classes").permutation(len(names))
    num_holders = [len(range(number, num_shards, len(names))) for number in range(len(names))]
    members = [np.array_split(order[rank[codes] == number], count) for number, count in enumerate(num_holders)]
    # Shard s is of class s modulo C. A client's shards follow each other, so that their classes differ.
    shards = [members[shard % len(names)][shard // len(names)] for shard in range(num_shards)]
    by_client = [shards[first : first + classes_per_client] for first in range(0, num_shards, classes_per_client)]
    return with_unlabeled([np.concatenate(own) for own in by_client], data, labels)


def skew(data: PartitionInput, *, beta: float) -> list[np.ndarray]:
    r"""Draw a share ``beta`` of every class uniformly; cut the rest, sorted by class, into one block per client.

    $$
    n_c^{\text{sorted}} = \operatorname{round}((1 - \beta) \, n_c) \qquad D_k = S_k \cup U_k
    $$

    with $S_k$ block k of the sorted images, class after class, and $U_k$ block k of the others, shuffled.
    """
    check_arguments("partition", beta=beta)
    labels, order = labeled(data, "skew")
    of_class = [order[labels[order] == name] for name in np.unique(labels[order])]
    cuts = [round((1 - beta) * len(members)) for members in of_class]
    sorted_pool = np.concatenate([members[:cut] for members, cut in zip(of_class, cuts, strict=True)])
    uniform_pool = np.concatenate([members[cut:] for members, cut in zip(of_class, cuts, strict=True)])
    uniform_pool = numpy_generator(data.seed, "partition", "uniform").permutation(uniform_pool)
    # The first blocks and the last draws may have one image more, so that sizes differ by at most one.
    blocks = np.array_split(sorted_pool, data.num_clients)
    draws = np.array_split(uniform_pool, data.num_clients)[::-1]
    return with_unlabeled([np.concatenate(pair) for pair in zip(blocks, draws, strict=True)], data, labels)


def natural(data: PartitionInput) -> list[np.ndarray]:
    r"""Assign all images of an owner to one client; owners are assigned in turn, in an order drawn by the seed.

    $$
    D_k = \{ i : \pi(o_i) \bmod K = k \}
    $$

    with $o_i$ the owner of image i, and $\pi$ a random order of owners.
    """
    num_clients = data.num_clients
    if data.owners is None:
        raise InputError(
            "partition=natural divides by owner but the images have none; name their column (dataset.owner=COLUMN) "
            "or make their folders (dataset.folders=owner), or give partition=iid"
        )
    names, codes = np.unique(data.owners.numpy(), return_inverse=True)
    client_of_owner = numpy_generator(data.seed, "partition", "owners").permutation(len(names)) % num_clients
    return rows_of_clients(client_of_owner[codes], num_clients)


def from_file(data: PartitionInput, *, file: str | Path | None) -> list[np.ndarray]:
    r"""Read the client of every image from a file.

    $$
    D_k = \{ i : k_i = k \}
    $$

    with $k_i$ the entry of the file for image i, a client's number. The column ``label`` of the CSV file may be empty
    for images without a label; it detects other images and another order.
    """
    num_clients = data.num_clients
    if file is None:
        raise InputError("partition=file needs partition.file, a CSV file with one line per image; set it")
    setting = f"partition.file={file}"
    numbers: dict[str, list[int]] = {"client": [], "label": []}  # -1: none
    lines = read_rows(Path(file), "client", "client,label", setting=setting, content="with one line per image")
    for place, values in lines:
        for name, text in values.items():
            if not text.strip():
                number = -1
            elif name == "client":
                number = client_in(text, place, num_clients=num_clients)
            else:
                number = count_in(text, name, place)
            numbers[name].append(number)
    clients, labels = (np.array(column, dtype=np.int64) for column in numbers.values())
    if len(clients) != len(data.images.source):
        raise InputError(
            f"{setting} has {len(clients)} images, but the data set has {len(data.images.source)}; choose the data set "
            "of the file"
        )
    rows = data.images.rows.numpy()
    if len(labels) and data.labels is not None and not np.array_equal(labels[rows], data.labels.numpy()):
        first = int(np.flatnonzero(labels[rows] != data.labels.numpy())[0])
        raise InputError(
            f"{setting} belongs to other images or another order: image {rows[first]} has label {labels[rows[first]]} "
            f"in the file and {int(data.labels[first])} in the data set; choose the data set of the file"
        )
    return rows_of_clients(clients[rows], num_clients)


def write_partition(parts: Iterable[np.ndarray], labels: torch.Tensor) -> str:
    """Return the text of the file that `from_file` reads, from every client's indices and all labels ``(n,)``."""
    numbers = zip(clients_of_rows(parts, len(labels)).tolist(), labels.tolist(), strict=True)
    rows = (",".join("" if number < 0 else str(number) for number in row) for row in numbers)
    return "\n".join(["client,label", *rows, ""])


def image_order(data: PartitionInput) -> np.ndarray:
    """Return all indices in random order."""
    return numpy_generator(data.seed, "partition", "order").permutation(data.num_images)


def labeled(data: PartitionInput, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all labels, and the indices of images with one in random order.

    Raise an `InputError` that names the partition if no image has a label.
    """
    if data.labels is None or not (data.labels != NO_LABEL).any():
        raise InputError(
            f"partition={name} divides by class but the images have no labels; give partition=iid, or "
            "partition=natural if their owners are known"
        )
    labels, order = data.labels.numpy(), image_order(data)
    return labels, np.compress(labels[order] != NO_LABEL, order)


def with_unlabeled(parts: list[np.ndarray], data: PartitionInput, labels: np.ndarray) -> list[np.ndarray]:
    """Return the sorted parts; images without a label are dealt so that their numbers differ by at most one."""
    unlabeled = np.flatnonzero(labels == NO_LABEL)
    dealt = np.array_split(numpy_generator(data.seed, "partition", "no label").permutation(unlabeled), len(parts))
    return [np.sort(np.concatenate(pair)) for pair in zip(parts, dealt, strict=True)]
