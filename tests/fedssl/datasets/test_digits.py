"""scikit-learn's digits."""

import numpy as np
import pytest
import torch

from fedssl.datasets.base import load_federated, load_split
from fedssl.datasets.holdout import stratified_holdout
from tests.fedssl.datasets.made import settings_of

pytestmark = pytest.mark.usefixtures("no_network_and_no_cache")


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    original = load_digits()
    train, test = (load_split(settings_of("digits"), split) for split in ("train", "test"))
    assert train is load_federated(settings_of("digits"))
    assert train.images.shape == (1438, 1, 8, 8)
    assert test.images.shape == (359, 1, 8, 8)
    assert train.images[:].dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    kept, held_out = stratified_holdout(original.target, fraction=0.2)
    for image_data, rows in ((train, kept), (test, held_out)):
        expected = torch.from_numpy(np.rint(original.images[rows] * 255 / 16)).byte()
        assert torch.equal(image_data.images[:][:, 0], expected)
        assert torch.equal(image_data.labels, torch.from_numpy(original.target[rows]))
        assert image_data.classes == tuple("0123456789")
    # Class sizes 178 182 177 183 181 182 181 179 174 180; a fifth is 35.6 36.4 35.4 36.6 36.2 36.4 36.2 35.8 34.8 36.0:
    # the floors give 355, and the four largest remainders (7, 8, 0, 3) one more each.
    assert torch.bincount(test.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_statistics_are_those_of_the_yaml() -> None:
    settings = settings_of("digits")
    values = load_split(settings, "train").images[:] / 255
    assert values.mean().item() == pytest.approx(settings.mean[0], abs=1e-3)
    assert values.std().item() == pytest.approx(settings.std[0], abs=1e-3)
