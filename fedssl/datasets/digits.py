"""scikit-learn's 1,797 handwritten digits: real images that are part of a package, without a download.

8 x 8 gray images with values 0..16 (UCI "Optical Recognition of Handwritten Digits", test part). They have no
official split; a fixed stratified split has 1,438 training and 359 test images.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedssl.datasets.base import ImageData, subsample_indices
from fedssl.datasets.holdout import stratified_holdout
from fedssl.datasets.images import TensorImages
from fedssl.datasets.pixels import to_array
from fedssl.datasets.raster import PixelSettings
from fedssl.errors import InputError

TEST_FRACTION = 0.2  # of every class


def read(split: str, *, channels: int, size: int, limit: int | None) -> ImageData:
    """Read the split "train" or "test", with labels and without owners; the limited subset is always the same."""
    if split not in ("train", "test"):
        raise InputError(f"dataset=digits has no split {split!r}; set it to train or test")
    values, labels = _values_and_labels()
    train, test = stratified_holdout(labels, fraction=TEST_FRACTION)
    rows = test if split == "test" else train
    rows = rows[subsample_indices(len(rows), limit)]
    pixels = np.rint(values[rows] * (255 / 16)).astype(np.uint8)
    settings = PixelSettings(channels=channels, size=size)
    images = np.stack([to_array(Image.fromarray(image), settings) for image in pixels])
    return ImageData(TensorImages(torch.from_numpy(images)), torch.from_numpy(labels[rows]), tuple("0123456789"))


def _values_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return values 0..16 ``(1797, 8, 8)`` and labels ``(1797,)``, as ``sklearn.datasets.load_digits`` does.

    That function reads the same file, but its import is as slow as that of torch, in every worker process.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    try:
        table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    except FileNotFoundError:  # another layout in this version of scikit-learn
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
