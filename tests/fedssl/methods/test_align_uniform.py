"""Alignment and uniformity: by hand, by a slow transcription, and their minimum."""

import math

import numpy as np
import pytest
import torch

from fedssl.methods.align_uniform import AlignUniform, alignment_loss, uniformity_loss
from fedssl.views import Views
from tests.federation import Federation
from tests.fedssl.methods.made import HEAD, encoder, views


def test_both_losses_by_hand():
    # Unit vectors (1, 0), (0, 1) and (-1, 0): squared distances 2, 4, 2. With t = 1: log((2 e^-2 + e^-4) / 3).
    z = torch.tensor([[3.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
    assert uniformity_loss(z, t=1.0).item() == pytest.approx(math.log((2 * math.exp(-2) + math.exp(-4)) / 3), rel=1e-6)
    assert alignment_loss(z, z.roll(1, 0)).item() == pytest.approx((4 + 2 + 2) / 3)
    assert alignment_loss(z, 2 * z).item() == 0


def unit_rows(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def slow_uniformity(z, *, t):
    unit, numbers = unit_rows(z), range(len(z))
    terms = [math.exp(-t * ((unit[i] - unit[j]) ** 2).sum()) for i in numbers for j in numbers if i != j]
    return math.log(np.mean(terms))


def test_uniformity_equals_a_slow_transcription():
    z = np.random.default_rng(0).standard_normal((6, 4))
    assert uniformity_loss(torch.tensor(z), t=3.0).item() == pytest.approx(slow_uniformity(z, t=3), rel=1e-12)


def test_the_loss_weighs_the_uniformity_of_both_views():
    method = AlignUniform(encoder(), projector=HEAD, uniformity_weight=0.4, t=3.0)
    both = Views.of(*views())
    z1, z2 = (z.detach().double().numpy() for z in method.project(both.images))
    expected = ((unit_rows(z1) - unit_rows(z2)) ** 2).sum(axis=1).mean()
    expected += 0.4 / 2 * (slow_uniformity(z1, t=3) + slow_uniformity(z2, t=3))
    assert method.loss(both).item() == pytest.approx(expected, rel=1e-5)


def test_equal_vectors_are_least_uniform():
    equal = torch.ones(4, 3, requires_grad=True)
    loss = uniformity_loss(equal)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()
    assert torch.isfinite(equal.grad).all()
    spread = torch.tensor([[1.0, 0], [-1, 0]])  # the only pair is opposite: -t * 4
    assert uniformity_loss(spread).item() == pytest.approx(-8)


def test_clients_train_and_the_loss_falls(tmp_path):
    federation = Federation(tmp_path, "method=fed_align_uniform", "strategy=fedavg", "local_epochs=3")
    federation.run(1)
    first = federation.report.clients[0].loss
    federation.run(2)
    assert federation.report.clients[0].loss < first
