"""Per-SSL: the pull to the received model by hand, what is a client's own, and what it leaves alone."""

import numpy as np
import pytest
import torch

from fedssl.model_arrays import exchanged_layers, exchanged_names, local_names
from fedssl.regularizers.base import Regularizer, RegularizerInput
from fedssl.views import Views
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from strategies.per_ssl import PERSONAL, PersonalClient, ProximalTo
from tests.arrays import same
from tests.federation import Federation
from tests.states import load_tensors
from tests.strategies.clients import make_byol, make_plan, snapshot

NOTHING = torch.empty(0)


def personal_of(state):
    return {name.removeprefix(PERSONAL): np.asarray(value) for name, value in state.items() if PERSONAL in name}


def add_one(method):
    """A training that adds 1 to everything."""

    def train(term: Regularizer) -> None:
        with torch.no_grad():
            for value in method.named_tensors.values():
                value.add_(1)

    return train


class Slope(torch.nn.Module):
    """One weight ``v`` of two numbers, whose loss is ``g . v``."""

    def __init__(self, v):
        super().__init__()
        self.v = torch.nn.Parameter(torch.tensor(v, dtype=torch.float64))
        self.named_tensors = {"v": self.v}


@pytest.mark.parametrize(
    ("weight", "expected"),
    # v' = v - lr (g + lambda (v - w)), with v = (3, -1), w = (1, 1), so v - w = (2, -2), g = (4, 8) and lr = 1/4.
    [
        (0.0, [2.0, -3.0]),  # 3 - 1, -1 - 2: training alone
        (0.5, [1.75, -2.75]),  # of 1 and -1 a quarter less
        (4.0, [0.0, -1.0]),  # lr lambda = 1: w - lr g = (1 - 1, 1 - 2), wherever v was
    ],
)
def test_a_step_by_hand(weight, expected):
    model = Slope([3.0, -1.0])
    coupling = ProximalTo({"v": np.array([1.0, 1.0])}, weight=weight)
    coupling.on_train_start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    step = RegularizerInput(model, Views.of(NOTHING, NOTHING), (), None)
    loss = coupling.apply((model.v * torch.tensor([4.0, 8.0])).sum(), step)
    assert float(loss.detach()) == pytest.approx(12 - 8 + weight / 2 * 8)
    loss.backward()
    optimizer.step()
    assert model.v.tolist() == pytest.approx(expected)


def test_a_personal_model_begins_as_the_received_one():
    method, half = make_byol(), PersonalClient(weight=0.1)
    received = exchanged_layers(make_byol())
    half.load_start(method, make_plan(1, received), None)
    add_one(method)(Regularizer())  # the global model is trained
    before = snapshot(method)
    state = half.train_personalized(method, make_plan(1, received), None, train=add_one(method))
    assert same(snapshot(method), before)  # and is sent as it was
    assert state.keys() == {PERSONAL + name for name in [*exchanged_names(method), *local_names(method)]}
    assert not method.named_tensors.keys() & state.keys()
    first = personal_of(state)
    for name, array in first.items():  # the target began as a copy of v_k, which is w, not as the trained target
        np.testing.assert_array_equal(array, received[name.removeprefix("target_")] + 1)

    received = {name: array + array.dtype.type(7) for name, array in received.items()}
    second = personal_of(half.train_personalized(method, make_plan(2, received), state, train=add_one(method)))
    for name, array in second.items():
        np.testing.assert_array_equal(array, first[name] + 1)


def personal_layers(folder, client, *, before):
    return personal_of(load_tensors(folder / "clients" / "0000" / str(client), before=before))


@pytest.mark.parametrize(
    "overrides", [["method=simclr", "regularizer=prox"], pytest.param(["method=orchestra"], marks=pytest.mark.heavy)]
)
def test_without_the_term_clients_train_alone(tmp_path, overrides):
    if overrides == ["method=orchestra"]:  # whose centroids are the server's, and so those of all clients: one client
        overrides = [*overrides, "method.local_clusters=3", "method.queue_size=24", "num_clients=1"]
    overrides = ["num_clients=2", "optimizer.momentum=0.9", *overrides]
    personal = Federation(tmp_path / "personal", *overrides, "strategy=per_ssl", "strategy.weight=0")
    alone = Federation(tmp_path / "alone", *overrides, "strategy=local_only")
    average = Federation(tmp_path / "average", *overrides, "strategy=fedavg")
    for federation in (personal, alone, average):
        for _ in range(2):
            exchange, here = WallClockExchange(federation.grid), federation.components.federation
            federation.state, _ = run_round(exchange, lambda here=here: here, federation.state)
    assert same(personal.layers, average.layers)  # personal models leave the global one alone
    for client in range(personal.settings.num_clients):
        found = personal_layers(tmp_path / "personal", client, before=3)
        model = alone.state.models[str(client)].layers
        assert all(np.array_equal(found[name], array) for name, array in model.items())
        kept = load_tensors(tmp_path / "alone" / "clients" / "0000" / str(client), before=3) or {}
        assert found.keys() == {*model, *kept}
        assert all(np.array_equal(found[name], value.numpy()) for name, value in kept.items())
