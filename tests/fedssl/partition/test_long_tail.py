"""Long-tailed classes."""

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.partition import make_partition
from fedssl.partition.partition import long_tail


def counts(labels: torch.Tensor, imbalance: float, *, seed: int = 0) -> list[int]:
    rows = long_tail(labels, imbalance=imbalance, seed=seed)
    assert (np.diff(rows) > 0).all()
    return [int((labels[rows] == name).sum()) for name in labels[labels >= 0].unique()]


def test_class_sizes_are_those_of_cifar_10_lt() -> None:
    """LDAM's code, imb_factor=0.01: int(5000 * 0.01 ** (c / 9)) for c = 0..9."""
    labels = torch.arange(50_000) % 10
    assert counts(labels, 100) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]


def test_unequal_classes_keep_the_ratio() -> None:
    """Factors 1, 1/2, 1/4 of classes with 90, 20, 60 images: 20 images of the second class allow n_0 = 40."""
    labels = torch.repeat_interleave(torch.tensor([3, 5, 9]), torch.tensor([90, 20, 60]))
    assert counts(labels, 4) == [40, 20, 10]
    assert counts(torch.cat([labels, torch.full((7,), -1)]), 4) == [40, 20, 10]
    assert not np.array_equal(long_tail(labels, imbalance=4, seed=0), long_tail(labels, imbalance=4, seed=1))


@pytest.mark.parametrize(
    ("labels", "imbalance", "sentence"),
    [
        (None, 10, r"imbalance=10 needs images of several classes, and the clients' have no labels; set imbalance=1"),
        (torch.full((5,), -1), 10, r"the clients' have no labels"),
        (torch.zeros(5, dtype=torch.long), 10, r"the clients' have one class"),
        (torch.arange(60) % 3, 50, r"leaves the last of 3 classes no image; set imbalance=20 or less"),
    ],
)
def test_impossible_imbalance_is_refused(labels, imbalance, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        long_tail(labels, imbalance=imbalance, seed=0)


def test_remedy_of_unequal_classes_works() -> None:
    """With 30, 4 and 9 images, class 1 allows the last one 4 / sqrt(imbalance) images: 1 at 16."""
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor([30, 4, 9]))
    with pytest.raises(InputError, match=r"set imbalance=16 or less"):
        long_tail(labels, imbalance=17, seed=0)
    assert counts(labels, 16) == [16, 4, 1]


def test_clients_of_a_run_share_the_remaining_images() -> None:
    images = ImageData(TensorImages(torch.zeros(60, 1, 1, 1, dtype=torch.uint8)), torch.arange(60) % 2)
    overrides = ["partition=iid", "num_clients=2", "imbalance=3"]
    parts = make_partition(compose(overrides).partition, images).client_indices
    assert images.labels[np.concatenate(parts)].bincount().tolist() == [30, 10]
    with pytest.raises(InputError, match=r"^partition.* \(imbalance=10 of 60 images leaves the clients 33\)$"):
        make_partition(
            compose([*overrides[:2], "imbalance=10", "partition=pathological", "num_clients=4"]).partition, images
        )
