"""Several models that clients share: distances and divisions by hand, and runs beside federated averaging and alone."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fedssl.errors import InputError
from fedssl.schedule.stages import set_active_stages
from fedssl.wire.messages import ARRAYS, REPLY_CONFIG, ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.checkpoint import latest_checkpoint
from server_app.messaging import MessageExchange, receive
from server_app.round import Round
from server_app.training_loop import run_round
from simulation.cli import run
from simulation.grid import LocalGrid
from strategies.base import ServerStrategy
from strategies.cluster_assignment import (
    ASSIGNMENTS,
    LAST_ENCODER_PREFIX,
    SelectByFeatures,
    SelectByLoss,
    ServerAssignedClusters,
    argmin,
    cluster_by_cosine,
    feature_distance,
)
from strategies.clustered import Clustered
from strategies.eua import eua
from strategies.featarc import FeatARC
from strategies.fedavg import mean
from strategies.interfaces import GlobalModel, RoundOutcome, ServerState
from tests.federation import Federation
from tests.server_app.small import LAYERS, Small, small_federation
from tests.server_app.test_round import good, make_grid

FEATARC = ["strategy=featarc", "strategy.num_images=16"]
IFCA = ["strategy=clustered", "strategy.num_images=16"]
SORTED = ["strategy=clustered", "strategy.assign_by=update_cosine"]
AVERAGE = ["strategy=fedavg", "strategy.weighting=uniform"]


def same(one, other):
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


# --- distances and divisions ---


def test_the_distance_of_features_by_hand():
    """Cosines 1, 0, -1 and 24 / 25 (of (3, 4) and (4, 3)): minus their mean is -0.24; a vector of length 0 counts 0."""
    one = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [3.0, 4.0]])
    other = torch.tensor([[5.0, 0.0], [3.0, 0.0], [-2.0, -2.0], [4.0, 3.0]])
    assert feature_distance(one, other) == pytest.approx(-0.96 / 4)
    assert feature_distance(one[:2], torch.zeros(2, 2)) == 0
    assert feature_distance(one, one) == pytest.approx(-1)


def test_the_nearest_is_the_first_of_equals():
    assert argmin([0.5, -0.5, -0.5]) == 1
    assert argmin([math.nan, 0.9, math.nan]) == 1  # whose representations are no numbers, is nobody's
    assert argmin([math.nan, math.nan]) == 0


def way(*numbers, statistics=0.0):
    return {
        "encoder.weight": np.array(numbers, dtype=np.float32),
        "encoder.bn.running_mean": np.array([statistics], dtype=np.float32),
    }


def on_circle(degrees):
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def test_updates_are_divided_by_their_angles():
    """Two directions, of any length; what statistics do is no matter; numbers follow the first of each cluster."""
    ways = [way(0, 3), way(1, 0.1), way(0.1, 1, statistics=99), way(50, 1, statistics=-99), way(-0.1, 0.5)]
    assert cluster_by_cosine(ways, clusters=2) == [0, 1, 0, 1, 0]
    assert cluster_by_cosine(ways[1:], clusters=2) == [0, 1, 0, 1]
    statistics = [way(1, 0, statistics=99), way(1, 0, statistics=-99), way(0, 1, statistics=99), way(0, 1)]
    assert cluster_by_cosine(statistics, clusters=2) == [0, 0, 1, 1]
    assert cluster_by_cosine(ways, clusters=1) == [0] * 5
    assert cluster_by_cosine(ways, clusters=5) == [0, 1, 2, 3, 4]
    assert cluster_by_cosine(ways[:1], clusters=3) == [0]
    assert cluster_by_cosine([way(0, 0), way(0, 1), way(0, 2)], clusters=2) == [0, 1, 1]


def test_average_linkage_by_hand():
    """At 0, 50, 90 and 139 degrees 90 joins 50 at 1 - cos 40 = 0.234.

    From these two 0 is at (0.357 + 1) / 2 = 0.679, and 139 at (1 - cos 89 + 1 - cos 49) / 2 = (0.983 + 0.344) / 2 =
    0.663: it joins, and 0 stays alone.
    """
    ways = [way(*on_circle(angle)) for angle in (0, 50, 90, 139)]
    assert cluster_by_cosine(ways, clusters=3) == [0, 1, 1, 2]
    assert cluster_by_cosine(ways, clusters=2) == [0, 1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_who_clients_are_changes_no_division(seed):
    rng = np.random.default_rng(seed)
    ways = [way(*row) for row in rng.normal(size=(7, 6))]
    order = rng.permutation(7)
    places = cluster_by_cosine(ways, clusters=3)
    permuted = cluster_by_cosine([ways[place] for place in order], clusters=3)
    groups = {frozenset(np.flatnonzero(np.array(places) == one)) for one in range(3)}
    assert groups == {frozenset(order[np.flatnonzero(np.array(permuted) == one)]) for one in range(3)}


# --- choosing at the client ---


class FakeImages:
    """Images of which an encoder makes its weights, each along an axis of its own, and a method a loss: their sum."""

    def features(self, method, max_images):
        return torch.diag(method.encoder.weight.detach())

    def loss(self, method, number):
        return float(method.encoder.weight.detach().sum())


def plan(*weights):
    layers = {**LAYERS, "encoder.weight": np.array(weights, dtype=np.float32)}
    return TrainPlan(round=2, layers=layers, settings="", metrics=(), oldest_resumable_round=0, code_fingerprint="x")


PLANS = [plan(-1, 1, 1), plan(1, 1, 1), plan(1, -1, -1)]


def test_a_client_takes_the_model_that_sees_as_its_own_last_one_did():
    half, method = SelectByFeatures(num_images=8), Small()
    own = {f"{LAST_ENCODER_PREFIX}encoder.weight": torch.tensor([3.0, -1.0, -2.0])}
    assert half.select_model(method, PLANS, own, FakeImages()) == 2  # signs of all three agree
    assert (
        half.select_model(
            method, PLANS[:2], {f"{LAST_ENCODER_PREFIX}encoder.weight": torch.tensor([3.0, 1.0, -2.0])}, FakeImages()
        )
        == 1
    )
    assert half.select_model(method, PLANS, None, FakeImages()) == 0
    assert (
        half.select_model(method, PLANS, {"encoder.weight": torch.ones(3)}, FakeImages()) == 0
    )  # kept for something else


def test_what_of_the_encoder_is_new_does_not_depend_on_what_a_process_held_before():
    class Shifted(FakeImages):
        def features(self, method, max_images):
            return super().features(method, max_images) + method.encoder.bn.running_mean

    half, own = (
        SelectByFeatures(num_images=8),
        {f"{LAST_ENCODER_PREFIX}encoder.weight": torch.tensor([3.0, -1.0, -2.0])},
    )
    for held in (0.0, 50.0, math.nan):
        method = Small()
        method.encoder.bn.running_mean.fill_(held)
        assert half.select_model(method, PLANS, own, Shifted()) == 2


def test_a_client_takes_the_model_with_the_least_loss():
    assert SelectByLoss(num_images=8).select_model(Small(), PLANS, None, FakeImages()) == 2
    assert SelectByLoss(num_images=8).select_model(Small(), [PLANS[1], PLANS[1]], None, FakeImages()) == 0


# --- what travels ---


def played(state, *chosen):
    """A round of averaging by loss with two models, in which clients say that they took these; None: they do not."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        plan, client = TrainPlan.from_content(message.content), context.node_config["partition-id"]
        took = chosen[client] if chosen[client] in (0, 1) else 0
        layers = {
            name: array + np.float32(1 + client) for name, array in (plan.layers, *plan.candidate_arrays)[took].items()
        }
        content = ClientUpdate(layers=layers, partition_id=client, num_examples=1, model_index=took).to_content(plan)
        if chosen[client] is None:
            del content[REPLY_CONFIG]["model-index"]
        else:
            content[REPLY_CONFIG]["model-index"] = chosen[client]
        return Message(content, reply_to=message)

    grid = LocalGrid(app, num_clients=len(chosen))
    one = Round(small_federation(grid, Clustered(num_images=2)), state)
    return one, one.finish(receive(grid, one.messages, timeout=60))


def model(weight):
    layers = {"encoder.weight": np.array(weight, dtype=np.float32), "encoder.bn.running_mean": np.zeros(1, np.float32)}
    return GlobalModel(layers=layers, num_updates=1)


STATE = ServerState(
    round=1, models={"0": model([1, 0, 0]), "1": model([0, 1, 0])}, strategy_state={ASSIGNMENTS: {0: "1", 3: "0"}}
)


def test_an_update_goes_into_the_model_that_the_client_took():
    """Clients 0 and 3 are known at models 1 and 0, clients 1 and 2 are not and are dealt 1 and 0. Client 1 takes the
    second that it got, which is model 0. So 0 becomes the mean of [1, 0, 0] + 2, + 3 and + 4, and 1 is [0, 1, 0] + 1.
    """
    one, (state, report) = played(STATE, 0, 1, 0, 0)
    assert [row.model for row in report.clients] == ["1", "0", "0", "0"]
    assert state.models["0"].layers["encoder.weight"].tolist() == [4, 3, 3]
    assert state.models["1"].layers["encoder.weight"].tolist() == [1, 2, 1]
    assert state.strategy_state == {ASSIGNMENTS: {0: "1", 1: "0", 2: "0", 3: "0"}}
    assert report.strategy_metrics["clusters"] == {"0": [1, 2, 3], "1": [0]}
    assert report.strategy_metrics["changed_cluster"] == 1
    assert all(len(message.content.array_records) == 3 for message in one.messages)  # two models, and what is shared
    single = Round(small_federation(make_grid([good]), Clustered(clusters=1)), ServerState()).messages[0].content
    more = {content_bytes(message.content) - content_bytes(single) for message in one.messages}
    assert len(more) == 1
    assert more.pop() > sum(array.nbytes for array in LAYERS.values())
    assert {row.bytes_down for row in report.clients} == {content_bytes(one.messages[0].content)}


def test_a_model_that_nobody_takes_stays():
    _, (state, report) = played(STATE, 0, 0)
    assert [row.model for row in report.clients] == ["1", "1"]
    assert state.models["0"] is STATE.models["0"]


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (None, "record 'model-index' is missing"),
        (2, "it selected model 2 of 2"),
        (-1, "-1 instead of an integer"),
        (0.5, "0.5 instead of an integer"),
        ("0", "0 instead of a number"),
    ],
)
def test_a_choice_that_cannot_be_drops_the_update(chosen, reason):
    _, (state, report) = played(STATE, chosen, 0)
    assert list(report.dropped) == [0]
    assert reason in report.dropped[0]
    assert state.strategy_state[ASSIGNMENTS] == {0: "1", 1: "1", 3: "0"}


def test_models_of_a_plan_arrive_as_they_were_sent():
    sent = TrainPlan(
        round=1,
        layers=LAYERS,
        candidate_arrays=(PLANS[0].layers, PLANS[2].layers),
        settings="",
        metrics=(),
        oldest_resumable_round=0,
        code_fingerprint="x",
    )
    arrived = TrainPlan.from_content(sent.to_content())
    assert len(arrived.candidate_arrays) == 2
    assert all(same(one, other) for one, other in zip(arrived.candidate_arrays, sent.candidate_arrays, strict=True))
    without = sent.to_content()
    del without[f"{ARRAYS}-1"]
    without["else"] = ArrayRecord()
    with pytest.raises(KeyError):
        TrainPlan.from_content(without)


# --- choosing at the server ---


def test_the_server_compares_what_models_see():
    """Models see the axes (1, 0) and (0, 1).

    Clients at 30, 60 and 120 degrees are nearest to 0, 1 and 1, and one on the diagonal stays where it is.
    """
    half = ServerAssignedClusters(ServerStrategy(mean("uniform")), clusters=2, num_images=8)
    seen = {client: torch.tensor([on_circle(angle)]) for client, angle in ((3, 30), (5, 60), (9, 120))}
    views = {"0": torch.tensor([[1.0, 0.0]]), "1": torch.tensor([[0.0, 1.0]])}
    state = ServerState(round=1, models={name: GlobalModel(layers={"name": name}) for name in views})
    seen[6] = torch.tensor([[1.0, 1.0]])
    names = {3: ("1",), 5: ("1",), 6: ("0",), 9: ("1",)}
    outcome = RoundOutcome(
        round=1,
        destinations=names,
        bytes_up={},
        client_features=seen,
        extract_features=lambda layers: views[layers["name"]],
    )
    memory, strategy_metrics = half.on_round_end(state, outcome)
    assert memory == {ASSIGNMENTS: {3: "0", 5: "1", 6: "0", 9: "1"}}
    assert strategy_metrics == {"clusters": {"0": [3, 6], "1": [5, 9]}, "changed_cluster": 1}


def test_a_run_with_the_choice_at_the_server(tmp_path):
    federation = Federation(tmp_path, *FEATARC, "strategy.assign_at=server")
    federation.run(1)
    assert sorted(federation.state.models) == ["0", "1"]
    assert federation.state.strategy_state[ASSIGNMENTS].keys() == set(range(5))
    assert all(len(plan.array_records) == 2 for plan in federation.plans)  # one model and what is shared
    assert all("model-index" not in update[REPLY_CONFIG] for update in federation.updates)


# --- sorted once ---


def test_updates_are_sorted_in_their_round_and_clients_stay(tmp_path):
    def two_ways(layers, partition):
        step = np.array([1, 0, 0] if partition in (0, 3) else [0, 1, 0], dtype=np.float32)
        return {**layers, "encoder.weight": layers["encoder.weight"] + step * (1 + partition)}

    grid = make_grid([two_ways] * 5)
    federation = small_federation(grid, Clustered(assign_by="update_cosine", weighting="uniform", cluster_round=2))
    state, exchange = ServerState(), MessageExchange(grid)
    state, _ = run_round(exchange, lambda: federation, state)
    # Steps of 1 and 4 along x, of 2, 3 and 5 along y: the mean is [1, 2, 0] from [1, 2, 2].
    assert list(state.models) == ["0"]
    assert state.models["0"].layers["encoder.weight"].tolist() == [2, 4, 2]
    assert state.strategy_state == {}
    state, report = run_round(exchange, lambda: federation, state)
    assert state.strategy_state == {ASSIGNMENTS: {0: "0", 1: "1", 2: "1", 3: "0", 4: "1"}}
    assert state.models["0"].layers["encoder.weight"].tolist() == [4.5, 4, 2]
    assert state.models["1"].layers["encoder.weight"].tolist() == pytest.approx([2, 4 + 10 / 3, 2])
    assert {row.client: row.model for row in report.clients} == dict.fromkeys(range(5), "0")  # where they started
    state, report = run_round(exchange, lambda: federation, state)
    assert {row.client: row.model for row in report.clients} == state.strategy_state[ASSIGNMENTS]
    assert federation.strategy.server.starting_model(state, 4, 77) == "1"  # a newcomer goes where most are


def test_clusters_begin_with_the_model_that_their_clients_came_from():
    """EUA weighs deviations from where clients started, which is the model of round 1 in both clusters of round 2."""
    steps = np.array([[1, 0, 0], [1, 0.5, 0], [0, 0, 1], [0, 0.2, 3]], dtype=np.float32)

    def step(layers, partition):
        return {**layers, "encoder.weight": layers["encoder.weight"] + steps[partition]}

    grid = make_grid([step] * 4)
    federation = small_federation(grid, Clustered(assign_by="update_cosine", rule="eua", cluster_round=2))
    first, _ = run_round(MessageExchange(grid), lambda: federation, ServerState())
    second, _ = run_round(MessageExchange(grid), lambda: federation, first)
    begun = first.models["0"].layers
    for name, members in (("0", (0, 1)), ("1", (2, 3))):
        updates = [ClientUpdate(layers=step(begun, client), partition_id=client) for client in members]
        assert same(second.models[name].layers, eua(begun, updates))


# --- whole runs ---


def test_one_model_is_federated_averaging(tmp_path):
    averaged = Federation(tmp_path / "average", *AVERAGE)
    expected = averaged.run(2)
    for name, overrides in {"featarc": [*FEATARC, "regularizer=none"], "ifca": IFCA, "sorted": SORTED}.items():
        extra = [] if name == "featarc" else ["strategy.weighting=uniform"]
        federation = Federation(tmp_path / name, *overrides, "strategy.clusters=1", *extra)
        assert same(federation.run(2), expected)
        assert federation.state.strategy_state == {}
        assert federation.plans[0][ARRAYS].keys() == averaged.plans[0][ARRAYS].keys()
        assert len(federation.plans[0].array_records) == len(averaged.plans[0].array_records)


@pytest.mark.parametrize(
    ("overrides", "schedule"),
    [(FEATARC, "progressive"), (IFCA, "layer_wise"), ([*FEATARC, "strategy.assign_at=server"], "progressive")],
)
def test_clusters_grow_by_stages(tmp_path, overrides, schedule):
    federation = Federation(tmp_path, *overrides, f"schedule={schedule}", "rounds=4", "num_clients=3", "threads=1")
    for round in range(4):
        with set_active_stages(federation.method, depth=round + 1):  # as the server does
            federation.run(1)
    assert federation.report.dropped == {}
    assert federation.state.strategy_state[ASSIGNMENTS].keys() == {0, 1, 2}


def test_newcomers_are_not_sorted(tmp_path):
    federation = Federation(tmp_path, *SORTED, "unseen_clients=1", "clients_per_round=4")
    federation.run(1)
    assert federation.state.strategy_state[ASSIGNMENTS].keys() == {0, 1, 2, 3}


def test_a_model_for_each_client_is_every_client_alone(tmp_path):
    alone = Federation(tmp_path / "alone", "strategy=local_only", "num_clients=3")
    alone.run(3)
    overrides = [*FEATARC, "strategy.clusters=3", "num_clients=3", "regularizer=none"]
    for place in ("client", "server"):
        federation = Federation(tmp_path / place, *overrides, f"strategy.assign_at={place}")
        federation.run(3)
        for name, one in alone.state.models.items():
            assert same(federation.state.models[name].layers, one.layers)


@pytest.mark.parametrize(
    "overrides",
    [
        FEATARC,
        *(
            pytest.param(some, marks=pytest.mark.heavy)
            for some in (SORTED, IFCA, [*FEATARC, "strategy.assign_at=server"])
        ),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, overrides):
    quick = ["num_clients=4", "local_epochs=1", "dataset.limit=80", "encoder.width=4", "threads=1", "evaluate_every=0"]
    quick += ["final_evaluation=none", "method=byol", "measure_resources=false", "engine=local", *overrides]
    run([*quick, "rounds=3", f"output_dir={tmp_path / 'whole'}"])
    run([*quick, "rounds=1", f"output_dir={tmp_path / 'cut'}"])
    run([f"resume={tmp_path / 'cut'}", "rounds=3"])
    found = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    for one, other in zip(found, again, strict=True):
        assert (one["loss"], one["strategy_metrics"]) == (other["loss"], other["strategy_metrics"])
    assert found[-1]["strategy_metrics"].keys() == {"clusters", "changed_cluster"}
    one, other = (latest_checkpoint(tmp_path / part / "checkpoints") for part in ("whole", "cut"))
    assert one.strategy_state == other.strategy_state
    assert one.models.keys() == other.models.keys()
    assert all(same(model.layers, other.models[name].layers) for name, model in one.models.items())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["strategy=featarc", "strategy.clusters=0"], "strategy.clusters=0 must be at least 1"),
        (["strategy=featarc", "strategy.clusters=6"], "strategy.clusters=6 but num_clients=5; give at most one"),
        (["strategy=featarc", "strategy.num_images=1"], "strategy.num_images=1 must be at least 2"),
        (["strategy=featarc", "strategy.assign_at=moon"], "strategy.assign_at=moon is not a choice"),
        (["strategy=featarc", "method=orchestra"], "Orchestra has a server side of its own for one model"),
        (["strategy=featarc", "calibration=auxiliary"], "calibration=auxiliary trains the one model"),
        (["strategy=clustered", "strategy.assign_by=x"], "strategy.assign_by=x is not a choice"),
        (["strategy=clustered", "strategy.rule=x"], "strategy.rule=x is not a choice"),
        (
            ["strategy=clustered", "strategy.rule=eua", "strategy.weighting=uniform"],
            "strategy.rule=eua has no weighting",
        ),
        ([*SORTED, "strategy.cluster_round=0"], "strategy.cluster_round=0 must be the number of a round"),
        (
            [*SORTED, "strategy.cluster_round=30"],
            "strategy.cluster_round=30 is the round in which clients are sorted, and there are",
        ),
        ([*SORTED, "clients_per_round=3"], "sorts all clients in round 1, but clients_per_round=3 of num_clients=5"),
        (
            ["strategy=featarc", "secure_aggregation=secagg_plus"],
            "secure_aggregation=secagg_plus needs clients that all send and receive",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_before_the_start(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        Federation(tmp_path, *overrides).run(1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "memory", [{"else": {}}, {ASSIGNMENTS: []}, {ASSIGNMENTS: {0: "7"}}, {ASSIGNMENTS: {"0": "0"}}]
)
def test_a_memory_of_something_else_is_not_recalled(memory):
    server = FeatARC().server
    assert server.is_valid_strategy_state({})
    assert server.is_valid_strategy_state({ASSIGNMENTS: {0: "0", 7: "1"}})
    assert not server.is_valid_strategy_state(memory)
    assert not FeatARC(clusters=1).server.is_valid_strategy_state({ASSIGNMENTS: {0: "1"}})
