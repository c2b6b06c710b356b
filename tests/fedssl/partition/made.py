"""Inputs of partitioners for tests."""

import torch

from fedssl.datasets.images import TensorImages
from fedssl.partition import ImageSubset, PartitionInput


def partition_input(labels, *, num_clients: int, num_images=None, owners=None, seed: int = 0) -> PartitionInput:
    """Input with empty images; their number is that of the labels unless ``num_images`` is given."""
    if num_images is None:
        assert labels is not None
        num_images = len(labels)
    images = ImageSubset(TensorImages(torch.zeros(num_images, 1, 1, 1, dtype=torch.uint8)), torch.arange(num_images))
    return PartitionInput(labels=labels, owners=owners, images=images, num_clients=num_clients, seed=seed)
