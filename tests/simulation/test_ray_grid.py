"""Engine ``ray`` with real actors."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from ray.util.placement_group import remove_placement_group

from fedssl.errors import RunError
from fedssl.wire.records import arrays_to_record, record_to_arrays
from server_app.messaging import receive
from simulation import ray_grid
from simulation.ray_grid import OUT_OF_MEMORY, RayGrid
from simulation.ray_internals import keep_sigterm_handler
from simulation.resources import ClientResources
from simulation.sandbox import sandbox_pids


@pytest.fixture(scope="module")
def grid(hosts, tmp_path_factory):
    """Six clients on two actors without a GPU share."""
    app = adding_app(tmp_path_factory.mktemp("app"))
    return RayGrid(num_clients=6, placements=["SPREAD"] * 2, client=ClientResources(1, 0.0), client_app=app)


def adding_app(folder):
    """A ClientApp that adds its partition id to the global array and does what the message requests.

    A client with ``full-ID`` finds a full GPU that often, and later fails if other clients run.
    """
    app = ClientApp()

    class OutOfMemoryError(RuntimeError):  # of torch, which takes seconds to import
        pass

    def fill(partition, times):
        calls = folder / f"calls-{partition}"
        before = calls.stat().st_size if calls.exists() else 0
        calls.write_bytes(bytes(before + 1))
        if before and len(list(folder.glob("working-*"))) > 1:
            raise RuntimeError("others are at work")
        if before < times:
            raise OutOfMemoryError("CUDA out of memory")

    @app.train()
    def train(message, context):
        partition = context.node_config["partition-id"]
        asked = message.content.metric_records.get("asked", {})
        if asked.get(f"die-{partition}"):
            os._exit(7)
        if asked.get(f"fail-{partition}"):
            raise ValueError("no camera")
        time.sleep(asked.get(f"sleep-{partition}", 0))
        working = folder / f"working-{os.getpid()}"
        working.touch()
        try:
            time.sleep(asked.get("work", 0))
            if f"full-{partition}" in asked:
                fill(partition, asked[f"full-{partition}"])
        finally:
            working.unlink()
        calls = int(context.state.metric_records.get("calls", {"n": 0})["n"]) + 1
        context.state["calls"] = MetricRecord({"n": calls})
        (array,) = (array.numpy() for array in message.content.array_records["arrays"].values())
        facts = {"num-examples": 1, "calls": calls, "pid": os.getpid(), "writable": int(array.flags.writeable)}
        facts["nice"] = os.nice(0)
        facts["gpu"] = int(os.environ.get("CUDA_VISIBLE_DEVICES") or -1)
        arrays = ArrayRecord([array + partition])
        if asked.get(f"unsent-{partition}"):
            context.node_config["lock"] = threading.Lock()  # which cannot be pickled
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(facts)}), reply_to=message)

    return app


def wait_for_actors(grid):
    while grid._starting:
        list(grid.pull_messages([]))


def ask(grid, *, timeout=60.0, array=None, **asked):
    """Send the same content to every node, and return the replies by node."""
    arrays = ArrayRecord([np.zeros(1)]) if array is None else arrays_to_record({"w": array})
    content = RecordDict({"arrays": arrays, "asked": MetricRecord(asked)}) if asked else RecordDict({"arrays": arrays})
    messages = [Message(content, node, "train") for node in grid.get_node_ids()]
    return {reply.metadata.src_node_id: reply for reply in receive(grid, messages, timeout=timeout)}


def facts(replies, name):
    return [dict(reply.content["metrics"])[name] for _, reply in sorted(replies.items())]


@pytest.mark.heavy
@pytest.mark.slow
def test_flowers_strategies_run_unchanged(grid):
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    # Each round adds the mean of the partition ids 0 to 5, which is 2.5.
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx([5.0, 5.0])
    # The state of a node survives from round to round.
    first, second = (result.train_metrics_clientapp[round]["calls"] for round in (1, 2))
    assert second == pytest.approx(first + 1)


def stop(grid, placements):
    for actor in list(grid._slots):
        grid._stop_actor(actor)
    for placement in placements:
        if placement != "SPREAD":
            remove_placement_group(placement.placement_group)


def test_ray_does_not_replace_the_sigterm_handler():
    """Ray's handlers would end a run without a message."""
    before = signal.getsignal(signal.SIGTERM)
    with keep_sigterm_handler():
        ray._private.utils.set_sigterm_handler(signal.SIG_IGN)  # as ray.init does
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.heavy
@pytest.mark.slow
def test_shared_contents_are_stored_once_and_read_without_a_copy(grid, monkeypatch):
    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    array = np.zeros(1_000_000, np.float32)
    wait_for_actors(grid)
    replies = ask(grid, array=array, **{f"sleep-{client}": 0.2 for client in range(6)})
    assert len(puts) == 1
    assert set(facts(replies, "writable")) == {0}  # memory that all processes share
    for node, reply in replies.items():
        (sum_of_both,) = record_to_arrays(reply.content.array_records["arrays"]).values()
        np.testing.assert_array_equal(sum_of_both, node - 2)
    assert not grid._running
    assert not grid._pending
    assert len(set(facts(replies, "pid")) - {os.getpid()}) == 2
    assert set(facts(replies, "nice")) == {os.nice(0)}  # normal priority
    assert set(facts(replies, "gpu")) == {-1}  # a client without a GPU share sees no GPU


@pytest.mark.heavy
@pytest.mark.slow
def test_a_failed_client_or_process_does_not_affect_others(grid, caplog):
    first = ask(grid, **{"fail-1": 1, "die-3": 1})
    reasons = {node - 2: reply.error.reason for node, reply in first.items() if reply.has_error()}
    assert reasons.keys() == {1, 3}
    assert reasons[1] == "ValueError: no camera"
    assert "process died" in reasons[3]
    assert "is restarted" in caplog.text
    wait_for_actors(grid)
    second = ask(grid, **{f"sleep-{client}": 0.2 for client in range(6)})
    assert sorted(second) == list(grid.get_node_ids())
    assert not any(reply.has_error() for reply in second.values())
    assert len(set(facts(second, "pid"))) == 2  # by the new process too
    assert len(grid._idle) == 2


@pytest.mark.heavy
@pytest.mark.slow
def test_the_actor_of_a_hanging_client_is_replaced(grid):
    wait_for_actors(grid)
    grid._client_seconds = None  # no other client is in its task
    assert sorted(ask(grid, timeout=2.0, **{"sleep-0": 1000})) == [3, 4, 5, 6, 7]
    again = ask(grid)
    assert sorted(again) == [2, 3, 4, 5, 6, 7]
    assert not any(reply.has_error() for reply in again.values())


@pytest.mark.heavy
def test_a_client_without_gpu_memory_is_retried_alone(grid, caplog):
    """Client 1 finds a full GPU once; client 2 also finds it full when it is alone."""
    wait_for_actors(grid)
    replies = ask(grid, **{"full-1": 1, "full-2": 2, "work": 0.3})
    assert len(replies) == 6
    assert "is retried alone" in caplog.text
    ((node, reason),) = [(node, reply.error.reason) for node, reply in replies.items() if reply.has_error()]
    assert node - 2 == 2
    assert reason.startswith("OutOfMemoryError")
    assert reason == "OutOfMemoryError: CUDA out of memory"
    assert torch.OutOfMemoryError.__name__ == OUT_OF_MEMORY
    assert len(grid._idle) + len(grid._starting) == 2


@pytest.fixture
def tasks_of_three(grid, monkeypatch):
    """The tasks are clients 0 to 2, and 3 to 5."""
    monkeypatch.setattr(ray_grid, "task_size", lambda waiting, processes, seconds: 3)
    wait_for_actors(grid)


@pytest.mark.heavy
@pytest.mark.slow
def test_a_failed_client_does_not_affect_others_of_its_task(grid, tasks_of_three, caplog):
    """Client 4 finds a full GPU once, see `fill`."""
    caplog.clear()
    replies = ask(grid, timeout=10.0, **{"fail-0": 1, "full-4": 1})
    assert sorted(replies) == list(grid.get_node_ids())
    failed = {node - 2: reply.error.reason for node, reply in replies.items() if reply.has_error()}
    assert failed == {0: "ValueError: no camera"}
    assert caplog.text.count("is retried alone") == 1


@pytest.mark.heavy
@pytest.mark.slow
def test_a_failed_start_of_an_actor_is_reported(hosts):
    class Broken:
        def __reduce__(self):
            return _burn, ()

    grid = RayGrid(num_clients=2, placements=["SPREAD"], client=ClientResources(0, 0.0), client_app=Broken())
    with pytest.raises(RunError, match="could not be started: .*the bread is burnt"):
        ask(grid)


def _burn():
    raise ValueError("the bread is burnt")


@pytest.mark.heavy
@pytest.mark.slow
def test_a_session_has_no_dashboard_and_no_autoscaler(hosts):
    sandbox = Path(ray._private.worker.global_worker.node.get_session_dir_path()).parents[1]
    commands = [Path("/proc", str(pid), "cmdline").read_text() for pid in sandbox_pids(sandbox)]
    assert sum("gcs_server" in command for command in commands) >= 1
    assert not [one for one in commands if "dashboard/dashboard.py" in one or "autoscaler/_private/monitor.py" in one]


@pytest.mark.heavy
def test_all_clients_of_a_dead_process_fail(grid, tasks_of_three):
    """Client 0 had finished, and its reply is lost; not if it took so long that it had its own task."""
    replies = ask(grid, **{"die-1": 1})
    assert {1, 2} <= {node - 2 for node, reply in replies.items() if reply.has_error()} <= {0, 1, 2}
    assert not any(reply.has_error() for reply in ask(grid).values())
