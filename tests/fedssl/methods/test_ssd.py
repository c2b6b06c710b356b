"""SSD: both terms by hand and by slow transcriptions, and every client's own dimensions."""

import math

import numpy as np
import pytest
import torch

from fedssl.methods.ssd import SCALES, dimension_scaled, projector_distillation
from tests.federation import Federation
from tests.states import load_tensors


def test_both_terms_by_hand():
    # z = (0.6, 0.8) and scales (4, 3): (2.4, 2.4) is normalized to (1, 1) / sqrt(2).
    expected = (0.6 - math.sqrt(0.5)) ** 2 + (0.8 - math.sqrt(0.5)) ** 2
    assert dimension_scaled(torch.tensor([[3.0, 4.0]]), torch.tensor([4.0, 3.0])).item() == pytest.approx(expected)
    # Softmax of (0, log 3) is (1/4, 3/4), of (0, 0) (1/2, 1/2): KL = log(1/2) / 4 + 3 log(3/2) / 4.
    h, z = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2, requires_grad=True)
    loss = projector_distillation(h.requires_grad_(), z)
    assert loss.item() == pytest.approx(math.log(0.5) / 4 + 3 * math.log(1.5) / 4, rel=1e-6)
    loss.backward()
    assert z.grad is None
    assert h.grad.any()


def test_slow_transcriptions():
    random = np.random.default_rng(2)
    z, h, d = random.standard_normal((5, 4)), random.standard_normal((5, 4)), np.array([1, 10, 1, 1.0])
    separation, distance = [], []
    for row in range(5):
        unit = z[row] / math.sqrt(sum(z[row] ** 2))
        scaled = unit * d / math.sqrt(sum((unit * d) ** 2))
        separation.append(sum((unit - scaled) ** 2))
        p, q = (np.exp(x[row]) / np.exp(x[row]).sum() for x in (h, z))
        distance.append(sum(p * np.log(p / q)))
    assert dimension_scaled(torch.tensor(z), torch.tensor(d)).item() == pytest.approx(np.mean(separation))
    assert projector_distillation(torch.tensor(h), torch.tensor(z)).item() == pytest.approx(np.mean(distance))


def scales(folder, client, *, before):
    return load_tensors(folder / "clients" / "0000" / str(client), before=before)[SCALES].numpy()


def test_clients_keep_their_own_dimensions(tmp_path):
    federation = Federation(tmp_path, "method=ssd", "strategy=fedavg", "method.hidden_dim=8")
    federation.run(1)
    first = [scales(tmp_path, client, before=2) for client in range(3)]
    federation.run(1)
    for client, array in enumerate(first):
        np.testing.assert_array_equal(scales(tmp_path, client, before=3), array)
        assert sorted(set(array.tolist())) == [1, 10]
        assert (array == 10).sum() == max(1, round(0.1 * len(array)))
    assert len({tuple(array) for array in first}) > 1
    assert SCALES not in federation.updates[0]["arrays"]


def test_without_its_terms_it_is_alignment_and_uniformity(tmp_path):
    off = ["method.hidden_dim=8", "method.separation_weight=0", "method.distillation_weight=0"]
    ssd = Federation(tmp_path / "ssd", "method=ssd", "strategy=fedavg", *off)
    layers = ssd.run(2)
    plain = Federation(
        tmp_path / "plain",
        "method=fed_align_uniform",
        "strategy=fedavg",
        "method.projector.hidden_dim=8",
        f"method.projector.out_dim={ssd.method.encoder.feature_dim}",
    ).run(2)
    for name, layer in plain.items():
        np.testing.assert_allclose(layers[name], layer, rtol=1e-5, atol=1e-6)
