"""Images that are held out for the test: a share of them, or all of some domains.

Leave-one-domain-out is the protocol of DomainBed (Gulrajani and Lopez-Paz, ICLR 2021), with the last model instead of a
selection. Domains are the owners of images.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedssl.errors import InputError, shortened
from fedssl.seeding import numpy_generator

if TYPE_CHECKING:  # devices may lack it
    from torch import Tensor

NO_LABEL = -1  # of an image without a label in a split where others have one

_FIXED_SEED = 0  # the test depends on the data, not on the run's seed


def stratified_holdout(
    labels: np.ndarray, *, fraction: float, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into training and test with equal shares of every class; the split is always the same.

    The test set gets the floor of every class's share, then one more image of the classes with the largest remainders,
    up to ``round(n * fraction)`` images; ``fraction`` is in [0, 1). At least one image of every class, and images
    without a label, are for training. Return the sorted indices of training and test images.

    With ``groups``, ``(n,)``, no group has images on both sides. Groups are drawn in a random order, and one is for
    the test if that brings the numbers of the test's images per class nearer to their shares.
    """
    labeled = np.flatnonzero(labels != NO_LABEL)
    _, codes, sizes = np.unique(labels[labeled], return_inverse=True, return_counts=True)
    quota = np.minimum(rounded(sizes * fraction, round(len(labeled) * fraction)), sizes - 1)
    generator = numpy_generator(_FIXED_SEED, "hold out")
    if groups is not None:
        group_codes = np.unique(groups, return_inverse=True)[1]
        classes = np.full(len(labels), NO_LABEL)
        classes[labeled] = codes
        is_test = _drawn_groups(classes, group_codes, quota=quota, sizes=sizes, generator=generator)[group_codes]
        return np.flatnonzero(~is_test), np.flatnonzero(is_test & (labels != NO_LABEL))
    of_class = np.split(labeled[np.argsort(codes, kind="stable")], np.cumsum(sizes))[:-1]
    members = [generator.permutation(indices) for indices in of_class]
    drawn = [indices[:size] for indices, size in zip(members, quota, strict=True)]
    test = np.concatenate([labeled[:0], *drawn])
    return np.setdiff1d(np.arange(len(labels)), test), np.sort(test)


def rounded(shares: np.ndarray, total: int) -> np.ndarray:
    """Return integers with this total: the floor of every share, and one more for the largest remainders."""
    numbers: np.ndarray = np.floor(shares).astype(np.int64)
    numbers[np.argsort(numbers - shares, kind="stable")[: total - numbers.sum()]] += 1
    return numbers


def _drawn_groups(
    codes: np.ndarray, groups: np.ndarray, *, quota: np.ndarray, sizes: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return whether each group is for the test, given the class and the group of every image."""
    members = np.split(codes[np.argsort(groups, kind="stable")], np.cumsum(np.bincount(groups)))[:-1]
    drawn, taken = np.zeros(len(members), dtype=bool), np.zeros_like(quota)
    for group in generator.permutation(len(members)):
        classes, counts = np.unique(members[group][members[group] != NO_LABEL], return_counts=True)
        missing, after = quota[classes] - taken[classes], taken[classes] + counts
        if (after < sizes[classes]).all() and np.abs(missing - counts).sum() < np.abs(missing).sum():
            taken[classes], drawn[group] = after, True
    return drawn


def domain_rows(owners: "Tensor | None", names: Sequence[str], chosen: Sequence[str], *, held_out: bool) -> np.ndarray:
    """Return the sorted indices of images of the ``chosen`` domains if ``held_out``, else of the others.

    ``owners`` are the domains of all images, int64, ``(n,)``, with the names ``names[owner]``; None if unknown.
    """
    setting = f"dataset.held_out={','.join(chosen)}"
    if owners is None:
        raise InputError(
            f"{setting} needs the domain of every image but the images have none; name their column "
            "(dataset.owner=COLUMN) or make their folders (dataset.folders=domain/class)"
        )
    numbers = [names.index(name) for name in chosen if name in names]
    is_chosen = np.isin(owners.numpy(), numbers)
    if not held_out and len(numbers) < len(set(chosen)):
        unknown = next(name for name in chosen if name not in names)
        raise InputError(
            f"{setting} but there is no domain {unknown!r}; the training images have {shortened(names)}: choose among "
            "these"
        )
    if not held_out and is_chosen.all():
        raise InputError(f"{setting} names every domain of the training images; leave one for the clients")
    return np.flatnonzero(is_chosen if held_out else ~is_chosen)
