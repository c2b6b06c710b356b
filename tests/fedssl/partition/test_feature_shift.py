"""Feature shift of the clients' images."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from fedssl.config.load import compose
from fedssl.config.settings import FeatureShift
from fedssl.datasets.images import TensorImages
from fedssl.partition import parameter_table, shifted
from fedssl.partition.feature_shift import blurred, client_parameters
from fedssl.seeding import torch_generator

ALL = FeatureShift(brightness=0.4, contrast=0.5, color=0.3, blur=0.7, noise=0.1)
PARTS = [np.array([0, 3, 5]), np.array([1, 2])]  # image 4 is on no client
SETTINGS = replace(compose(["num_clients=2", "seed=5"]).partition, feature_shift=ALL)


def made(channels: int, dtype: torch.dtype = torch.uint8) -> TensorImages:
    values = torch.rand(6, channels, 9, 9, generator=torch.Generator().manual_seed(0))
    return TensorImages(values if dtype.is_floating_point else (values * torch.iinfo(dtype).max).to(dtype))


def slow_blur(image: np.ndarray, sigma: float, radius: int) -> np.ndarray:
    """Sum over a window of normalized weights exp(-(i^2 + j^2) / (2 sigma^2)); borders are mirrored."""
    height, width = image.shape
    result = np.zeros_like(image)
    steps = range(-radius, radius + 1)
    weights = {(i, j): math.exp(-(i * i + j * j) / (2 * sigma**2)) for i in steps for j in steps}

    def mirrored(place: int, size: int) -> int:
        return -place if place < 0 else 2 * (size - 1) - place if place >= size else place

    for y in range(height):
        for x in range(width):
            for (i, j), weight in weights.items():
                result[y, x] += weight * image[mirrored(y + i, height), mirrored(x + j, width)]
    return result / sum(weights.values())


@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (5, torch.uint16), (3, torch.float32)])
def test_images_follow_the_equation(channels: int, dtype: torch.dtype) -> None:
    images = made(channels, dtype)
    source = shifted(images, PARTS, SETTINGS)
    changed = source[torch.arange(6)]
    assert source.dtype == changed.dtype == dtype
    drawn = client_parameters(ALL, 2, channels=channels, seed=5)
    top = 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    for client, part in enumerate(PARTS):
        own = {name: values[client] for name, values in drawn.items()}
        for row in part:
            x = images.tensor[row].double().numpy() / top
            x = x.mean() + own["contrast"] * (x - x.mean())
            x = own["brightness"] * own["color"][:, None, None] * x
            x = np.stack([slow_blur(channel, own["blur"][0], radius=3) for channel in x])
            noise = torch.randn(channels, 9, 9, generator=torch_generator(5, "feature noise", int(row)))
            x = np.clip(x + own["noise"] * noise.double().numpy(), 0, 1) * top
            difference = np.abs(changed[row].double().numpy() - x)
            assert difference.max() < (1e-5 if top == 1 else 0.501 + 1e-6 * top)


def test_images_of_no_client_are_unchanged() -> None:
    images = made(3)
    changed = shifted(images, PARTS, SETTINGS)[torch.arange(6)]
    assert torch.equal(changed[4], images.tensor[4])
    assert not any(torch.equal(changed[row], images.tensor[row]) for row in (0, 1, 2, 3, 5))


def test_blur_is_torchvisions() -> None:
    images = made(3, torch.float32).tensor
    expected = tv.gaussian_blur(images, kernel_size=[7, 7], sigma=[0.9, 0.9])
    assert (blurred(images, torch.full((6,), 0.9, dtype=torch.float64), radius=3) - expected).abs().max() < 1e-6


def test_brightness_and_gray_contrast_are_torchvisions() -> None:
    image = made(1, torch.float32)
    for name, oracle in (("brightness", tv.adjust_brightness), ("contrast", tv.adjust_contrast)):
        settings = replace(SETTINGS, feature_shift=FeatureShift(**{name: 0.6}))
        factor = client_parameters(settings.feature_shift, 2, channels=1, seed=5)[name][0, 0]
        assert 0.4 < factor < 1.6
        expected = oracle(image.tensor[:1], factor)
        assert (shifted(image, PARTS, settings)[torch.tensor([0])] - expected).abs().max() < 1e-6


def test_an_image_is_the_same_in_every_batch_and_subset() -> None:
    changed = shifted(made(3), PARTS, SETTINGS)
    everything = changed[torch.arange(6)]
    batches = [torch.tensor([5]), torch.tensor([3, 0, 1, 4]), torch.tensor([], dtype=torch.long), torch.tensor([2, 2])]
    for rows, images in zip(batches, changed.prefetch(batches), strict=True):
        assert torch.equal(images, everything[rows])
    assert torch.equal(changed[2:5], everything[2:5])
    assert torch.equal(changed.subset(torch.tensor([4, 1, 0]))[torch.tensor([2, 1])], everything[[0, 1]])
    assert torch.equal(torch.cat(list(changed.chunks(4))), everything)


def test_clients_keep_their_parameters_whatever_the_others() -> None:
    many = client_parameters(ALL, 50, channels=3, seed=5)
    few = client_parameters(FeatureShift(color=0.3, noise=0.1), 3, channels=3, seed=5)
    assert all(np.array_equal(few[name], many[name][:3]) for name in ("color", "noise"))
    assert many["color"].shape == (50, 3)
    for name, low, high in (("brightness", 0.6, 1.4), ("color", 0.7, 1.3), ("blur", 0, 0.7), ("noise", 0, 0.1)):
        span = many[name].max() - many[name].min()
        assert low <= many[name].min()
        assert many[name].max() <= high
        assert span > 0.8 * (high - low)


def test_no_strength_leaves_the_source_alone() -> None:
    images = made(3)
    assert shifted(images, PARTS, replace(SETTINGS, feature_shift=FeatureShift())) is images
    assert parameter_table(replace(SETTINGS, feature_shift=FeatureShift()), channels=3) == []


def test_the_table_names_every_channel() -> None:
    settings = replace(SETTINGS, feature_shift=FeatureShift(color=0.3, noise=0.1))
    table = parameter_table(settings, channels=2)
    assert table[0] == ["client", "color 0", "color 1", "noise"]
    drawn = client_parameters(settings.feature_shift, 2, channels=2, seed=5)
    assert table[2] == ["1", *(f"{value:.4g}" for value in [*drawn["color"][1], *drawn["noise"][1]])]
