"""Synthetic cases in which a mechanism must act. `benchmarks/mechanisms.py` measures the same on images."""

import copy
from functools import partial
from math import sqrt

import numpy as np
import pytest
import torch

from fedssl.encoders import conv_small
from fedssl.methods.heads import MLP
from fedssl.methods.simclr import SimCLR
from fedssl.schedule.stages import set_active_stages
from strategies.cluster_assignment import LAST_ENCODER_PREFIX, SelectByFeatures
from strategies.eua import eua
from strategies.fedavg import fedavg
from strategies.fedu import FedU
from strategies.l_dawa import l_dawa
from strategies.m_dawa import m_dawa
from tests.server_app.small import Small
from tests.strategies.made import layers, update
from tests.strategies.test_cluster_assignment import FakeImages, plan
from tests.strategies.test_fedu import make_byol, make_plan, participate, some_layers


def test_l_dawa_gives_a_diverging_layer_less_weight():
    # Both layers are (1, 0). Client 1 turns one of them by 60 degrees, to (1/2, sqrt(3)/2), with the cosine 1/2.
    start = layers(calm=[1, 0], turned=[1, 0])
    clients = [update(0, start), update(1, layers(calm=[1, 0], turned=[0.5, sqrt(3) / 2]))]
    mean = fedavg(start, clients, weighting="uniform")
    weighted = l_dawa(start, clients)
    # The mean is (3/4, sqrt(3)/4), at 30 degrees. L-DAWA: (1 + 1/4, sqrt(3)/4) / 2, at atan(sqrt(3)/5) = 19.1 degrees.
    np.testing.assert_allclose(mean["turned"], [0.75, sqrt(3) / 4], rtol=1e-6)
    np.testing.assert_allclose(weighted["turned"], [0.625, sqrt(3) / 8], rtol=1e-6)
    # The client's share is (1/2) / (1 + 1/2) = 1/3 instead of 1/2.
    normalized = l_dawa(start, clients, normalize=True)["turned"]
    np.testing.assert_allclose(normalized, [2 / 3 + 1 / 6, sqrt(3) / 6], rtol=1e-6)
    np.testing.assert_allclose(weighted["calm"], [1, 0])
    # The model's cosine is (1 + 1/2) / 2 = 3/4, so M-DAWA also shrinks the layer that did not diverge.
    np.testing.assert_allclose(m_dawa(start, clients)["calm"], [0.875, 0], rtol=1e-6)


OPTIMA = np.array([[4.0, 0.0], [-1.0, 0.0]])  # of client k's loss |x - a_k|^2 / 2; Pareto points are between them
RATE = 0.1  # of one local step


def losses(x: np.ndarray) -> np.ndarray:
    return ((x - OPTIMA) ** 2).sum(axis=1) / 2


def rounds(rule, x: np.ndarray, number: int) -> np.ndarray:
    """Return the model before and after each round, ``(number + 1, 2)``."""
    points = [x]
    for _ in range(number):
        clients = [update(k, {"x": points[-1] - RATE * (points[-1] - a)}, num_examples=1) for k, a in enumerate(OPTIMA)]
        points.append(rule({"x": points[-1]}, clients)["x"])
    return np.array(points)


def test_eua_descends_for_both_clients_whose_gradients_conflict():
    # At (0, 1) the gradients are (-4, 1) and (1, 1), with the product -3; the mean is (-3/2, 1), and a step against it
    # raises the second loss, since <(1, 1), (3/2, -1)> = 1/2. g_1 = 2 (-4, 1) / 17 and g_2 = (1, 1), up to the rate:
    # p_1 = (<g_2, g_2> - <g_1, g_2>) / |g_1 - g_2|^2 = (40/17) / (50/17) = 4/5, d = (-3/17, 5/17), and the products of
    # -d with the gradients are -1 and -2/17. The step is as long as the mean one, 0.1 sqrt(13) / 2.
    start = np.array([0.0, 1.0])
    mean, fair = rounds(fedavg, start, 1)[-1], rounds(eua, start, 1)[-1]
    assert (losses(mean) - losses(start))[1] == pytest.approx((1.15**2 + 0.9**2) / 2 - 1)  # above 0
    np.testing.assert_allclose(fair, start + RATE * sqrt(13) / 2 * np.array([3, -5]) / sqrt(34), rtol=1e-6)
    assert (losses(fair) < losses(start)).all()
    # FedAvg ends in the middle, (3/2, 0), with the loss 2.5^2 / 2 of client 2, which began with 1. EUA ends at a Pareto
    # point that no round made worse for a client.
    np.testing.assert_allclose(rounds(fedavg, start, 200)[-1], [1.5, 0], atol=1e-6)
    path = rounds(partial(eua, step="constant", server_lr=0.2 * RATE), start, 100)
    assert (np.diff([losses(x) for x in path], axis=0) < 1e-9).all()
    assert abs(path[-1][1]) < 5e-3  # a sum below a thousandth of its terms is no direction
    assert -1 < path[-1][0] < sqrt(2) - 1  # where the loss of client 2 is below 1


def test_featarc_separates_two_domains_only_from_an_uneven_start():
    # Encoders of domain A are (1, 1, 1), of B (-1, 1, -1); features agree where signs do. Clients 0 to 2 are A, 3 to 5
    # B, and they start in the models k mod 2: 0 has A, A, B, with the mean (1/3, 1, 1/3), and 1 has A, B, B.
    client = SelectByFeatures(num_images=8)
    domains = {"A": torch.tensor([1.0, 1.0, 1.0]), "B": torch.tensor([-1.0, 1.0, -1.0])}

    def selected(domain: str, models: list) -> int:
        return client.select_model(
            Small(), models, {f"{LAST_ENCODER_PREFIX}encoder.weight": domains[domain]}, FakeImages()
        )

    uneven = [plan(1 / 3, 1, 1 / 3), plan(-1 / 3, 1, -1 / 3)]
    assert [selected(domain, uneven) for domain in "AAABBB"] == [0, 0, 0, 1, 1, 1]
    # Clients A, A, B, B: both models are the mean of A and B, (0, 1, 0), and every client stays where it is.
    even = [plan(0, 1, 0), plan(0, 1, 0)]
    assert {selected(domain, even) for domain in "AB"} == {0}


@pytest.mark.parametrize(
    ("predictor", "drift"), [("dapu", [0, 1, 2, 3, 0]), ("global", [0] * 5), ("local", [0, 1, 2, 3, 4])]
)
def test_dapu_keeps_a_drifting_predictor_until_the_encoder_rests(tmp_path, predictor, drift):
    # The predictors of two clients drift by 1 per round in opposite directions, so the global one stays. The encoder
    # moves much for three rounds, and little in the fourth, after which the client takes the global predictor.
    unit = 3 * (sqrt(2) + sqrt(8) + sqrt(32) + 8) / 4  # distance of kernels that move by 1, see test_fedu.py
    global_layers = some_layers(make_byol(), 1)
    for round, (step, expected) in enumerate(zip([0.5, 0.5, 0.5, 0.125, 0.5], drift, strict=True), start=1):
        tested = FedU(predictor=predictor, predictor_threshold=0.25 * unit)
        began, _, _ = participate(
            make_byol(), tested, make_plan(round, copy.deepcopy(global_layers)), tmp_path, step=step
        )
        for name in (name for name in began if name.startswith("predictor.") and name.endswith("weight")):
            np.testing.assert_allclose(began[name], global_layers[name] + expected, rtol=1e-6)


def test_stages_move_one_after_the_other_and_progressive_ones_together():
    torch.manual_seed(0)
    head = partial(MLP, hidden_dim=6, out_dim=4)
    method = SimCLR(conv_small(channels=1, size=8, width=2), projector=head, temperature=0.5)
    method.encoder.add_bridges()
    images = torch.rand(6, 1, 8, 8)

    def moved(depth: int, frozen: int) -> set[int]:
        before = {name: value.detach().clone() for name, value in method.named_parameters()}
        with set_active_stages(method, depth=depth, frozen=frozen):
            trained = [value for value in method.parameters() if value.requires_grad]
            inputs = method.encoder.forward_frozen([images], torch.Generator())[0] if frozen else images
            loss = method.encoder(inputs).square().sum()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for value, gradient in zip(trained, gradients, strict=True):
                value.sub_(0.1 * gradient if gradient is not None else 0)
        changed = [name for name, value in method.named_parameters() if not torch.equal(value, before[name])]
        return {int(name.split(".")[2]) for name in changed if name.startswith("encoder.blocks.")}

    assert [moved(stage, stage - 1) for stage in (1, 2, 3, 4)] == [{0}, {1}, {2}, {3}]
    assert [moved(stage, 0) for stage in (1, 2, 3, 4)] == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]
