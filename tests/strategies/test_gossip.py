"""Neighbours that mix their models: weights by hand, the rate at which differences shrink, and who is missing."""

import math

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.errors import InputError
from server_app.messaging import receive
from server_app.round import Round
from strategies.gossip import Gossip, consensus_distance
from strategies.topology import make_graph, metropolis_weights, second_eigenvalue, weight_matrix
from strategies.types import GlobalModel, ServerState
from tests.contexts import run_context
from tests.federation import Federation, finish
from tests.server_app.small import LAYERS, small_federation
from tests.server_app.test_round import crash, good, make_grid


def stay(layers, partition):
    return layers


def played(strategy, behaviours, state=None, *, number=1, **options):
    """So many rounds among clients that behave in these ways; the state, and the report of the last."""
    grid = make_grid(behaviours)
    federation = small_federation(grid, strategy, **options)
    context = run_context(federation.context.method, clients_per_round=1, num_clients=len(behaviours), seed=3)
    strategy.server.prepare(context)
    state = state or ServerState()
    for _ in range(number):
        one = Round(federation, state)
        state, report = finish(one, receive(grid, one.messages, timeout=60))
    return state, report


def one_model(weight):
    return GlobalModel(layers={**LAYERS, "encoder.weight": np.asarray(weight, np.float32)})


def vectors(state):
    return {name: model.layers["encoder.weight"].tolist() for name, model in state.models.items()}


def path(tmp_path):
    file = tmp_path / "path.txt"
    file.write_text("0 1\n1 2\n")
    return str(file)


def test_a_path_of_three_by_hand(tmp_path):
    """Degrees 1, 2, 1: weights of 1/3 between neighbours, so that the ends keep 2/3 and the middle 1/3 of their own.

    From [1, 2, 2] clients 0, 1 and 2 come to [1, 2, 2], [2, 3, 3] and [3, 4, 4]; 0 mixes 2/3 of the first and 1/3 of
    the second, 1 a third of each, 2 a third of the second and 2/3 of the last.
    """
    state, report = played(Gossip(topology="file", file=path(tmp_path)), [good] * 3)
    expected = {"0": [4 / 3, 7 / 3, 7 / 3], "1": [2, 3, 3], "2": [8 / 3, 11 / 3, 11 / 3]}
    assert vectors(state) == {name: pytest.approx(numbers) for name, numbers in expected.items()}
    statistics = [state.models[name].layers["encoder.bn.running_mean"][0] for name in ("0", "1", "2")]
    assert statistics == pytest.approx([0.5 + 1 / 3, 1.5, 0.5 + 5 / 3])
    sent = {row.client: row.bytes_up for row in report.clients}
    assert report.strategy_metrics["edges"] == 2
    assert report.strategy_metrics["bytes_over_edges"] == (sent[0] + sent[1]) + (sent[1] + sent[2])
    # Of [4/3, 7/3, 7/3], [2, 3, 3], [8/3, 11/3, 11/3] the mean is [2, 3, 3]; two are 2/3 away in each of 3 numbers.
    assert report.strategy_metrics["consensus_distance"] == pytest.approx(math.sqrt(2 * 3 * 4 / 9 / 3 / 22))


def test_without_a_neighbour_its_weight_stays_at_home(tmp_path):
    """Client 2 fails: 0 and 1 mix as before, and what 1 would have given to 2 it keeps: 1/3 of 0 and 2/3 of itself."""
    before = {"2": one_model([9, 9, 9])}
    state, report = played(
        Gossip(topology="file", file=path(tmp_path)), [good, good, crash], ServerState(round=1, models=before)
    )
    ends = [[4 / 3, 7 / 3, 7 / 3], [5 / 3, 8 / 3, 8 / 3]]
    assert vectors(state) == {"2": [9, 9, 9], "0": pytest.approx(ends[0]), "1": pytest.approx(ends[1])}
    assert report.strategy_metrics["edges"] == 1


@pytest.mark.parametrize("topology", ["ring", "grid", "complete", "random_regular"])
@pytest.mark.parametrize("asked", [7, 4])
def test_the_mean_of_all_models_never_changes_by_mixing(topology, asked):
    rng = np.random.default_rng(0)
    models = {str(k): one_model(rng.normal(size=3)) for k in range(7)}
    gossip = Gossip(topology=topology, degree=4 if topology == "random_regular" else None)
    state, _ = played(gossip, [stay] * 7, ServerState(models=models), number=4, clients_per_round=asked)
    before, after = (
        np.mean([model.layers["encoder.weight"] for model in one.values()], axis=0) for one in (models, state.models)
    )
    assert after == pytest.approx(before, abs=1e-6)
    assert consensus_distance([GlobalLayers(model.layers) for model in state.models.values()]) < consensus_distance(
        [GlobalLayers(model.layers) for model in models.values()]
    )


def test_differences_shrink_by_the_second_eigenvalue():
    """In the long run the slowest direction is left, which every round multiplies by the second eigenvalue."""
    graph = make_graph("random_regular", 9, seed=3, degree=4)
    rate = second_eigenvalue(weight_matrix(metropolis_weights(graph)))
    rng = np.random.default_rng(1)
    models = {str(k): one_model(rng.normal(size=3)) for k in range(9)}
    gossip = Gossip(topology="random_regular", degree=4)
    state = ServerState(models=models)
    distances = []
    for number in (8, 4):
        state, _ = played(gossip, [stay] * 9, state, number=number)
        weights = np.array([model.layers["encoder.weight"] for model in state.models.values()], dtype=np.float64)
        distances.append(float(np.linalg.norm(weights - weights.mean(axis=0))))
    assert (distances[1] / distances[0]) ** (1 / 4) == pytest.approx(rate, rel=0.05)


def test_a_run_and_its_figure(tmp_path):
    federation = Federation(tmp_path, "strategy=gossip", "method=byol")
    federation.run(2)
    assert sorted(federation.state.models) == [str(client) for client in range(3)]
    federation.strategy.server.plot(tmp_path)
    assert (tmp_path / "topology.png").stat().st_size > 1000
    for plan in federation.plans:
        assert len(plan.array_records) == 2  # no client receives any model but its own mixture


def test_the_ring_closes_without_clients_that_never_train(tmp_path):
    """Client 1 has one image, and 4 is unseen: 0, 2 and 3 remain, each of which has the two others as neighbors."""
    file = tmp_path / "clients.csv"
    file.write_text("\n".join(["client", "1", *("0234"[row % 4] for row in range(59))]))
    overrides = ["num_clients=5", "unseen_clients=1", "clients_per_round=4", "partition=file", f"partition.file={file}"]
    federation = Federation(tmp_path / "run", "strategy=gossip", *overrides)
    federation.run(1)
    assert federation.components.federation.untrained_clients == {1, 4}
    assert federation.report.strategy_metrics["edges"] == 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["strategy.topology=random_regular"], "strategy.topology=random_regular needs strategy.degree"),
        (["strategy.topology=file"], "strategy.file"),
        (["strategy.degree=3"], "strategy.degree=3 is for strategy.topology=random_regular, and it is ring"),
        (["calibration=auxiliary"], "calibration=auxiliary works on a model that clients share"),
        (["server_optimizer=fedadam"], "server_optimizer works on a model that clients share"),
        (["tuning=lora", "tuning.rank=2", "tuning.aggregation=exact"], "with strategy=gossip each client has its own"),
        (
            ["secure_aggregation=secagg_plus", "secure_aggregation.dropout_fraction=0"],
            "secure_aggregation=secagg_plus needs clients that all send and receive",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_before_the_start(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        Federation(tmp_path, "strategy=gossip", *overrides).run(1)
    assert "\n" not in str(caught.value)
