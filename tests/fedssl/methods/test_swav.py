"""SwAV: loss and codes by hand, prototypes of unit length, the queue, matched prototypes, and failures."""

from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.losses import sinkhorn, swav
from fedssl.methods.swav import SwAV, best_order, distinct_assignments, used_share
from fedssl.model_arrays import exchanged_names, local_names
from tests.federation import Federation
from tests.fedssl.methods.made import HEAD, draw, encoder, mean_by_images, multi_crop, step

SMALL = ["method=swav", "method.projector.hidden_dim=16", "method.projector.out_dim=8", "method.num_prototypes=5"]
SETTINGS = {
    "num_prototypes": 5,
    "temperature": 0.2,
    "epsilon": 0.1,
    "iterations": 3,
    "freeze_prototypes_rounds": 0,
    "queue_size": 0,
    "queue_start_round": 1,
    "match_prototypes": False,
}


def make(**changes) -> SwAV:
    return SwAV(encoder(), projector=HEAD, **{**SETTINGS, **changes})


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(draw(*shape, seed=seed), dim=-1)


def fill(method: SwAV) -> Tensor:
    method.queue.copy_(unit(*method.queue.shape, seed=5))
    return method.queue.clone()


@pytest.mark.parametrize("num_local", [0, 3])
def test_loss_is_that_of_one_pass_of_the_projector(num_local):
    """All views have cosines with the prototypes, and the global ones codes, each view by itself."""
    method, views = make(), multi_crop(num_local=num_local)
    h = [method.encoder(torch.cat(views.images[:2]))]
    if num_local:
        h.append(method.encoder(torch.cat(views.images[2:])))
    z = method.projector(torch.cat(h)).chunk(2 + num_local)
    weight = method.prototypes.weight
    scores = [F.cosine_similarity(view[:, None], weight[None], dim=2) for view in z]
    codes = [sinkhorn(view, epsilon=0.1, iterations=3) for view in scores[:2]]
    torch.testing.assert_close(method.loss(views), swav(scores, codes, temperature=0.2), rtol=1e-5, atol=1e-6)


def test_everything_but_the_queue_is_trained_and_exchanged():
    method = make(queue_size=6)
    method.loss(multi_crop()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in method.parameters())
    assert {name.partition(".")[0] for name in exchanged_names(method)} == {"encoder", "projector", "prototypes"}
    assert local_names(method) == ["queue"]
    assert local_names(make()) == []


def test_codes_have_no_gradient():
    """The loss of fixed codes has the same gradient."""
    method, views = make(), multi_crop()
    method.loss(views).backward()
    found = method.prototypes.weight.grad.clone()
    method.zero_grad()
    z, weight = method.project_all(views), method.prototypes.weight
    scores = z @ weight.T
    codes = sinkhorn(scores[:2].detach(), epsilon=0.1, iterations=3)
    swav(scores.unbind(), codes.unbind(), temperature=0.2).backward()
    torch.testing.assert_close(weight.grad, found)


def test_prototypes_have_unit_length_before_each_step():
    method = make()
    with torch.no_grad():
        method.prototypes.weight.mul_(3)
    method.start_round(first=False)
    ones = torch.ones(5)
    torch.testing.assert_close(method.prototypes.weight.norm(dim=1), ones)
    before = method.prototypes.weight.clone()
    step(method, multi_crop(), lr=0.1)
    torch.testing.assert_close(method.prototypes.weight.norm(dim=1), ones)
    assert (method.prototypes.weight - before).abs().max() > 1e-4


OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)}
OPTIMIZERS["adam"] = partial(torch.optim.Adam, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_prototypes_are_frozen_in_the_first_rounds(optimizer):
    method = make(freeze_prototypes_rounds=2)
    made = OPTIMIZERS[optimizer](method.parameters())
    changed = []
    for round in (1, 2, 3):
        method.round = round
        method.start_round(first=False)
        before = method.prototypes.weight.clone(), method.projector[0].weight.clone()
        for _ in range(2):
            made.zero_grad()
            method.loss(multi_crop()).backward()
            made.step()
            method.on_step_end()
        changed.append(not torch.equal(method.prototypes.weight, before[0]))
        assert not torch.equal(method.projector[0].weight, before[1])
        # A gradient that is not 0 would count in the norm by which gradients are clipped.
        assert bool(method.prototypes.weight.grad.any()) == (round == 3)
    assert changed == [False, False, True]


def test_prototypes_are_averaged_by_images_and_normalized_by_clients(tmp_path):
    overrides = ["strategy=fedavg", "partition=dirichlet", "partition.alpha=0.1", "num_clients=2"]
    federation = Federation(tmp_path, *SMALL, *overrides, "method.freeze_prototypes_rounds=0")
    layers = federation.run(1)
    name = "prototypes.weight"
    for update in federation.updates:
        np.testing.assert_allclose(np.linalg.norm(update["arrays"][name].numpy(), axis=1), 1, rtol=1e-6)
    expected = mean_by_images(federation, name)
    np.testing.assert_allclose(layers[name], expected, rtol=1e-5, atol=1e-7)
    assert np.linalg.norm(layers[name], axis=1).max() < 1
    method = make()
    with torch.no_grad():
        method.prototypes.weight.copy_(torch.from_numpy(layers[name]))
    method.start_round(first=False)
    normalized = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(method.prototypes.weight.detach(), normalized, rtol=1e-5, atol=1e-7)


def test_the_queue_is_first_in_first_out_per_view():
    method = make(queue_size=4)
    batches = [unit(2, 3, 8, seed=seed).float() for seed in range(2)]
    for z in batches:
        method.assign(z, z @ method.prototypes.weight.T)
    expected = torch.cat((batches[1], batches[0][:, :1]), dim=1)  # the newest first
    assert torch.equal(method.queue, expected)
    large = unit(2, 6, 8, seed=2).float()
    method.assign(large, large @ method.prototypes.weight.T)
    assert torch.equal(method.queue, large[:, :4])


def test_the_queue_is_used_from_its_round_on():
    method, z = make(queue_size=4, queue_start_round=3), unit(2, 3, 8, seed=1).float()
    scores, used = z @ method.prototypes.weight.T, []
    for round in (1, 2, 3, 4):
        method.round = round
        fill(method)
        used.append(not torch.equal(method.assign(z, scores), sinkhorn(scores, epsilon=0.1, iterations=3)))
        assert torch.equal(method.queue[:, :3], z)  # filled in every round
    assert used == [False, False, True, True]


def test_the_queue_is_kept_between_rounds_of_a_client():
    method = make(queue_size=4)
    older = fill(method)
    method.start_round(first=False)
    assert torch.equal(method.queue, older)
    method.start_round(first=True)
    assert not method.queue.any()


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_the_best_of_all(seed):
    prototypes, reference = unit(5, 3, seed=seed), unit(5, 3, seed=seed + 10)
    best = max(
        permutations(range(5)), key=lambda order: sum(float(prototypes[k] @ reference[i]) for i, k in enumerate(order))
    )
    assert best_order(prototypes, reference).tolist() == list(best)


def test_matching_changes_no_loss_and_undoes_a_permutation():
    method, order = make(match_prototypes=True), torch.tensor([3, 0, 4, 1, 2])
    method.start_round(first=False)
    for seed in range(3):
        step(method, multi_crop(seed=seed), lr=0.1)
    trained, views = method.prototypes.weight.detach().clone(), multi_crop()
    losses = [method.loss(views).item()]
    with torch.no_grad():
        method.prototypes.weight.copy_(trained[order])
    losses.append(method.loss(views).item())
    method.end_round()
    losses.append(method.loss(views).item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert torch.equal(method.prototypes.weight, trained)


@pytest.mark.parametrize("match", [False, True])
def test_a_client_with_permuted_prototypes_gives_the_same_average(tmp_path, monkeypatch, match):
    """Permute those of the first of two clients after its training."""
    overrides = [*SMALL, "strategy=fedavg", "num_clients=2", f"method.match_prototypes={match}"]
    overrides += ["method.freeze_prototypes_rounds=0"]
    plain = Federation(tmp_path / "plain", *overrides).run(1)
    end_round, clients = SwAV.end_round, []

    def permute_first(method):
        clients.append(method)
        if len(clients) == 1:
            with torch.no_grad():
                method.prototypes.weight.copy_(method.prototypes.weight.roll(1, dims=0))
        end_round(method)

    monkeypatch.setattr(SwAV, "end_round", permute_first)
    permuted = Federation(tmp_path / "permuted", *overrides).run(1)
    assert len(clients) == 2
    assert np.array_equal(plain["prototypes.weight"], permuted["prototypes.weight"]) == match
    assert np.array_equal(plain["projector.0.weight"], permuted["projector.0.weight"])


def test_distinct_assignments_by_hand():
    """Two images on one prototype each have the information log 2, and so have two pairs of images. For an image on two
    of three prototypes and one on the third, the mean is (1/4, 1/4, 1/2). Its entropy 1.5 log 2, less the mean entropy
    of the images log(2) / 2, is log 2."""
    assert distinct_assignments(torch.eye(2)) == pytest.approx(2)
    assert distinct_assignments(torch.eye(3)[[0, 0, 2, 2]]) == pytest.approx(2)
    assert distinct_assignments(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])) == pytest.approx(2)
    assert distinct_assignments(torch.full((4, 3), 1 / 3)) == pytest.approx(1)
    assert distinct_assignments(torch.eye(3)[[1, 1, 1]]) == pytest.approx(1)


@torch.no_grad()
def test_diagnostics_are_those_of_the_global_views():
    method, views = make().eval(), multi_crop()
    h = method.projector(method.encoder(torch.cat(views.images[:2])))
    cosines = F.cosine_similarity(h[:, None], method.prototypes.weight[None], dim=2)
    found = method.diagnose(views)
    assert found["distinct_prototypes"] == pytest.approx(distinct_assignments((cosines / 0.2).softmax(1)), rel=1e-5)
    assert found["used_prototypes"] == used_share(cosines.argmax(dim=1), num_prototypes=5)


def test_a_queue_that_is_not_full_is_not_used():
    """Rows of zeros would be images that are equally near to all prototypes."""
    method, z = make(queue_size=4), unit(2, 3, 8, seed=1).float()
    fill(method)
    method.queue[:, -1] = 0
    scores = z @ method.prototypes.weight.T
    assert torch.equal(method.assign(z, scores), sinkhorn(scores, epsilon=0.1, iterations=3))
