"""The images of clients and server in a run."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.config.component import Component
from fedssl.config.load import compose
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.partition.partition import client_indices, make_partition, server_indices
from fedssl.partition.partitioners import PartitionInput, skew
from tests.fedssl.partition.made import partition_input

IMAGES = ImageData(TensorImages(torch.zeros(60, 1, 1, 1, dtype=torch.uint8)), torch.arange(2).repeat_interleave(30))
WORDS = ["seed=7", "num_clients=2"]


def test_split_follows_the_settings_of_a_run():
    overrides = [*WORDS, "partition=skew"]
    parts = client_indices(compose([*overrides, "partition.beta=0.0"]).partition, IMAGES)
    expected = skew(partition_input(IMAGES.labels, num_clients=2, seed=7), beta=0.0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    with pytest.raises(InputError, match=r"partition\.beta=2\.0"):
        client_indices(compose([*overrides, "partition.beta=2.0"]).partition, IMAGES)


def test_server_images_belong_to_no_client():
    settings = compose([*WORDS, "partition=iid", "calibration=auxiliary", "calibration.share=0.25"]).partition
    parts = client_indices(settings, IMAGES)
    kept = server_indices(60, share=0.25, seed=7)
    assert len(kept) == 15
    assert np.array_equal(np.sort(np.concatenate([kept, *parts])), np.arange(60))
    assert np.array_equal(kept, server_indices(60, share=0.25, seed=7))
    assert not np.array_equal(kept, server_indices(60, share=0.25, seed=8))


def custom(data: PartitionInput, *, parts: list[list[float]]) -> list[np.ndarray]:
    """Return the given indices, as a rule of a user does."""
    return [np.array(part) for part in parts]


def shuffled(data: PartitionInput) -> list[np.ndarray]:
    """Deal the images by global generators, as a rule of a user may do."""
    rows = np.random.permutation(len(data.images))
    return np.array_split(rows, random.choice([2, 2]))


def test_the_seed_decides_the_draws_of_global_generators():
    settings = replace(
        compose([*WORDS, "partition=iid"]).partition, rule=Component({"_target_": f"{__name__}.shuffled"})
    )
    parts = []
    for seed in (7, 8, 7):
        parts.append(np.concatenate(client_indices(replace(settings, seed=seed), IMAGES)).tolist())
        np.random.seed(5)
    assert parts[0] == parts[2] != parts[1]


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([[0, 1], [1, 2]], "custom assigns an image to several clients; assign each to one"),
        (
            [[0, 1]],
            "custom returns the images of 1 clients; return those of num_clients=2",
        ),
        ([[[0, 1]], [2]], "custom returns other parts than lists of indices; return one array"),
        ([{0, 1}, [2]], "custom returns other parts than lists of indices"),
        ([[0, 1], [60]], "custom returns other indices than 0 to 59; return integers"),
        ([[0, 1], [-1]], "other indices than 0 to 59"),
        ([[0.5], [1]], "other indices than 0 to 59"),
    ],
)
def test_what_a_rule_returns_is_checked(parts, sentence):
    settings = compose([*WORDS, "partition=iid"]).partition
    rule = Component({"_target_": f"{__name__}.custom", "parts": parts})
    with pytest.raises(InputError, match=sentence):
        make_partition(replace(settings, rule=rule), IMAGES)
    rule = Component({"_target_": "builtins.id"})
    with pytest.raises(InputError, match="id returns int; return a list with the indices of each client"):
        make_partition(replace(settings, rule=rule), IMAGES)
    valid = Component({"_target_": f"{__name__}.custom", "parts": [[], [3, 1]]})
    assert [part.tolist() for part in client_indices(replace(settings, rule=valid), IMAGES)] == [[], [3, 1]]


def test_the_last_partition_is_kept_for_equal_settings():
    settings = compose([*WORDS, "partition=iid"]).partition
    first = make_partition(settings, IMAGES)
    assert make_partition(replace(settings), IMAGES) is first
    assert make_partition(settings, replace(IMAGES)) is not first
    assert make_partition(replace(settings, seed=1), IMAGES) is not first


def unseeded(data: PartitionInput) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng().permutation(data.num_images), data.num_clients)


def test_an_unseeded_partition_is_refused():
    rule = Component({"_target_": f"{__name__}.unseeded"})
    with pytest.raises(InputError, match="unseeded returns other clients in a second call, .* from data.seed"):
        make_partition(replace(compose(WORDS).partition, rule=rule), IMAGES)
