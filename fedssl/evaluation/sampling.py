"""Draws of labeled images: a number or a share of every class, or the class frequencies of a client."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedssl.datasets.holdout import NO_LABEL


def sample_per_class(labels: Tensor, *, per_class: int, generator: np.random.Generator) -> Tensor:
    """Draw ``per_class`` images of every class that occurs, without replacement.

    ``labels`` are int64, ``(n,)``. The indices are int64, ``(classes * per_class,)``, class after class.
    """
    return torch.from_numpy(_sample(labels, lambda count: per_class, generator))


def stratified_sample(labels: Tensor, *, share: float, generator: np.random.Generator) -> Tensor:
    """Draw a share of every class without replacement, at least one image of each.

    ``labels`` are int64, ``(n,)``, and ``share`` is in (0, 1]. The indices are int64 and sorted.
    """
    return torch.from_numpy(np.sort(_sample(labels, lambda count: max(1, round(share * count)), generator)))


def _sample(labels: Tensor, size: Callable[[int], int], generator: np.random.Generator) -> np.ndarray:
    classes = labels.cpu().numpy()
    indices = [np.flatnonzero(classes == name) for name in np.unique(classes)]
    return np.concatenate([generator.choice(of_class, size(len(of_class)), replace=False) for of_class in indices])


def sample_label_matched(test: Tensor, local: Tensor, *, generator: torch.Generator) -> Tensor:
    """Draw the largest set of test images with the class frequencies of the client; return its sorted indices, int64.

    ``test`` and ``local`` are the classes of the test images and of the client's images, int64, ``(n,)`` and ``(m,)``.
    Images without a label and classes without test images are ignored; the set is empty if no test image has a class of
    the client. A class with share p of the client's images gets floor(p N) images, where N is the size of the set
    without rounding.
    """
    classes = local[local != NO_LABEL].unique().tolist()
    rows = {name: (test == name).nonzero().flatten() for name in classes}
    counts = {name: int((local == name).sum()) for name, indices in rows.items() if len(indices)}
    if not counts:
        return torch.empty(0, dtype=torch.int64)
    # The scarcest class relative to its share contributes all its images. Integers avoid rounding errors.
    scarcest = min(counts, key=lambda name: len(rows[name]) / counts[name])
    sampled = []
    for name, count in counts.items():
        size = count * len(rows[scarcest]) // counts[scarcest]
        sampled.append(rows[name][torch.randperm(len(rows[name]), generator=generator)[:size]])
    return torch.cat(sampled).sort().values
