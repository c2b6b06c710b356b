"""FedDecorr's term by hand and against its equation."""

import numpy as np
import pytest
import torch

from fedssl.methods.base import SSLMethod
from fedssl.regularizers.base import RegularizerInput
from fedssl.regularizers.decorr import Decorrelation, feature_decorrelation
from fedssl.seeding import torch_generator
from fedssl.views import Views
from tests.fedssl.regularizers.points import random


def test_decorrelation_by_hand():
    # Three images, one dimension twice the other: the correlation is 1, so (3 - 1)^2 / 3. With a third dimension that
    # is constant one pair of three is correlated: a third of it. All four corners of a square: no correlation.
    z = torch.tensor([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]])
    assert feature_decorrelation(z).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(-3 * z + 1).item() == pytest.approx(4 / 3)
    assert feature_decorrelation(torch.cat((z, torch.ones(3, 1)), dim=1)).item() == pytest.approx(4 / 9)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert feature_decorrelation(corners).item() == 0
    assert feature_decorrelation(z[:1]).item() == 0
    assert feature_decorrelation(z[:, :1]).item() == 0


def test_decorrelation_equals_its_equation():
    z = random(7, 5) @ random(5, 5, seed=1)
    correlation = np.corrcoef(z.numpy().T)
    squares = [correlation[i, j] ** 2 for i in range(5) for j in range(5) if i != j]
    assert feature_decorrelation(z).item() == pytest.approx(6**2 / 7 * np.mean(squares), rel=1e-6)
    z.requires_grad_()
    assert torch.autograd.gradcheck(feature_decorrelation, z)


def test_the_terms_of_both_views_are_added_with_the_weight():
    z1, z2 = random(5, 4), random(5, 4, seed=1)
    step = RegularizerInput(SSLMethod(), Views.of(z1, z2), (z1, z2), torch_generator(0, "train"))
    both = Decorrelation(weight=0.3).apply(torch.tensor(2.0), step).item()
    assert both == pytest.approx(2 + 0.3 * (feature_decorrelation(z1) + feature_decorrelation(z2)).item(), rel=1e-6)
