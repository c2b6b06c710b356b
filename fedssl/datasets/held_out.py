"""Leave-one-domain-out: images of some domains are the test, and those of the others train.

This is the protocol of DomainBed (Gulrajani and Lopez-Paz, ICLR 2021), with the last model instead of a selection.
Domains are the owners of images.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedssl.errors import InputError, shortened


def domain_rows(owners: Tensor | None, names: Sequence[str], chosen: Sequence[str], *, held_out: bool) -> np.ndarray:
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
