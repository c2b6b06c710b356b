"""Engine ``ray`` with real actors. A run leaves no processes and files."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from ray.util.placement_group import remove_placement_group

from fedssl.errors import RunError
from fedssl.machine.process import available_cores
from fedssl.wire.records import arrays_to_record, record_to_arrays
from server_app.messaging import receive
from simulation import ray_grid
from simulation.block_queue import Call
from simulation.gpu_placement import place_clients
from simulation.ray_grid import OUT_OF_MEMORY, RayGrid
from simulation.ray_internals import keep_sigterm_handler
from simulation.ray_session import ray_session
from simulation.resources import ClientResources, Host, fit_clients
from simulation.sandbox import sandbox_pids
from tests.runs import read_summary

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hosts():
    with ray_session(gpus=4) as hosts:
        yield hosts


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


@pytest.mark.heavy
@pytest.mark.parametrize(("gpus", "fraction"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_all_actors_and_gpus_are_used(hosts, tmp_path, gpus, fraction):
    assert hosts[0].gpus == 4
    client, actors = fit_clients([Host(4, gpus)], client_cpus=None, client_gpus=None, threads=4, max_clients=100)
    assert (client.gpus, actors) == (fraction, 4)
    client = ClientResources(0, client.gpus)  # this machine may have fewer than four cores
    placements = place_clients(hosts, client=client, clients=actors)
    app = adding_app(tmp_path)
    grid = RayGrid(num_clients=4, placements=placements, client=client, client_app=app)
    wait_for_actors(grid)
    replies = ask(grid, **{f"sleep-{client}": 0.5 for client in range(4)})
    assert len(set(facts(replies, "pid"))) == 4
    assert set(facts(replies, "gpu")) == {0, 1, 2, 3}  # without placements Ray fills the first `gpus` GPUs
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


def stop(grid, placements):
    for actor in list(grid._slots):
        grid._stop_actor(actor)
    for placement in placements:
        if placement != "SPREAD":
            remove_placement_group(placement.placement_group)


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
    with pytest.raises(
        RunError, match="no GPU is left for clients: GPU . of .*: torch does not find it; resume the run"
    ):
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


def test_ray_does_not_replace_the_sigterm_handler():
    """Ray's handlers would end a run without a message."""
    before = signal.getsignal(signal.SIGTERM)
    with keep_sigterm_handler():
        ray._private.utils.set_sigterm_handler(signal.SIG_IGN)  # as ray.init does
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.heavy
@pytest.mark.parametrize("seconds", [0.1, 0.5, 1, 2, 3])
def test_sigterm_while_ray_starts_ends_the_run(seconds):
    with own_temporary_folder() as folder:
        process = start(folder, "output_dir=run", "threads=1")
        wait_until(lambda: list(folder.glob("fssl-*")), seconds=60)
        (sandbox,) = folder.glob("fssl-*")
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 128 + signal.SIGTERM, output
        assert output.splitlines()[-1].startswith("fedssl: stopped by SIGTERM")
        assert "Traceback" not in output
        assert gone(folder, sandbox)


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
    assert {node - 2: reply.error.reason for node, reply in replies.items() if reply.has_error()} == {
        0: "ValueError: no camera"
    }
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


TINY = ["num_clients=3", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1", "evaluation=none"]
TINY += ["final_evaluation=none", "collapse_images=0", "measure_resources=false", "engine=ray"]


@contextmanager
def own_temporary_folder():
    """A private folder for sandboxes, whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


def start(folder, *overrides):
    """Start the command in a new session; its sandboxes are in ``folder``."""
    command = [sys.executable, "-c", "from fedssl.command_line import fedssl; fedssl()", *TINY, *overrides]
    environment = os.environ | {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )


def read_until(process, overrides):
    output = ""
    for line in process.stdout:
        output += line
        if overrides in line:
            return output
    pytest.fail(f"{overrides!r} was not output but:\n{output}")


def gone(folder, sandbox):
    deadline = time.monotonic() + 60
    while (sandbox_pids(sandbox) or list(folder.glob("fssl-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not sandbox_pids(sandbox) and not list(folder.glob("fssl-*"))


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.heavy)])
def test_an_interrupted_round_leaves_no_processes_or_files(number):
    with own_temporary_folder() as folder:
        process = start(folder, "rounds=1000", f"engine.client_cpus={available_cores()}", "output_dir=run")
        read_until(process, "round 2/1000")
        (sandbox,) = folder.glob("fssl-*")
        assert len(sandbox_pids(sandbox)) >= 4  # Ray's daemons and an actor
        if number == signal.SIGINT:  # as Ctrl-C in a terminal: everybody in the group hears it
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), output
        assert gone(folder, sandbox)
        if number != signal.SIGKILL:
            summary = read_summary(folder / "run")
            assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
            assert 1 <= summary["rounds"] < 1000
            message = f"fedssl: stopped after round {summary['rounds']}; continue with: fedssl resume="
            assert output.splitlines()[-1].startswith(message)
            assert "Traceback" not in output


def wait_until(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_owner_of_the_sandbox(number):
    script = (
        "import os, subprocess\n"
        "from simulation.sandbox import process_sandbox\n"
        "with process_sandbox() as sandbox:\n"
        "    process = sandbox.start(['sleep', '1000'], environment=os.environ, stdout=subprocess.DEVNULL)\n"
        "    print(sandbox.path, flush=True)\n"
        "    process.wait()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    assert owner.stdout is not None
    sandbox = Path(owner.stdout.readline().strip())
    assert sandbox_pids(sandbox)
    owner.send_signal(number)
    owner.communicate()
    assert wait_until(lambda: not sandbox_pids(sandbox), seconds=60)
    assert wait_until(lambda: not sandbox.exists(), seconds=60)


@pytest.mark.heavy
@pytest.mark.slow
def test_a_session_has_no_dashboard_and_no_autoscaler(hosts):
    sandbox = Path(ray._private.worker.global_worker.node.get_session_dir_path()).parents[1]
    commands = [Path("/proc", str(pid), "cmdline").read_text() for pid in sandbox_pids(sandbox)]
    assert sum("gcs_server" in command for command in commands) >= 1
    assert not [one for one in commands if "dashboard/dashboard.py" in one or "autoscaler/_private/monitor.py" in one]


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


@pytest.mark.heavy
def test_all_clients_of_the_task_of_a_process_that_dies_fail(grid, tasks_of_three):
    """Client 0 had finished, and its reply is lost; not if it took so long that it had its own task."""
    replies = ask(grid, **{"die-1": 1})
    assert {1, 2} <= {node - 2 for node, reply in replies.items() if reply.has_error()} <= {0, 1, 2}
    assert not any(reply.has_error() for reply in ask(grid).values())
