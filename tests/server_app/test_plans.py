"""The models, layers and destinations of a round, before any message is sent."""

import numpy as np
import pytest

from fedssl.wire.messages import TrainPlan
from server_app.plans import PlanBuilder, Routes
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.types import GLOBAL, GlobalModel, ServerState
from tests.server_app.small import LAYERS, small_federation
from tests.server_app.test_round import good, make_grid

WEIGHT, MEAN = LAYERS


class Ring(ServerStrategy):
    """A model per client, whose update goes into its own model and those of its neighbors among four."""

    models_per_client = True

    def candidate_models(self, state, round, client):
        return (str(client),)

    def destination_models(self, state, round, client, start):
        return tuple(str((client + step) % 4) for step in (-1, 0, 1))


class NewStatistics(ServerStrategy):
    """Sends the statistic only to clients that were not in the round before."""

    def download_names(self, model, round, layers, last):
        return (WEIGHT,) if last == round - 1 else None


def routes(*, clusters=(), late=()):
    """Routes of clients 0, 1 and 3."""
    return Routes(Ring(make_weighted_mean("examples")), ServerState(), [0, 1, 3], round=1, clusters=clusters, late=late)


def plans(server, *, candidates, models=("a", "b"), last_participation=None):
    """The plans of round 3, in which layers of model i have the value i."""
    values = {name: {layer: np.full_like(LAYERS[layer], i) for layer in LAYERS} for i, name in enumerate(models)}
    state = ServerState(
        round=2,
        models={name: GlobalModel(layers=layers) for name, layers in values.items()},
        last_participation=last_participation or {},
        evicted={1: 2, 9: 2},
    )
    federation = small_federation(make_grid([good] * 4), FedSSLStrategy(server(make_weighted_mean("examples"))))
    return PlanBuilder(federation, state, candidates=candidates, extra_models=(), oldest_resumable=1)


@pytest.mark.parametrize(("client", "expected"), [(0, ("3", "0", "1")), (1, ("0", "1")), (3, ("3", "0"))])
def test_models_of_clients_that_are_not_sampled_receive_nothing(client, expected):
    assert routes().destinations(client, str(client)) == expected  # not "2", the model of client 2


def test_a_round_changes_the_models_that_receive_updates():
    assert set(routes().models) == {"0", "1", "3"}
    assert set(routes(late=("2",)).models) == {"0", "1", "2", "3"}
    clustered = routes(clusters=("x", "y"))
    assert (list(clustered.models), clustered.destinations(0, "0")) == (["x", "y"], ())


def test_clients_that_receive_the_same_share_a_record():
    built = plans(ServerStrategy, candidates={0: ("a",), 1: ("b",), 3: ("a",)})
    assert built.contents[0] is built.contents[3]
    for client, value in ((0, 0), (1, 1)):
        plan = TrainPlan.from_content(built.contents[client])
        assert (plan.round, plan.oldest_resumable_round, plan.evicted_clients) == (3, 1, (1,))  # client 9 is not in it
        assert all((array == value).all() for array in plan.layers.values())
    assert built.exchange(["c"]).models == {"a", "b", "c"}
    assert built.exchange([]).is_complete


def test_a_client_receives_the_layers_that_it_lacks():
    last = {0: (2, GLOBAL), 1: (1, GLOBAL), 2: (2, "another")}
    built = plans(
        NewStatistics, models=[GLOBAL], candidates=dict.fromkeys(range(4), (GLOBAL,)), last_participation=last
    )
    received = {client: tuple(TrainPlan.from_content(content).layers) for client, content in built.contents.items()}
    assert received == {0: (WEIGHT,), 1: (WEIGHT, MEAN), 2: (WEIGHT, MEAN), 3: (WEIGHT, MEAN)}
    assert {client: slot.downloaded for client, slot in built.slots.items()} == received
    assert built.slots[0].bytes_down < built.slots[1].bytes_down
    assert not built.exchange([]).is_complete


def test_a_client_that_selects_its_model_receives_all_candidates():
    last = {0: (2, "b")}
    built = plans(NewStatistics, candidates={0: ("b", "a")}, last_participation=last)
    plan = TrainPlan.from_content(built.contents[0])
    assert built.slots[0].start == "b"  # until its reply states another one
    assert {name: array.tolist() for name, array in plan.layers.items()} == {WEIGHT: [1, 1, 1], MEAN: [1]}
    assert [{name: array.tolist() for name, array in layers.items()} for layers in plan.candidate_arrays] == [
        {WEIGHT: [0, 0, 0], MEAN: [0]}
    ]
