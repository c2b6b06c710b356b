"""Actors of Ray that sum the updates of their clients: equal bits, less data, and an actor that dies."""

import os
import time

import numpy as np
import pytest
import ray
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedssl.wire.messages import ClientUpdate, TrainPlan
from server_app.exchanges.wall_clock import WallClockExchange
from server_app.training_loop import run_round
from simulation.grid import LocalGrid
from simulation.ray_grid import RayGrid
from simulation.ray_session import ray_session
from simulation.resources import ClientResources
from strategies.l_dawa import LDAWA
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.server_app.small import small_federation
from tests.simulation.test_ray_grid import wait_for_actors

pytestmark = pytest.mark.heavy
CLIENTS = 10


def scaling_app(folder, *, seconds=0.1):
    """A ClientApp that multiplies layers by a factor of its client. Clients with a file in ``folder`` end their
    process, and ``fail`` before their reply."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        plan = TrainPlan.from_content(message.content)
        client = context.node_config["partition-id"]
        time.sleep(seconds)
        if (folder / f"die-{client}").exists():
            os._exit(7)
        if (folder / f"fail-{client}").exists():
            raise ValueError("no camera")
        layers = {name: (array * np.float32(1 + client / 7)).astype(array.dtype) for name, array in plan.layers.items()}
        update = ClientUpdate(layers=layers, partition_id=client, num_examples=3 + client, train_loss=1 / (1 + client))
        return Message(update.to_content(plan), reply_to=message)

    return app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def grid(folder):
    with ray_session(gpus=0):
        client = ClientResources(0, 0.0)
        grid = RayGrid(num_clients=CLIENTS, placements=["SPREAD"] * 2, client=client, client_app=scaling_app(folder))
        wait_for_actors(grid)
        yield grid


def play(grid, *, rounds=1):
    context = small_federation(grid, LDAWA(weighting="loss"))
    state = ServerState()
    for _ in range(rounds):
        state, report = run_round(WallClockExchange(grid), lambda: context, state)
    return state, report


def test_sums_of_actors_have_equal_bits_and_replace_updates(grid, folder, monkeypatch):
    sizes, get = [], ray.get

    def measured(reference):
        result = get(reference)
        if isinstance(result, tuple):
            sizes.extend(len(reply.message.content) for reply in result[0])  # records of each reply
        return result

    monkeypatch.setattr(ray, "get", measured)
    state, report = play(grid, rounds=3)
    expected, expected_report = play(LocalGrid(scaling_app(folder), num_clients=CLIENTS), rounds=3)
    assert same(state.models[GLOBAL].layers, expected.models[GLOBAL].layers)
    assert [(row.client, row.cosine, row.bytes_up) for row in report.clients] == [
        (row.client, row.cosine, row.bytes_up) for row in expected_report.clients
    ]
    # At most one client at the end of each round runs in another actor than its block's.
    assert len(sizes) == 3 * CLIENTS
    assert sizes.count(0) >= 3 * (CLIENTS - 2)


@pytest.mark.parametrize("what", ["fail", "die"])
def test_a_client_that_fails(grid, folder, what):
    file = folder / f"{what}-7"
    file.touch()
    try:
        state, report = play(grid)
    finally:
        file.unlink()
    assert 7 in report.dropped
    # With its process, the sum of the clients before it in its block is lost: of clients 5 and 6. Those after it may be
    # in the same task.
    lost = set(report.dropped) - {7}
    assert lost == set() if what == "fail" else {5, 6} <= lost <= {5, 6, 8, 9}
    assert all("its process died" in report.dropped[client] for client in lost)
    files = [folder / f"fail-{client}" for client in report.dropped]
    for file in files:
        file.touch()
    try:
        expected, _ = play(LocalGrid(scaling_app(folder), num_clients=CLIENTS))
    finally:
        for file in files:
            file.unlink()
    assert same(state.models[GLOBAL].layers, expected.models[GLOBAL].layers)
    _, report = play(grid)  # the next round is complete
    assert report.dropped == {}


def test_many_fast_clients_run_in_few_tasks(grid, tmp_path, monkeypatch):  # in its session of Ray
    """64 clients in 13 blocks of 5, of which one fails in each round: the rest of its task runs in another one."""
    (tmp_path / "fail-20").touch()
    app = scaling_app(tmp_path, seconds=0)
    many = RayGrid(num_clients=64, placements=["SPREAD"] * 2, client=ClientResources(0, 0.0), client_app=app)
    wait_for_actors(many)
    play(many)  # measures the seconds of a client
    sizes, finish = [], many._finish
    monkeypatch.setattr(many, "_finish", lambda *task: sizes.append(len(task[1].calls)) or finish(*task))
    state, report = play(many, rounds=3)
    for actor in list(many._slots):
        many._stop_actor(actor)
    expected, expected_report = play(LocalGrid(app, num_clients=64), rounds=3)
    assert same(state.models[GLOBAL].layers, expected.models[GLOBAL].layers)
    assert report.dropped == expected_report.dropped
    assert list(report.dropped) == [20]
    assert [(row.client, row.cosine, row.bytes_up) for row in report.clients] == [
        (row.client, row.cosine, row.bytes_up) for row in expected_report.clients
    ]
    # Half of an equal share of 64 clients on two processes is 16. Then a round has 16 tasks; on a busy machine more.
    assert 4 <= max(sizes) <= 16
    assert len(sizes) < 3 * 40
