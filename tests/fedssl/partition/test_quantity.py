"""Unequal client sizes."""

import numpy as np
import pytest
import torch

from fedssl.datasets.holdout import rounded
from fedssl.errors import InputError
from fedssl.partition import quantity
from fedssl.seeding import derive_seed
from tests.fedssl.partition.made import partition_input

LABELS = torch.arange(1000) % 5


def split(distribution: str, spread: float, *, num_clients: int = 8, alpha=None, min_size: int = 2, seed: int = 0):
    data = partition_input(LABELS, num_clients=num_clients, seed=seed)
    return quantity(data, distribution=distribution, spread=spread, alpha=alpha, min_size=min_size)


def test_rounded_numbers_have_the_total() -> None:
    # 0.5, 0.3, 0.2 of 7: 3.5, 2.1, 1.4. The floors 3, 2, 1 lack one, which the largest remainder, 0.5, gets.
    assert rounded(np.array([3.5, 2.1, 1.4]), 7).tolist() == [4, 2, 1]


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_power_law_sizes_follow_their_ranks(alpha) -> None:
    """8 clients, spread 1: sizes 2 + (1000 - 16) / (r H), r = 1..8, H = 1 + 1/2 + ... + 1/8 = 2.717857."""
    parts = split("power_law", 1.0, alpha=alpha)
    expected = [2 + 984 / (rank * 2.717857) for rank in range(1, 9)]
    sizes = sorted((len(part) for part in parts), reverse=True)
    assert np.abs(np.array(sizes) - expected).max() < 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_log_normal_sizes_follow_their_equation() -> None:
    z = np.random.default_rng(derive_seed(3, "partition", "sizes")).standard_normal(8)
    weights = [np.exp(1.5 * value) for value in z]
    sizes = [len(part) for part in split("lognormal", 1.5, seed=3)]
    assert np.abs(np.array(sizes) - [2 + 984 * weight / sum(weights) for weight in weights]).max() < 1


def test_no_spread_gives_equal_sizes() -> None:
    for distribution in ("lognormal", "power_law"):
        assert {len(part) for part in split(distribution, 0.0)} == {125}


@pytest.mark.parametrize("alpha", [0.05, 100.0])
def test_alpha_gives_clients_their_own_classes(alpha: float) -> None:
    parts = split("lognormal", 0.5, alpha=alpha, num_clients=20)
    largest = np.mean([LABELS[part].bincount().max().item() / len(part) for part in parts])
    assert largest > 0.6 if alpha < 1 else largest < 0.4


def test_unlabeled_images_are_dealt_evenly() -> None:
    labels = torch.where(torch.arange(1000) < 400, -1, LABELS)
    data = partition_input(labels, num_clients=8)
    parts = quantity(data, distribution="power_law", spread=1.0, alpha=1.0, min_size=2)
    assert {int((labels[part] == -1).sum()) for part in parts} == {50}


def test_too_few_images_and_missing_labels_are_refused() -> None:
    with pytest.raises(InputError, match=r"min_size=200 for num_clients=8 needs 1600 images and there are 1000"):
        split("lognormal", 1.0, min_size=200)
    data = partition_input(None, num_images=10, num_clients=2)
    with pytest.raises(InputError, match=r"partition=quantity divides by class but the images have no labels"):
        quantity(data, distribution="lognormal", spread=1.0, alpha=0.5, min_size=2)
