"""Engine ``ray`` on GPUs: every one is used, and one that fails is left out."""

import os
import re
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedssl.errors import RunError
from simulation.block_queue import Call
from simulation.gpu_placement import place_clients
from simulation.ray_grid import RayGrid
from simulation.resources import ClientResources, Host, fit_clients
from tests.simulation.test_ray_grid import adding_app, ask, facts, stop, wait_for_actors


@pytest.mark.parametrize(("gpus", "fraction"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_four_clients_share_the_gpus_of_a_host(gpus, fraction):
    client, actors = fit_clients([Host(4, gpus)], client_cpus=None, client_gpus=None, threads=4, max_clients=100)
    assert (client.gpus, actors) == (fraction, 4)


@pytest.mark.heavy
def test_all_actors_and_gpus_are_used(hosts, tmp_path):
    """Clients that need half a GPU: see below; a whole one leaves no choice."""
    assert hosts[0].gpus == 4
    client = ClientResources(0, 0.25)  # this machine may have fewer than four cores
    placements = place_clients(hosts, client=client, clients=4)
    app = adding_app(tmp_path)
    grid = RayGrid(num_clients=4, placements=placements, client=client, client_app=app)
    wait_for_actors(grid)
    replies = ask(grid, **{f"sleep-{client}": 0.5 for client in range(4)})
    assert len(set(facts(replies, "pid"))) == 4
    assert set(facts(replies, "gpu")) == {0, 1, 2, 3}  # without placements Ray fills the first GPU
    stop(grid, placements)


@pytest.mark.slow
@pytest.mark.heavy
def test_a_busy_gpu_is_used_when_it_is_free(hosts, tmp_path):
    other = ray.remote(num_cpus=0, num_gpus=0.1)(Counter).remote()
    assert ray.get(other.total.remote()) == 0  # it has its GPU
    client = ClientResources(0, 0.5)
    placements = place_clients(hosts, client=client, clients=4)
    grid = RayGrid(num_clients=4, placements=placements, client=client, client_app=adding_app(tmp_path))
    first = ask(grid)
    assert len(first) == 4
    while len(grid._idle) < 3:
        list(grid.pull_messages([]))
    assert len(set(facts(ask(grid, **{f"sleep-{client}": 0.2 for client in range(4)}), "gpu"))) == 3
    assert len(grid._starting) == 1
    ray.kill(other)
    wait_for_actors(grid)
    assert set(facts(ask(grid, **{f"sleep-{client}": 0.5 for client in range(4)}), "gpu")) == {0, 1, 2, 3}
    stop(grid, placements)


@pytest.mark.heavy
def test_a_process_with_a_failing_gpu_is_restarted_once(hosts, caplog):
    """A restarted process finds no accelerator on this host, as if its GPU was lost."""
    grid, placements = grid_with_gpus(hosts, caplog)
    # A client with another error keeps its process.
    assert [reply.has_error() for _, reply in sorted(ask(grid, **{"fail-1": 1}).items())] == [False, True]
    settle(grid)
    assert (len(grid._idle), caplog.text) == (2, "")
    (failed,) = [reply for reply in ask(grid, **{"break-0": 1}).values() if reply.has_error()]
    assert failed.error.reason == "RuntimeError: the device is lost"
    settle(grid)
    first, second = [record.getMessage() for record in caplog.records if "a GPU has failed" in record.getMessage()]
    assert re.fullmatch(r"a GPU .* process for clients is restarted: GPU [01] of .*: the device is lost", first)
    assert re.fullmatch(r"a GPU has failed again, .* is used for clients: GPU [01] of .*: torch does not .*", second)
    assert len(grid._idle) == 1
    assert [reply.has_error() for reply in ask(grid).values()] == [False, False]  # by the other process
    message = "no GPU is left for clients: GPU . of .*: torch does not find it; resume the run"
    with pytest.raises(RunError, match=message):
        ask(grid, **{"break-0": 1, "break-1": 1})
    stop(grid, placements)


def grid_with_gpus(hosts, caplog):
    """Return a grid of two actors that share GPUs, as if torch had found them, and the placements of the actors."""
    client = ClientResources(0, 0.5)
    placements = place_clients(hosts, client=client, clients=2)
    grid = RayGrid(num_clients=2, placements=placements, client=client, client_app=breaking_app())
    wait_for_actors(grid)
    assert [slot.has_gpu for slot in grid._slots.values()] == [False, False]  # this host has none
    assert caplog.text.count("torch finds no GPU in a process for clients, which train on the CPU") == 2
    caplog.clear()
    for slot in grid._slots.values():
        slot.has_gpu = True
    assert not any(reply.has_error() for reply in ask(grid).values())
    return grid, placements


def settle(grid):
    while grid._checking or grid._starting:
        list(grid.pull_messages([]))


def breaking_app():
    """A ClientApp on a GPU that works, until the message with ``break-ID`` or ``die-ID``."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        from simulation import client_actor

        client_actor.is_gpu = lambda device: True
        partition = context.node_config["partition-id"]
        asked = message.content.metric_records.get("asked", {})
        if asked.get(f"die-{partition}"):
            os._exit(7)
        if asked.get(f"fail-{partition}"):
            raise ValueError("no camera")
        if asked.get(f"break-{partition}"):
            client_actor.device_failure = lambda device: "the device is lost"
            raise RuntimeError("the device is lost")
        time.sleep(0.2)
        return Message(RecordDict(), reply_to=message)

    return app


@pytest.mark.heavy
def test_clients_wait_while_a_gpu_is_checked():
    """That process may have the memory of its last client."""
    grid = RayGrid(num_clients=1, placements=[], client=ClientResources(1, 1.0))
    (node,) = grid.get_node_ids()
    call = Call(message=SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node)), payload=None, is_retry=True)
    actor = Mock()
    grid._idle, grid._checking = [actor], {"task": Mock()}
    grid._retry_alone.append(call)
    grid._dispatch()
    assert (grid._idle, grid._running) == ([actor], {})
    grid._checking.clear()
    grid._dispatch()
    assert grid._idle == []
    assert [(running.actor, running.calls) for running in grid._running.values()] == [(actor, [(call, None)])]


@pytest.mark.slow
@pytest.mark.heavy
def test_a_process_that_dies_with_its_gpu_is_left_out(hosts, caplog):
    """Else it would train its next clients on the CPU."""
    grid, placements = grid_with_gpus(hosts, caplog)
    (failed,) = [reply for reply in ask(grid, **{"die-0": 1}).values() if reply.has_error()]
    assert "its process died" in failed.error.reason
    settle(grid)
    assert "a GPU has failed again, and one process less is used for clients: GPU" in caplog.text
    assert len(grid._idle) == 1
    stop(grid, placements)
