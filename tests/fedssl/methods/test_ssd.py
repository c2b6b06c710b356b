"""SSD: both terms by hand and by slow transcriptions, and disjoint dimensions of clients."""

import math

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.methods.align_uniform import alignment_loss, uniformity_loss
from fedssl.methods.base import build_method
from fedssl.methods.ssd import SSD, dimension_scaled, projector_distillation
from fedssl.views import Views
from tests.federation import Federation
from tests.fedssl.methods.made import encoder, views


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


def test_the_loss_is_the_weighted_sum_of_four_terms():
    weights = {"uniformity_weight": 0.5, "separation_weight": 0.7, "distillation_weight": 0.3}
    method = SSD(encoder(), hidden_dim=8, num_layers=2, t=3.0, scale=10.0, share=0.25, **weights)
    method.client = 1
    method.start_round(first=False)
    both = Views.of(*views())
    h1, h2 = (method.encoder(view).double() for view in both.images)
    z1, z2 = (method.projector(method.encoder(view)).double() for view in both.images)
    separation = (dimension_scaled(z1, method.scales) + dimension_scaled(z2, method.scales)) / 2
    distillation = (projector_distillation(h1, z1) + projector_distillation(h2, z2)) / 2
    uniformity = (uniformity_loss(z1, t=3.0) + uniformity_loss(z2, t=3.0)) / 2
    expected = alignment_loss(z1, z2) + 0.5 * uniformity + 0.7 * separation + 0.3 * distillation
    assert method.loss(both).item() == pytest.approx(expected.item(), rel=1e-5)
    assert min(separation.item(), distillation.item()) > 0.01


@pytest.mark.parametrize(
    ("share", "size", "expected"),  # number of own dimensions out of 8, and the first of them
    [
        (0.25, 2, [0, 2, 4, 6, 0]),
        (1 / 3, 2, [0, 2, 4, 6, 0]),  # 2.67 of 8: three would be enough for two clients only
        (0.5, 4, [0, 4, 0, 4, 0]),
        (0.01, 1, [0, 1, 2, 3, 4]),
    ],
)
def test_dimensions_of_clients_are_disjoint_as_far_as_they_suffice(share, size, expected):
    overrides = ["method=ssd", "encoder.width=2", "method.hidden_dim=8", f"method.share={share}"]
    method = build_method(compose(overrides).model)
    assert method.encoder.feature_dim == 8
    for client, begin in enumerate(expected):
        method.client = client
        method.start_round(first=False)
        own = [10.0 if begin <= dimension < begin + size else 1.0 for dimension in range(8)]
        assert method.scales.tolist() == own


def test_a_client_trains_with_its_own_dimensions_and_exchanges_none(tmp_path):
    federation = Federation(tmp_path, "method=ssd", "strategy=fedavg", "method.hidden_dim=8", "method.share=0.25")
    begins = []
    loss = SSD.loss

    def record(method, views):
        begins.append(method.scales.argmax().item() // round(len(method.scales) / 4))
        return loss(method, views)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SSD, "loss", record)
        federation.run(2)
    assert set(begins) == {0, 1, 2}
    assert not any("scales" in name for name in federation.updates[0]["arrays"])


def test_the_server_has_no_dimensions_of_its_own(tmp_path, monkeypatch):
    scales, old = [], SSD.loss
    monkeypatch.setattr(SSD, "loss", lambda method, views: scales.append(method.scales.clone()) or old(method, views))
    Federation(tmp_path, "method=ssd", "strategy=fedavg", "method.hidden_dim=8", "calibration=auxiliary").run(1)
    assert {(each == 1).all().item() for each in scales} == {True, False}
