"""Rounds and runs with several models, compared with federated averaging and with clients that train alone."""

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedssl.errors import InputError
from fedssl.schedule.stages import set_active_stages
from fedssl.wire.messages import REPLY_CONFIG, ClientUpdate, TrainPlan
from fedssl.wire.records import content_bytes
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.messaging import receive
from server_app.round import Round
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from strategies.clustered import Clustered
from strategies.types import GlobalModel, ServerState
from tests.arrays import same
from tests.federation import Federation, finish
from tests.server_app.small import LAYERS, small_federation
from tests.server_app.test_round import good, make_grid

FEATARC = ["strategy=featarc", "strategy.num_images=16"]
IFCA = ["strategy=clustered", "strategy.num_images=16"]
ONE_SHOT = ["strategy=clustered", "strategy.assign_by=update_cosine"]


def played(state, *chosen):
    """A round of averaging by loss with two models, in which clients say that they took these; None: they do not."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        plan, client = TrainPlan.from_content(message.content), context.node_config["partition-id"]
        took = chosen[client] if chosen[client] in (0, 1) else 0
        arrays = (plan.layers, *plan.candidate_arrays)[took]
        layers = {name: array + np.float32(1 + client) for name, array in arrays.items()}
        content = ClientUpdate(layers=layers, partition_id=client, num_examples=1, model_index=took).to_content(plan)
        if chosen[client] is None:
            del content[REPLY_CONFIG]["model-index"]
        else:
            content[REPLY_CONFIG]["model-index"] = chosen[client]
        return Message(content, reply_to=message)

    grid = LocalGrid(app, num_clients=len(chosen))
    one = Round(small_federation(grid, Clustered(num_images=2)), state)
    return one, finish(one, receive(grid, one.messages, timeout=60))


def model(weight):
    layers = {"encoder.weight": np.array(weight, dtype=np.float32), "encoder.bn.running_mean": np.zeros(1, np.float32)}
    return GlobalModel(layers=layers, num_updates=1)


MODELS = {"0": model([1, 0, 0]), "1": model([0, 1, 0])}
STATE = ServerState(round=1, models=MODELS, strategy_state={"members": {0: "1", 3: "0"}})


def test_an_update_is_aggregated_into_the_selected_model():
    """Clients 0 and 3 are known at models 1 and 0, clients 1 and 2 are not and are dealt 1 and 0. Client 1 takes the
    second that it got, which is model 0. So 0 becomes the mean of [1, 0, 0] + 2, + 3 and + 4, and 1 is [0, 1, 0] + 1.
    """
    one, (state, report) = played(STATE, 0, 1, 0, 0)
    assert [row.model for row in report.clients] == ["1", "0", "0", "0"]
    assert state.models["0"].layers["encoder.weight"].tolist() == [4, 3, 3]
    assert state.models["1"].layers["encoder.weight"].tolist() == [1, 2, 1]
    assert state.strategy_state == {"members": {0: "1", 1: "0", 2: "0", 3: "0"}}
    assert report.strategy_metrics["clusters"] == {"0": [1, 2, 3], "1": [0]}
    assert report.strategy_metrics["changed_cluster"] == 1
    assert all(len(message.content.array_records) == 3 for message in one.messages)  # two models, and what is shared
    single = Round(small_federation(make_grid([good]), Clustered(clusters=1)), ServerState()).messages[0].content
    more = {content_bytes(message.content) - content_bytes(single) for message in one.messages}
    assert len(more) == 1
    assert more.pop() > sum(array.nbytes for array in LAYERS.values())
    assert {row.bytes_down for row in report.clients} == {content_bytes(one.messages[0].content)}


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
def test_an_invalid_selection_drops_the_update(chosen, reason):
    _, (state, report) = played(STATE, chosen, 0)
    assert list(report.dropped) == [0]
    assert reason in report.dropped[0]
    assert state.strategy_state["members"] == {0: "1", 1: "1", 3: "0"}


# --- one-shot clustering ---


def test_updates_are_clustered_once():
    def two_ways(layers, partition):
        step = np.array([1, 0, 0] if partition in (0, 3) else [0, 1, 0], dtype=np.float32)
        return {**layers, "encoder.weight": layers["encoder.weight"] + step * (1 + partition)}

    grid = make_grid([two_ways] * 5)
    federation = small_federation(grid, Clustered(assign_by="update_cosine", weighting="uniform", cluster_round=2))
    state, exchange = ServerState(), WallClockExchange(grid)
    state, _ = run_round(exchange, lambda: federation, state)
    # Steps of 1 and 4 along x, of 2, 3 and 5 along y: the mean is [1, 2, 0] from [1, 2, 2].
    assert list(state.models) == ["0"]
    assert state.models["0"].layers["encoder.weight"].tolist() == [2, 4, 2]
    assert state.strategy_state == {}
    state, report = run_round(exchange, lambda: federation, state)
    assert state.strategy_state == {"members": {0: "0", 1: "1", 2: "1", 3: "0", 4: "1"}}
    assert state.models["0"].layers["encoder.weight"].tolist() == [4.5, 4, 2]
    assert state.models["1"].layers["encoder.weight"].tolist() == pytest.approx([2, 4 + 10 / 3, 2])
    assert {row.client: row.model for row in report.clients} == dict.fromkeys(range(5), "0")  # where they started
    state, report = run_round(exchange, lambda: federation, state)
    assert {row.client: row.model for row in report.clients} == state.strategy_state["members"]
    assert federation.strategy.server.starting_model(state, 4, 77) == "1"  # a newcomer goes where most are


@pytest.mark.parametrize(
    ("overrides", "schedule"), [(IFCA, "layer_wise"), ([*FEATARC, "strategy.assign_at=server"], "progressive")]
)
def test_clusters_grow_by_stages(tmp_path, overrides, schedule):
    federation = Federation(tmp_path, *overrides, f"schedule={schedule}", "rounds=4", "num_clients=3", "threads=1")
    for round in range(4):
        with set_active_stages(federation.method, depth=round + 1):  # as the server does
            federation.run(1)
    assert federation.report.dropped == {}
    assert federation.state.strategy_state["members"].keys() == {0, 1, 2}


@pytest.mark.heavy
def test_a_model_per_client_equals_local_training(tmp_path):
    alone = Federation(tmp_path / "alone", "strategy=local_only", "num_clients=3")
    alone.run(2)
    overrides = [*FEATARC, "strategy.clusters=3", "num_clients=3", "regularizer=none"]
    for place in ("client", "server"):
        federation = Federation(tmp_path / place, *overrides, f"strategy.assign_at={place}")
        federation.run(2)
        for name, one in alone.state.models.items():
            assert same(federation.state.models[name].layers, one.layers)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"cluster_round": 2}, "strategy.cluster_round=2 has no effect on strategy.assign_by=loss"),
        (
            {"assign_by": "update_cosine", "num_images": 7},
            "strategy.num_images=7 has no effect on strategy.assign_by=up",
        ),
        ({"num_images": 7}, ""),
    ],
)
def test_an_option_of_the_other_assignment_is_a_warning(caplog, options, warning):
    Clustered(**options)
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["strategy=featarc", "strategy.clusters=4"], "strategy.clusters=4 but num_clients=3; give at most one"),
        (["strategy=featarc", "method=orchestra"], "Orchestra has a server side of its own for one model"),
        (["strategy=featarc", "calibration=auxiliary"], "calibration=auxiliary trains the one model"),
        (
            ["strategy=clustered", "strategy.rule=eua", "strategy.weighting=uniform"],
            "strategy.rule=eua has no weighting",
        ),
        (
            ["strategy=clustered", "strategy.rule=m_dawa", "strategy.weighting=uniform"],
            "strategy.rule=m_dawa has no weighting",
        ),
        (
            [*ONE_SHOT, "strategy.cluster_round=30"],
            "strategy.cluster_round=30 is the round in which clients are sorted, and there are",
        ),
        ([*ONE_SHOT, "clients_per_round=2"], "sorts all clients in round 1, but clients_per_round=2 of num_clients=3"),
        (
            ["strategy=featarc", "secure_aggregation=secagg_plus", "secure_aggregation.dropout_fraction=0"],
            "secure_aggregation=secagg_plus needs clients that all send and receive",
        ),
    ],
)
def test_invalid_settings_are_refused_before_the_first_round(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        Federation(tmp_path, *overrides).run(1)
    assert "\n" not in str(caught.value)
