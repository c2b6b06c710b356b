"""Losses of MAE and I-JEPA against slow transcriptions of their equations and numbers computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from fedssl.errors import InputError
from fedssl.losses.masked_images import ijepa, masked_reconstruction, patchify
from tests.fedssl.losses.vectors import assert_gradients, draw


def slow_standardized(values: list[float], *, divisor: int, more: float) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / divisor
    return [(value - mean) / math.sqrt(variance + more) for value in values]


def slow_reconstruction(prediction: Tensor, patches: Tensor, normalize: bool) -> float:
    squares = []
    for row, patch in zip(prediction.flatten(0, 1).tolist(), patches.flatten(0, 1).tolist(), strict=True):
        target = slow_standardized(patch, divisor=len(patch) - 1, more=1e-6) if normalize else patch
        squares += [(a - b) ** 2 for a, b in zip(row, target, strict=True)]
    return sum(squares) / len(squares)


def slow_ijepa(prediction: Tensor, target: Tensor) -> float:
    distances = []
    for row, features in zip(prediction.flatten(0, 2).tolist(), target.flatten(0, 2).tolist(), strict=True):
        standardized = slow_standardized(features, divisor=len(features), more=1e-5)
        differences = [abs(a - b) for a, b in zip(row, standardized, strict=True)]
        distances += [d**2 / 2 if d < 1 else d - 0.5 for d in differences]
    return sum(distances) / len(distances)


def test_patchify_by_hand() -> None:
    """Value 100 channel + 10 row + column. Patch 0 has the columns 0 and 1, and patch 1 the columns 2 and 3; each its
    pixels row by row, and of each pixel both channels."""
    channel, row, column = torch.arange(2)[:, None, None], torch.arange(2)[:, None], torch.arange(4)
    images = (100 * channel + 10 * row + column)[None]
    expected = [[0, 100, 1, 101, 10, 110, 11, 111], [2, 102, 3, 103, 12, 112, 13, 113]]
    assert patchify(images, 2).tolist() == [expected]


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch"), [(3, 6, 4, 2), (1, 4, 4, 4), (2, 3, 9, 3), (3, 2, 2, 1)]
)
def test_patchify_is_its_definition(channels: int, height: int, width: int, patch: int) -> None:
    (images,) = draw(2, channels, height, width, count=1)
    patches = patchify(images, patch)
    columns = width // patch
    assert patches.shape == (2, height // patch * columns, patch * patch * channels)
    for n in range(patches.shape[1]):
        for row in range(patch):
            for column in range(patch):
                pixel = images[:, :, n // columns * patch + row, n % columns * patch + column]
                start = (row * patch + column) * channels
                assert torch.equal(patches[:, n, start : start + channels], pixel)


@pytest.mark.parametrize("patch", [0, 3, 4])
def test_a_patch_that_does_not_divide_the_image_is_rejected(patch: int) -> None:
    with pytest.raises(InputError, match=f"patch={patch} but images have 4 x 6 pixels; pass a divisor of both"):
        patchify(torch.zeros(1, 3, 4, 6), patch)


@pytest.mark.parametrize("normalize", [True, False])
def test_masked_reconstruction_is_its_equation(normalize: bool) -> None:
    prediction, patches = draw(2, 3, 12)
    loss = masked_reconstruction(prediction, 0.01 * patches + 3, normalize=normalize)
    assert loss.item() == pytest.approx(slow_reconstruction(prediction, 0.01 * patches + 3, normalize), rel=1e-10)


def test_masked_reconstruction_by_hand() -> None:
    """One patch of the pixels 1 and 3, and a prediction of 0. Their mean is 2 and their variance 2 (divisor 1), so the
    targets are -1 / sqrt 2 and 1 / sqrt 2: 1/2. Without normalization (1 + 9) / 2 = 5."""
    patches, zeros = torch.tensor([[[1.0, 3.0]]]), torch.zeros(1, 1, 2)
    assert masked_reconstruction(zeros, patches).item() == pytest.approx(0.5, rel=1e-5)
    assert masked_reconstruction(zeros, patches, normalize=False).item() == 5


def test_ijepa_is_its_equation() -> None:
    prediction, target = draw(2, 3, 4, 6)
    loss = ijepa(2 * prediction, 0.1 * target + 1)
    assert loss.item() == pytest.approx(slow_ijepa(2 * prediction, 0.1 * target + 1), rel=1e-10)


def test_ijepa_by_hand() -> None:
    """Target features 1 and 3: mean 2, variance 1 (divisor 2), so -1 and 1. Predictions -0.5 and 3 differ by 0.5 and 2:
    0.5^2 / 2 = 0.125 and 2 - 0.5 = 1.5, with the mean 0.8125."""
    loss = ijepa(torch.tensor([[[[-0.5, 3.0]]]]), torch.tensor([[[[1.0, 3.0]]]]))
    assert loss.item() == pytest.approx(0.8125, rel=1e-4)


def test_gradients_are_right_and_flow_into_predictions_only() -> None:
    prediction, target = (x.requires_grad_() for x in draw(2, 2, 2, 3))
    assert torch.autograd.gradcheck(lambda p: ijepa(p, target.detach()), prediction)
    assert_gradients(ijepa(prediction, target), into=[prediction], not_into=[target])
    pixels, patches = (x.requires_grad_() for x in draw(2, 2, 6))
    assert torch.autograd.gradcheck(lambda p: masked_reconstruction(p, patches.detach()), pixels)
    assert_gradients(masked_reconstruction(pixels, patches), into=[pixels], not_into=[patches])
