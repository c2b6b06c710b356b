"""Features of an encoder, and raw pixels as features."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.evaluation.features import Features, extract
from tests.fedssl.evaluation.made import blobs


class Statistics(nn.Module):
    """Flattens and normalizes by batch norm; a second module has another training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.norm.running_mean.fill_(1.0)
        self.norm.running_var.fill_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x.flatten(1)))


def test_extract_normalizes_and_uses_running_statistics():
    # Pixel 255 -> 1 -> (1 - 0.5) / 0.1 = 5 -> (5 - 1) / sqrt(4) = 2; pixel 0 -> -5 -> -3.
    images = torch.tensor([[255, 0], [0, 255]], dtype=torch.uint8).view(2, 1, 1, 2)
    features = extract(Statistics(), TensorImages(images), mean=[0.5], std=[0.1], device="cpu")
    torch.testing.assert_close(features, torch.tensor([[2.0, -3.0], [-3.0, 2.0]]), rtol=1e-5, atol=1e-5)


def test_extract_leaves_modes_and_statistics_as_they_were():
    encoder = Statistics().train()
    encoder.norm.eval()  # a layer that is kept frozen during training
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    images = TensorImages(torch.zeros(3, 1, 1, 2, dtype=torch.uint8))
    features = extract(encoder, images, mean=[0.5], std=[0.1], device="cpu")
    assert (encoder.training, encoder.norm.training, encoder.dropout.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert not features.is_inference()
    assert not features.requires_grad


def test_extract_normalizes_channels_whatever_the_batch_size():
    images = torch.randint(0, 256, (7, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    of_mean, of_std = (torch.tensor(values).double().view(3, 1, 1) for values in (mean, std))
    expected = (images.double() / 255 - of_mean) / of_std
    for batch_size in (2, 7, 100):
        result = extract(nn.Flatten(), TensorImages(images), mean=mean, std=std, device="cpu", batch_size=batch_size)
        torch.testing.assert_close(result.double(), expected.flatten(1), rtol=1e-5, atol=1e-6)


def test_features_that_are_not_finite_are_refused():
    data = blobs()
    data.test[3, 1] = math.nan
    with pytest.raises(InputError, match="diverged"):
        Features(data.train, data.train_labels, data.test, data.test_labels, data.num_classes)
