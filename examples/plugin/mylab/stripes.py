"""Generated images of stripes in three classes: horizontal, vertical, checked."""

import numpy as np
import torch

from fedssl.datasets.base import ImageData, subsample_indices
from fedssl.datasets.images import TensorImages

CLASSES = ("horizontal", "vertical", "checked")
COUNTS = {"train": 600, "test": 150}


def read(split: str, *, channels: int, size: int, limit: int | None, noise: float) -> ImageData | None:
    """Return the images of a split, the same in every call; None if the split does not exist.

    ``limit`` subsamples them. ``noise`` is the standard deviation of each pixel's noise in gray levels (0 to 255).
    """
    if split not in COUNTS:
        return None
    generator = np.random.default_rng(list(COUNTS).index(split))
    count = COUNTS[split]
    labels = generator.integers(len(CLASSES), size=count)
    period, shift = generator.integers(3, 6, size=(count, 1, 1)), generator.integers(size, size=(count, 1, 1))
    waves = (np.arange(size) + shift) // period % 2  # (count, 1, size)
    across = waves.transpose(0, 2, 1)
    kinds = np.broadcast_arrays(across, waves, across ^ waves)
    drawn = np.select([labels[:, None, None] == label for label in range(len(CLASSES))], kinds) * 255.0
    drawn += generator.normal(0, noise, drawn.shape)
    images = np.repeat(drawn.clip(0, 255).astype(np.uint8)[:, None], channels, axis=1)
    rows = subsample_indices(count, limit)
    return ImageData(TensorImages(torch.from_numpy(images[rows])), torch.from_numpy(labels[rows]), CLASSES)
