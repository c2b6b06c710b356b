"""FedSC: the loss by hand and over all pairs of images, and the exchange of correlation matrices."""

from functools import partial

import numpy as np
import pytest
import torch

from fedssl.methods.fedsc import (
    CLIENTS,
    MEAN,
    MEAN_ROUND,
    OWN,
    OWN_ROUND,
    SUM,
    FedSC,
    clip_norm,
    correlation,
    limit_norm,
    spectral_loss,
)
from fedssl.views import Views
from tests.federation import Federation
from tests.fedssl.methods.made import HEAD, encoder, views

SMALL = ["method=fedsc", "strategy=fedavg", "method.projector.hidden_dim=8", "method.projector.out_dim=4"]


def test_the_loss_by_hand():
    # Z = ((1, 0), (0, 2), (1, 0), (0, 0)): R = diag(2, 4) / 4. Positive pairs: (1 + 0) / 2. |R|^2 = 0.25 + 1.
    z1, z2 = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([[1.0, 0], [0, 0]])
    assert correlation(z1, z2).tolist() == [[0.5, 0], [0, 1]]
    others = torch.tensor([[2.0, 5], [5, 3]])  # <R, others> = 0.5 * 2 + 3
    assert spectral_loss(z1, z2, others, own_share=torch.tensor(1.0)).item() == 1.25 - 1
    assert spectral_loss(z1, z2, others, own_share=torch.tensor(0.25)).item() == 0.25 * 1.25 + 1.5 * 4 - 1
    clipped = clip_norm(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), square=4.0)
    assert clipped.tolist() == [pytest.approx([1.2, 1.6]), pytest.approx([0.3, 0.4])]


def test_long_projections_are_shortened_in_the_loss_and_the_matrix(monkeypatch):
    # At most length 2: Z = ((2, 0), (0, 2), (2, 0), (0, 1)), R = diag(8, 5) / 4, |R|^2 = 89 / 16, pairs (4 + 2) / 2.
    method = FedSC(encoder(), projector=partial(HEAD, out_dim=2), max_square=4.0, own_share=0.2)
    z1, z2 = torch.tensor([[3.0, 0], [0, 2]]), torch.tensor([[9.0, 0], [0, 1]])
    monkeypatch.setattr(method, "project", lambda images: (z1, z2))
    assert method.loss(Views.of(*views())).item() == pytest.approx(89 / 16 - 2 * 3)
    assert method.get_buffer(SUM).tolist() == [[2.0, 0], [0, 1.25]]


def test_matrices_stand_for_all_pairs_of_two_clients():
    """<R_1, R_2> is the mean of squared inner products over all pairs of images of both clients, in float64."""
    z, w = np.random.default_rng(0).standard_normal((2, 10, 3))
    pairs = np.mean([(a @ b) ** 2 for a in z for b in w])
    r, s = (correlation(*torch.tensor(one).chunk(2)) for one in (z, w))
    assert (r * s).sum().item() == pytest.approx(pairs, rel=1e-12)


def test_clients_subtract_their_own_matrix(tmp_path):
    federation = Federation(tmp_path, *SMALL, "rounds=3", "local_epochs=2")
    federation.run(1)
    own = [update["method-upload"][OWN].numpy() for update in federation.updates]
    assert all(np.allclose(one, one.T, atol=1e-6) and np.linalg.eigvalsh(one).min() > -1e-6 for one in own)
    federation.run(1)
    plan = federation.plans[3]["method-broadcast"]
    np.testing.assert_allclose(plan[MEAN].numpy(), np.mean(own, axis=0), rtol=1e-6)
    assert (plan[CLIENTS].numpy(), plan[MEAN_ROUND].numpy()) == (3, 1)
    method = federation.method
    buffers = dict(method.named_buffers())
    for name, value in ((MEAN, np.mean(own, axis=0)), (CLIENTS, 3), (MEAN_ROUND, 1), ("correlation_sum", 2 * own[0])):
        buffers[name].copy_(torch.tensor(value))
    buffers["correlation_steps"].fill_(2)
    buffers["correlation_round"].fill_(1)
    method.round = 2
    method.start_round(first=False)
    np.testing.assert_allclose(method._others.numpy(), (own[1] + own[2]) / 2, rtol=1e-5, atol=1e-6)
    assert method._alpha.item() == pytest.approx(0.6)  # halfway from 1 to 0.2


def test_a_false_matrix_counts_as_that_of_a_client(tmp_path):
    """Honest matrices keep every bit; one of 1e5 I has at most the norm 1 of the others, and a false round none."""
    method = Federation(tmp_path, *SMALL, "num_clients=3").method
    dim = len(method.get_buffer(OWN))
    honest = [np.diag(np.eye(dim, dtype=np.float32)[number]) for number in (0, 1)]
    sent = [{OWN: one, OWN_ROUND: np.array(4, np.float32)} for one in honest]
    sent += [{OWN: 1e5 * np.eye(dim, dtype=np.float32), OWN_ROUND: np.array(1e9, np.float32)}]
    merged = method.aggregate_parts(sent, {MEAN: np.zeros((dim, dim), np.float32)})
    expected = (honest[0] + honest[1] + np.eye(dim) * method.max_square / np.sqrt(dim)) / 3
    np.testing.assert_allclose(merged[MEAN], expected, rtol=1e-6)
    assert merged[MEAN_ROUND] == 4
    assert limit_norm(honest[0], method.max_square) is honest[0]


@pytest.mark.parametrize(
    ("strategy", "neighbors"),
    [("fedavg", lambda one, other: True), ("gossip", lambda one, other: (one - other) % 4 in (1, 3))],  # a ring
)
def test_others_are_clients_of_the_last_round_of_the_model(tmp_path, monkeypatch, strategy, neighbors):
    """Two of four clients per round. With gossip a model has the matrices of its client's last round."""
    starts, start_round, alone = [], FedSC.start_round, 0

    def record(method, *, first):
        start_round(method, first=first)
        starts.append((method.round, method.client, method._others.numpy().copy(), method._alpha.item()))

    monkeypatch.setattr(FedSC, "start_round", record)
    small = ["num_clients=4", "clients_per_round=2", "method.projector.batch_norm=false", "rounds=8"]
    federation = Federation(tmp_path, *SMALL, f"strategy={strategy}", *small)
    federation.run(8)
    own = [update["method-upload"][OWN].numpy() for update in federation.updates]
    trained = {(round, client): matrix for (round, client, *_), matrix in zip(starts, own, strict=True)}
    for round, client, others, alpha in starts:
        before = [r for r, one in trained if r < round and (one == client or strategy == "fedavg")]
        last = max(before, default=0)
        expected = [
            matrix for (r, one), matrix in trained.items() if r == last and one != client and neighbors(one, client)
        ]
        assert (alpha == 1) == (not expected)
        alone += not expected
        if expected:
            np.testing.assert_allclose(others, np.mean(expected, axis=0), rtol=1e-4, atol=1e-6)
    assert 2 <= alone < len(starts)


def test_alone_it_is_spectral_contrastive_learning(tmp_path):
    one = Federation(tmp_path / "one", *SMALL, "num_clients=1", "rounds=3").run(3)
    same = Federation(tmp_path / "same", *SMALL, "num_clients=1", "rounds=3", "method.own_share=1").run(3)
    assert all((one[name] == layer).all() for name, layer in same.items())
