"""Assignment of clients to models: distances, clustering by cosine, and selection on the client, by hand."""

import math

import numpy as np
import pytest
import torch

from fedssl.wire.messages import TrainPlan
from strategies.base import ServerStrategy
from strategies.cluster_assignment import (
    LAST_ENCODER_PREFIX,
    SelectByFeatures,
    SelectByLoss,
    ServerAssignedClusters,
    cluster_by_cosine,
    feature_distance,
)
from strategies.featarc import FeatARC
from strategies.fedavg import make_weighted_mean
from strategies.types import GLOBAL, GlobalModel, RoundOutcome, ServerState
from strategies.update_store import in_memory
from tests.server_app.small import LAYERS, Small


def test_feature_distance_by_hand():
    """Cosines 1, 0, -1 and 24 / 25 (of (3, 4) and (4, 3)): minus their mean is -0.24; a vector of length 0 counts 0."""
    one = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [3.0, 4.0]])
    other = torch.tensor([[5.0, 0.0], [3.0, 0.0], [-2.0, -2.0], [4.0, 3.0]])
    assert feature_distance(one, other) == pytest.approx(-0.96 / 4)
    assert feature_distance(one[:2], torch.zeros(2, 2)) == 0
    assert feature_distance(one, one) == pytest.approx(-1)


def delta(*numbers, statistics=0.0):
    statistics = np.array([statistics], np.float32)
    return {"encoder.weight": np.array(numbers, np.float32), "encoder.bn.running_mean": statistics}


def on_unit_circle(degrees):
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def test_updates_are_clustered_by_their_angles():
    """Two directions of any length. Statistics have no effect. Clusters are numbered by their first updates."""
    deltas = [delta(0, 3), delta(1, 0.1), delta(0.1, 1, statistics=99), delta(50, 1, statistics=-99), delta(-0.1, 0.5)]
    assert cluster_by_cosine(in_memory(deltas), clusters=2) == [0, 1, 0, 1, 0]
    assert cluster_by_cosine(in_memory(deltas[1:]), clusters=2) == [0, 1, 0, 1]
    statistics = [delta(1, 0, statistics=99), delta(1, 0, statistics=-99), delta(0, 1, statistics=99), delta(0, 1)]
    assert cluster_by_cosine(in_memory(statistics), clusters=2) == [0, 0, 1, 1]
    assert cluster_by_cosine(in_memory(deltas), clusters=1) == [0] * 5
    assert cluster_by_cosine(in_memory(deltas), clusters=5) == [0, 1, 2, 3, 4]
    assert cluster_by_cosine(in_memory(deltas[:1]), clusters=3) == [0]
    assert cluster_by_cosine(in_memory([delta(0, 0), delta(0, 1), delta(0, 2)]), clusters=2) == [0, 1, 1]


def test_average_linkage_by_hand():
    """At 0, 50, 90 and 139 degrees 90 joins 50 at 1 - cos 40 = 0.234.

    From these two 0 is at (0.357 + 1) / 2 = 0.679, and 139 at (1 - cos 89 + 1 - cos 49) / 2 = (0.983 + 0.344) / 2 =
    0.663: it joins, and 0 stays alone.
    """
    deltas = [delta(*on_unit_circle(angle)) for angle in (0, 50, 90, 139)]
    assert cluster_by_cosine(in_memory(deltas), clusters=3) == [0, 1, 1, 2]
    assert cluster_by_cosine(in_memory(deltas), clusters=2) == [0, 1, 1, 1]


class FakeImages:
    """Images whose features are the encoder's weights, each along a separate axis, and whose loss is their sum."""

    def features(self, method, max_images):
        return torch.diag(method.encoder.weight.detach())

    def loss(self, method, number):
        return float(method.encoder.weight.detach().sum())


def plan(*weights):
    layers = {**LAYERS, "encoder.weight": np.array(weights, dtype=np.float32)}
    return TrainPlan(round=2, layers=layers, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="x")


PLANS = [plan(-1, 1, 1), plan(1, 1, 1), plan(1, -1, -1)]


def test_client_selects_the_model_with_the_nearest_features():
    client, method = SelectByFeatures(num_images=8), Small()
    own = {f"{LAST_ENCODER_PREFIX}encoder.weight": torch.tensor([3.0, -1.0, -2.0])}
    assert client.select_model(method, PLANS, own, FakeImages()) == 2  # signs of all three agree
    nearer = {f"{LAST_ENCODER_PREFIX}encoder.weight": torch.tensor([3.0, 1.0, -2.0])}
    assert client.select_model(method, PLANS[:2], nearer, FakeImages()) == 1
    assert client.select_model(method, PLANS, None, FakeImages()) == 0
    other_state = {"encoder.weight": torch.ones(3)}
    assert client.select_model(method, PLANS, other_state, FakeImages()) == 0


def test_client_selects_the_model_with_the_smallest_loss():
    assert SelectByLoss(num_images=8).select_model(Small(), PLANS, None, FakeImages()) == 2
    assert SelectByLoss(num_images=8).select_model(Small(), [PLANS[1], PLANS[1]], None, FakeImages()) == 0


def test_the_server_compares_features():
    """Models see the axes (1, 0) and (0, 1).

    Clients at 30, 60 and 120 degrees are nearest to 0, 1 and 1, and one on the diagonal stays where it is.
    """
    server = ServerAssignedClusters(ServerStrategy(make_weighted_mean("uniform")), clusters=2, num_images=8)
    seen = {client: torch.tensor([on_unit_circle(angle)]) for client, angle in ((3, 30), (5, 60), (9, 120))}
    views = {"0": torch.tensor([[1.0, 0.0]]), "1": torch.tensor([[0.0, 1.0]])}
    state = ServerState(round=1, models={name: GlobalModel(layers={"name": name}) for name in views})
    seen[6] = torch.tensor([[1.0, 1.0]])
    names = {3: ("1",), 5: ("1",), 6: ("0",), 9: ("1",)}
    features = {"client_features": seen, "extract_features": lambda layers: views[layers["name"]]}
    outcome = RoundOutcome(round=1, destinations=names, bytes_up={}, **features)
    strategy_state, strategy_metrics = server.on_round_end(state, outcome)
    assert strategy_state == {"members": {3: "0", 5: "1", 6: "0", 9: "1"}}
    assert strategy_metrics == {"clusters": {"0": [3, 6], "1": [5, 9]}, "changed_cluster": 1}


def test_assignments_to_unknown_models_in_a_checkpoint_are_ignored():
    state = ServerState(round=1, strategy_state={"members": {0: "1", 1: "../7"}})
    assert [FeatARC(clusters=2).server.starting_model(state, 2, client) for client in (0, 1, 2)] == ["1", "1", "0"]
    assert FeatARC(clusters=1).server.starting_model(state, 2, 0) == GLOBAL
