"""Rules that divide images among clients: every image belongs to exactly one.

``iid``, ``dirichlet`` and ``pathological`` are flwr-datasets' partitioners, ``skew`` is the skewness of Dec-SSL
(arXiv 2210.10947). They deal out the images in an order shuffled by the run's seed, so that a sorted data set makes
no difference. ``pathological`` deals classes in turn, so that none is left out and each has as many holders as any
other,
give or take one; flwr-datasets' own assignment of several classes per client does not promise that. ``natural``
follows the data: the images of one writer, device or hospital stay together. flwr-datasets' partitioners by owner
are given owners per client, not clients, and their last client may get fewer than the others. ``feature_clusters``,
in `fedssl.partition.feature_clustering`, looks at the images themselves.

Where this differs from the authors' code: L-DAWA's drops the images that rounding leaves over and Dec-SSL's trains
on the first 80% of every client's images, which cuts away most of the uniform part; here all images are used.

All rules take and return the same, with settings of their own beside it:

Parameters
----------
labels : Tensor or None
    int64, ``(n,)``; None if the data set has none.
owners : Tensor or None
    int64, ``(n,)``, who made each image; None if the data set does not say.
images : ImageSubset
    The images, for rules that look at them.
num_images : int
    n.
num_clients : int
    Clients, each of which gets at least 2 images.
seed : int
    Seed of the run.

Returns
-------
list of ndarray or Partition
    For every client the sorted int64 positions of its images; a `Partition` says by which groups, if these are neither
    classes nor owners.

Raises
------
InputError
    If the data set cannot be divided in this way.
"""

import math

import numpy as np
import torch

from fedssl.errors import InputError
from fedssl.partition import flwr_partitioners
from fedssl.partition.base import ImageSubset
from fedssl.seeding import derive_seed, numpy_generator

# One image has no other to be told from: contrastive losses and batch normalisation need two.
MIN_IMAGES = 2


def iid(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
) -> list[np.ndarray]:
    """Equal numbers of images, drawn without regard to class."""
    check_counts(num_images, num_clients)
    order = _order(num_images, seed)
    return _checked([order[rows] for rows in flwr_partitioners.iid(order, num_clients=num_clients)], num_images)


def dirichlet(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
    alpha: float,
    min_size: int,
    self_balancing: bool = False,
) -> list[np.ndarray]:
    """Each class is divided among the clients by shares from Dir(alpha, ..., alpha).

    Parameters
    ----------
    alpha : float
        Above 0; small: a client holds few classes, large: all clients are alike.
    min_size : int
        Fewest images of a client, at least 2; a draw that misses it is repeated (11 draws in all).
    self_balancing : bool
        Whether a client that has more than ``n / num_clients`` images gets none of the classes to come, whose shares
        the others divide among themselves. Classes come in the order of their numbers.
    """
    check_counts(num_images, num_clients)
    check_shares(alpha, min_size)
    order = _order(num_images, seed)
    column = _known(labels, "dirichlet")[order]
    parts = None
    if min_size * num_clients <= num_images:
        parts = flwr_partitioners.dirichlet(
            column,
            num_clients=num_clients,
            alpha=alpha,
            min_size=min_size,
            seed=derive_seed(seed, "partition", "shares"),
            self_balancing=self_balancing,
        )
    if parts is None:
        raise InputError(
            f"partition.alpha={alpha} leaves some of num_clients={num_clients} clients with fewer than "
            f"partition.min_size={min_size} of {num_images} images in every draw; "
            "raise partition.alpha, or lower num_clients or partition.min_size"
        )
    return _checked([order[rows] for rows in parts], num_images)


def pathological(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
    classes_per_client: int,
) -> list[np.ndarray]:
    """Every client holds exactly ``classes_per_client`` classes; holders of a class share it equally.

    The classes, in an order drawn by the seed, are dealt in turn: with 10 classes, 2 per client and 5 clients, each
    class has one holder (FedU's setting); with 10 clients, two.

    Parameters
    ----------
    classes_per_client : int
        From 1 to the number of classes.
    """
    check_counts(num_images, num_clients)
    names, codes, sizes = np.unique(_known(labels, "pathological"), return_inverse=True, return_counts=True)
    if not 1 <= classes_per_client <= len(names):
        raise InputError(
            f"partition.classes_per_client={classes_per_client} must be from 1 to the {len(names)} classes of the data"
        )
    num_shards = num_clients * classes_per_client
    if num_shards < len(names):
        raise InputError(
            f"partition.classes_per_client={classes_per_client} for num_clients={num_clients} clients leaves "
            f"{len(names) - num_shards} of {len(names)} classes to nobody; "
            f"give at least {math.ceil(len(names) / num_clients)} classes per client or {len(names)} clients"
        )
    holders = math.ceil(num_shards / len(names))
    if sizes.min() < holders:
        raise InputError(
            f"partition.classes_per_client={classes_per_client} for num_clients={num_clients} clients divides each "
            f"class among {holders} of them but the smallest class has {sizes.min()} images; lower either"
        )
    order = _order(num_images, seed)
    rank = numpy_generator(seed, "partition", "classes").permutation(len(names))
    class_shards = flwr_partitioners.class_shards(rank[codes][order], num_shards=num_shards)
    # Consecutive shards are of different classes because a client takes no more of them than there are classes.
    by_client = [class_shards[first : first + classes_per_client] for first in range(0, num_shards, classes_per_client)]
    return _checked([order[np.concatenate(own)] for own in by_client], num_images)


def skew(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
    beta: float,
) -> list[np.ndarray]:
    """Of every class a share ``beta`` is drawn uniformly; the rest, sorted by class, is cut into one block per client.

    Parameters
    ----------
    beta : float
        In [0, 1]; 1 is IID, 0 gives every client a contiguous block of the class-sorted images.
    """
    check_counts(num_images, num_clients)
    if not 0 <= beta <= 1:
        raise InputError(f"partition.beta={beta} must be from 0 (sorted by class) to 1 (IID)")
    column = _known(labels, "skew")
    order = _order(num_images, seed)
    of_class = [order[column[order] == name] for name in np.unique(column)]
    cuts = [round((1 - beta) * len(members)) for members in of_class]
    sorted_pool = np.concatenate([members[:cut] for members, cut in zip(of_class, cuts, strict=True)])
    uniform_pool = np.concatenate([members[cut:] for members, cut in zip(of_class, cuts, strict=True)])
    uniform_pool = numpy_generator(seed, "partition", "uniform").permutation(uniform_pool)
    # The first blocks may have one image more, and so may the last draws: sizes differ by one at most.
    blocks = np.array_split(sorted_pool, num_clients)
    draws = np.array_split(uniform_pool, num_clients)[::-1]
    return _checked([np.concatenate(pair) for pair in zip(blocks, draws, strict=True)], num_images)


def natural(
    labels: torch.Tensor | None,
    *,
    owners: torch.Tensor | None = None,
    images: ImageSubset | None = None,
    num_images: int,
    num_clients: int,
    seed: int,
) -> list[np.ndarray]:
    """All images of an owner belong to one client.

    The owners, in an order drawn by the seed, are dealt in turn: clients have the same number of owners, give or take
    one. How many images an owner has, and of which classes, stays as it is in the data.
    """
    check_counts(num_images, num_clients)
    if owners is None:
        raise InputError(
            "partition=natural divides by owner but the images have none; name their column (dataset.owner=COLUMN) "
            "or make their folders (dataset.folders=owner), or give partition=iid"
        )
    names, codes = np.unique(owners.numpy(), return_inverse=True)
    if len(names) < num_clients:
        raise InputError(
            f"partition=natural gives all images of an owner to one client but num_clients={num_clients} is more "
            f"than the {len(names)} owners of the images; give num_clients={len(names)} or fewer"
        )
    client_of_owner = numpy_generator(seed, "partition", "owners").permutation(len(names)) % num_clients
    client = client_of_owner[codes]
    sizes = np.bincount(client, minlength=num_clients)
    return _checked(np.split(np.argsort(client, kind="stable"), np.cumsum(sizes)[:-1]), num_images)


def check_counts(num_images: int, num_clients: int) -> None:
    """Refuse, by an `InputError`, more clients than there are images for."""
    if num_clients < 1:
        raise InputError(f"num_clients={num_clients} must be at least 1")
    if num_clients * MIN_IMAGES > num_images:
        raise InputError(
            f"num_clients={num_clients} is too many for {num_images} images: a client needs at least "
            f"{MIN_IMAGES}; give num_clients={max(1, num_images // MIN_IMAGES)} or fewer"
        )


def check_shares(alpha: float, min_size: int) -> None:
    """Refuse, by an `InputError`, shares that `dirichlet` cannot draw, or clients that could not train."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise InputError(f"partition.alpha={alpha} must be above 0 (0.1: few classes per client, 100: all alike)")
    if min_size < MIN_IMAGES:
        raise InputError(f"partition.min_size={min_size} must be at least {MIN_IMAGES}, the fewest to train on")


def _known(labels: torch.Tensor | None, name: str) -> np.ndarray:
    if labels is None:
        raise InputError(
            f"partition={name} divides by class but the images have no labels; give partition=iid, or "
            "partition=natural if their owners are known"
        )
    return labels.numpy()


def _order(num_images: int, seed: int) -> np.ndarray:
    return numpy_generator(seed, "partition", "order").permutation(num_images)


def _checked(parts: list[np.ndarray], num_images: int) -> list[np.ndarray]:
    """Sorted parts, after a check that every image is in exactly one and no part is too small to train on."""
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_images)):
        raise InputError(f"partition gives not every one of {num_images} images to exactly one client; try another")
    smallest = min(len(part) for part in parts)
    if smallest < MIN_IMAGES:
        raise InputError(
            f"partition leaves a client with {smallest} of {num_images} images, too few to train on "
            f"({MIN_IMAGES}); lower num_clients={len(parts)}"
        )
    return [np.sort(part) for part in parts]
