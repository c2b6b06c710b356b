"""Several models at once: groups, a ring of neighbours, and a client that changes its model, through the real apps."""

import inspect

import numpy as np
import pytest

from fedssl.export import load_encoder
from fedssl.wire.messages import TrainPlan
from fedssl.wire.records import record_to_arrays
from server_app.checkpoint import latest_checkpoint
from server_app.messaging import receive
from server_app.round import Round
from simulation.run import run
from strategies.types import GLOBAL
from tests.arrays import same
from tests.federation import Federation, finish
from tests.server_app import algorithms

PLUGGED = ["strategy=median", "strategy.reported_metrics=[train-loss,num-examples]"]
TWO_GROUPS = [*PLUGGED, "strategy._target_=tests.server_app.algorithms.TwoGroups"]
RING = [*PLUGGED, "strategy._target_=tests.server_app.algorithms.Ring"]
FOUR = ["num_clients=4", "clients_per_round=4"]


def copied(layers):
    return {name: array.copy() for name, array in layers.items()}


@pytest.mark.parametrize("parts", [(algorithms.Groups, algorithms.TwoGroups), (algorithms.Neighbours, algorithms.Ring)])
def test_such_an_algorithm_takes_no_more_than_thirty_lines(parts):
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 30


def separately(folder, group, *, rounds, overrides):
    """Federated averaging in which nobody but the group takes part; the report and the model of every round."""
    federation = Federation(folder, "strategy=fedavg", *overrides)
    for _ in range(rounds):
        one = Round(federation.components.federation, federation.state)
        wanted = {federation.components.federation.nodes[client] for client in group}
        messages = [message for message in one.messages if message.metadata.dst_node_id in wanted]
        federation.state, report = finish(one, receive(federation.grid, messages, timeout=60))
        yield report, federation.state.models[GLOBAL].layers


def test_two_groups_are_two_separate_federations(tmp_path):
    overrides = [*FOUR, "method=byol", "server_optimizer=fedadam"]
    federation = Federation(tmp_path / "both", *TWO_GROUPS, *overrides)
    even = separately(tmp_path / "even", (0, 2), rounds=2, overrides=overrides)
    odd = separately(tmp_path / "odd", (1, 3), rounds=2, overrides=overrides)
    for expected in zip(even, odd, strict=True):
        federation.run(1)
        assert federation.state.model_names() == ["odd", "even"]  # the shorter name first
        assert federation.report.dropped == {}
        rows = federation.report.clients
        assert [(row.client, row.model) for row in rows] == [(0, "even"), (1, "odd"), (2, "even"), (3, "odd")]
        for (report, layers), name, members in zip(expected, ("even", "odd"), ((0, 2), (1, 3)), strict=True):
            assert same(federation.state.models[name].layers, layers)
            assert [row.client for row in report.clients] == list(members)
            for row in report.clients:  # relative to the model that the client itself had started from
                assert rows[row.client].cosine == row.cosine
                assert rows[row.client].loss == row.loss
    models = federation.state.models
    assert not same(models["even"].layers, models["odd"].layers)


def slow_cosine(one, other):
    one, other = one.astype(float).ravel(), other.astype(float).ravel()
    lengths = np.sqrt(one @ one) * np.sqrt(other @ other)
    return one @ other / lengths if lengths else 1.0


def test_models_on_a_ring_are_means_of_three(tmp_path):
    federation = Federation(tmp_path, *RING, "+strategy.clients=5", "num_clients=5", "method=byol")
    start = copied(federation.layers)
    expected = dict.fromkeys(range(5), start)
    for round in range(1, 4):
        federation.run(1)
        plans = [TrainPlan.from_content(content) for content in federation.plans[-5:]]
        sent = [record_to_arrays(content["arrays"]) for content in federation.updates[-5:]]
        for client, plan in enumerate(plans):
            for name, array in plan.layers.items():
                np.testing.assert_allclose(array, expected[client][name], rtol=1e-6, atol=1e-7, err_msg=name)
        for client, row in enumerate(federation.report.clients):
            assert (row.round, row.client, row.model) == (round, client, str(client))
            for name, cosine in row.cosine.items():
                assert cosine == pytest.approx(slow_cosine(plans[client].layers[name], sent[client][name]), abs=1e-6)
        for client in range(5):
            three = [sent[(client + step) % 5] for step in (-1, 0, 1)]
            means = {name: sum(one[name].astype(float) for one in three) / 3 for name in start}
            counters = {name for name in start if start[name].dtype.kind == "i"}
            expected[client] = {name: np.rint(mean) if name in counters else mean for name, mean in means.items()}
        assert federation.state.model_names() == ["0", "1", "2", "3", "4"]
        for client in range(5):
            for name, array in federation.state.models[str(client)].layers.items():
                np.testing.assert_allclose(array, expected[client][name], rtol=1e-6, atol=1e-7, err_msg=name)
                assert array.dtype == start[name].dtype
    assert not same(federation.state.models["0"].layers, federation.state.models["2"].layers)


# --- whole runs ---

QUICK = ["num_clients=3", "clients_per_round=2", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]


@pytest.fixture(scope="module", params=["groups", "ring"])
def whole(request, tmp_path_factory):
    """A run of four rounds, the words that make it, and the names of its models."""
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    kinds = {"groups": (TWO_GROUPS, ["odd", "even"]), "ring": ([*RING, "+strategy.clients=3"], ["0", "1", "2"])}
    plugged, names = kinds[request.param]
    overrides = [*QUICK, *plugged, "method=byol", "evaluate_every=2", "final_evaluation=knn", "partition=iid"]
    run([*overrides, "rounds=4", f"output_dir={folder}"])
    return folder, overrides, names


def test_the_files_of_a_run_are_by_model(whole):
    folder, _, names = whole
    state = latest_checkpoint(folder / "checkpoints")
    assert state.model_names() == names
    assert state.round == 4
    assert {file.name for file in folder.glob("encoder*.pt")} == {f"encoder-{name}.pt" for name in names}
    for name in names:
        encoder = load_encoder(folder / f"encoder-{name}.pt").state_dict()
        layers = state.models[name].layers
        assert all(np.array_equal(value.numpy(), layers[f"encoder.{key}"]) for key, value in encoder.items())
