"""MAR: the discrepancy by hand and in float64, the mean latents, the schedule, and what travels."""

import math

import numpy as np
import pytest
import torch

from fedssl.augmentation.patch_masks import MaskRecipe
from fedssl.methods.mae import MAE
from fedssl.methods.mar import MAR, adaptive_mmd, mean_latents
from strategies.types import GLOBAL
from tests.federation import Federation
from tests.fedssl.methods.masked import WIDTH, masked_views, vit
from tests.methods import overrides_of

RECIPE = MaskRecipe(kind="random", patch=2)
SIZES = {"decoder_width": 12, "decoder_depth": 1, "decoder_heads": 3}


def make_mar() -> MAR:
    return MAR(vit(pool="mean"), **SIZES, gamma_max=0.5, gamma_min=0.1, num_latents=7)


def slow_mmd(z: np.ndarray, reference: np.ndarray) -> float:
    batch, others = len(z), len(reference)
    distances = [np.linalg.norm(z[a] - z[b]) for a in range(batch) for b in range(batch) if a != b]
    sigma = np.mean(distances)

    def k(x, y):
        return math.exp(-np.sum((x - y) ** 2) / (2 * sigma**2))

    own = sum(k(z[a], z[b]) for a in range(batch) for b in range(batch) if a != b)
    among = sum(k(reference[a], reference[b]) for a in range(others) for b in range(others) if a != b)
    both = sum(k(x, y) for x in z for y in reference)
    return own / (batch * (batch - 1)) + among / (others * (others - 1)) - 2 * both / (batch * others)  # Eq. 6


def test_the_discrepancy_by_hand():
    """Vectors (0, 0) and (2, 0): sigma = 2, and k = exp(-d^2 / 8).

    With the reference (0, 1), (2, 1): k is e^(-1/2) inside both pairs, and between them twice e^(-1/8) and twice
    e^(-5/8), so that the result is 2 e^(-1/2) - e^(-1/8) - e^(-5/8) = 1.21306 - 0.88250 - 0.53526 = -0.20470.
    """
    z, reference = torch.tensor([[0.0, 0], [2, 0]]), torch.tensor([[0.0, 1], [0, 0], [2, 1]])  # a row is empty
    expected = 2 * math.exp(-1 / 2) - math.exp(-1 / 8) - math.exp(-5 / 8)
    assert expected == pytest.approx(-0.20470, abs=1e-5)
    assert adaptive_mmd(z, reference).item() == pytest.approx(expected, rel=1e-6)
    assert adaptive_mmd(z, reference[:2]).item() == 0  # a single latent has no distribution


def test_the_discrepancy_equals_a_slow_transcription():
    random = np.random.default_rng(0)
    for batch, others, shift in ((2, 5, 0.0), (6, 3, 2.0), (5, 5, 9.0)):
        z, reference = random.standard_normal((batch, 4)), shift + random.standard_normal((others, 4))
        result = adaptive_mmd(torch.tensor(z), torch.tensor(reference))
        assert result.item() == pytest.approx(slow_mmd(z, reference), rel=1e-10)


def test_descent_moves_vectors_to_the_reference():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(8, 3, generator=generator).requires_grad_()
    reference = torch.randn(8, 3, generator=generator) + 2
    before = adaptive_mmd(z, reference)
    (grad,) = torch.autograd.grad(before, z)
    assert ((-grad).mean(dim=0) > 0).all()
    assert adaptive_mmd(z - grad, reference) < before
    equal = torch.ones(3, 2, requires_grad=True)  # no bandwidth
    (grad,) = torch.autograd.grad(adaptive_mmd(equal, reference[:, :2]), equal)
    assert grad.isfinite().all()


def test_latents_are_averaged_where_clients_have_them():
    current = np.float32([[9, 9], [9, 9], [9, 9]])
    first, second = np.float32([[1, 2], [3, 4], [0, 0]]), np.float32([[3, 0], [0, 0], [0, 0]])
    result = mean_latents([first, second], current)
    np.testing.assert_array_equal(result, [[2, 1], [3, 4], [9, 9]])
    assert result.dtype == np.float32


def test_weights_fall_along_a_cosine():
    """Of 4 rounds the third is half way: (0.5 + 0.1) / 2. Round 1 has the largest weight."""
    method = make_mar()
    method.rounds = 4
    weights = []
    for method.round in (1, 3):
        method.start_round(first=False)
        weights.append(method._gamma.item())
    assert weights == pytest.approx([0.5, 0.3])


def test_the_loss_adds_the_discrepancy_of_pooled_latents():
    method, plain = make_mar().double(), MAE(vit(pool="mean"), **SIZES).double()
    plain.load_state_dict(method.state_dict(), strict=False)
    views = masked_views(RECIPE)
    views = views.with_images([view.images.double() for view in views])
    method.start_round(first=True)
    assert method.loss(views).item() == plain.loss(views).item()  # without global latents
    reference = np.random.default_rng(0).standard_normal((7, WIDTH))
    method.latents.copy_(torch.tensor(reference))
    tokens = method.encoder.forward_tokens(method.encoder.embed_visible(views[0].images, views[0].mask.indices[0]))
    z = tokens[:, 1:].mean(dim=1) if method.encoder.num_prefix_tokens else tokens.mean(dim=1)
    expected = plain.loss(views).item() + 0.5 * slow_mmd(z.detach().numpy(), reference)
    assert method.loss(views).item() == pytest.approx(expected, rel=1e-9)
    method.end_round()  # two steps on the same five images
    np.testing.assert_allclose(method.local_latents[:5], z.detach(), rtol=1e-9)
    assert not method.local_latents[5:].any()


def test_a_client_with_one_image_never_trains(tmp_path, caplog):
    """The bandwidth of a single latent is a division by zero."""
    federation = Federation(tmp_path, *overrides_of("mar"), "num_clients=3", "dataset.limit=5", "partition=iid")
    federation.run(2)
    assert len(federation.updates) == 2 * 2
    assert all(np.isfinite(layer).all() for layer in federation.layers.values())


def test_clients_receive_the_mean_latents_of_the_last_round(tmp_path):
    federation = Federation(tmp_path, *overrides_of("mar"), "num_clients=3", "method.num_latents=8")
    plain = Federation(tmp_path / "mae", *overrides_of("mae"), "num_clients=3")
    for run in (federation, plain):
        run.run(1)
    assert all((federation.layers[name] == layer).all() for name, layer in plain.layers.items())
    sent = [update["method-upload"]["local_latents"].numpy() for update in federation.updates]
    given = federation.state.models[GLOBAL].broadcast["latents"]
    np.testing.assert_array_equal(given, mean_latents(sent, np.zeros_like(given)))
    for run in (federation, plain):
        run.run(1)
    np.testing.assert_array_equal(federation.plans[-1]["method-broadcast"]["latents"].numpy(), given)
    assert any((federation.layers[name] != layer).any() for name, layer in plain.layers.items())
