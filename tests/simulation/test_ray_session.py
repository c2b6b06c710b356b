"""A Ray cluster of two simulated hosts on this machine, with two simulated GPUs and one."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from ray.cluster_utils import Cluster

from fedssl.errors import InputError
from server_app.messaging import receive
from simulation.ray_grid import RayGrid
from simulation.ray_session import RayNotStartedError, check_host, ray_session
from simulation.resources import Host, fit_clients
from simulation.run import run

REPOSITORY = Path(__file__).resolve().parents[2]
MEMORY = {"object_store_memory": 200 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    """Two hosts, whose processes end with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # as the owner of a cluster may set it; other tests run beside
        patch.setenv("RAY_health_check_failure_threshold", "100")  # a busy machine delays a host's answers
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # stands for fedssl, which is installed on every host
        head = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False, **MEMORY}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, num_gpus=1, **MEMORY)
    yield cluster
    cluster.shutdown()


def telling_app():
    """A ClientApp that returns its host and GPU after the requested seconds."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        time.sleep(message.content["asked"]["seconds"])
        host = ray.get_runtime_context().get_node_id()
        facts = {"host": host, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "waiting": os.environ["OMP_WAIT_POLICY"]}
        return Message(RecordDict({"where": ConfigRecord(facts)}), reply_to=message)

    return app


def ask(grid, *, seconds):
    """Send a message to every node, and return the replies in order of arrival."""
    content = RecordDict({"asked": MetricRecord({"seconds": seconds})})
    return receive(grid, [Message(content, node, "train") for node in grid.get_node_ids()], timeout=120)


def join_and_leave(cluster, tmp_path, monkeypatch, capsys):
    """A run joins the cluster and leaves it unchanged."""
    overrides = ["engine=ray", f"engine.address={cluster.address}", "num_clients=2", "clients_per_round=1", "rounds=1"]
    overrides += ["local_epochs=1", "dataset.limit=60", "encoder.width=4", "evaluation=none", "final_evaluation=none"]
    overrides += ["engine.client_gpus=0.5"]  # with a placement group
    monkeypatch.chdir(tmp_path)
    run([*overrides, "collapse_images=0", "measure_resources=false", "output_dir=run"])
    assert "1 clients at once, each on 1 of 3 CPUs and 0.5 of 3 GPUs of 2 hosts" in capsys.readouterr().out
    (line,) = (tmp_path / "run" / "clients.jsonl").read_text().splitlines()
    assert json.loads(line)["client"] in (0, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    with ray_session(gpus=None, address=cluster.address):
        deadline = time.monotonic() + 60
        while free_resources() != (3, 3) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert free_resources() == (3, 3)


def free_resources():
    free = ray.available_resources()
    return free.get("CPU"), free.get("GPU")


@pytest.mark.slow
@pytest.mark.heavy
def test_a_cluster_is_joined_and_survives_a_lost_host(cluster, tmp_path, monkeypatch, capsys):
    join_and_leave(cluster, tmp_path, monkeypatch, capsys)
    with ray_session(gpus=None, address=cluster.address) as hosts:
        assert sorted(hosts, key=lambda host: host.cpus) == [Host(1, 1), Host(2, 2)]
        client, actors = fit_clients(hosts, client_cpus=None, client_gpus=None, threads=4, max_clients=6)
        grid = RayGrid(num_clients=6, placements=["SPREAD"] * actors, client=client, client_app=telling_app())
        while len(grid._idle) < actors:
            list(grid.pull_messages([]))
        replies = list(ask(grid, seconds=0.3))
        locations = [dict(reply.content["where"]) for reply in replies]
        assert len(locations) == 6
        devices = {(location["host"], location["gpu"]) for location in locations}
        assert len(devices) == 3
        assert {location["waiting"] for location in locations} == {"PASSIVE"}

        lost = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
        second = []
        for reply in ask(grid, seconds=1.0):
            if not second:
                cluster.remove_node(lost, allow_graceful=False)
            second.append(reply)
        (failed,) = [reply for reply in second if reply.has_error()]  # that of the client on this host
        assert len(second) == 6
        assert "process died" in failed.error.reason

        third = list(ask(grid, seconds=0.0))
        assert len(third) == 6
        locations = [dict(reply.content["where"]) for reply in third]
        assert len({(location["host"], location["gpu"]) for location in locations}) == 2


HERE = {"code of fedssl": "aa", "version of python": "3.11.7", "version of torch": "2.11.0"}


@pytest.mark.parametrize(
    ("change", "has_folder", "message"),
    [
        ({"code of fedssl": "bb"}, True, r"host there has another code of fedssl \(bb\) than this one \(aa\)"),
        ({"version of torch": "2.12.0"}, True, r"another version of torch \(2.12.0\) than this one \(2.11.0\)"),
        ({}, False, "host there cannot access /shared, .* set output_dir to a folder that all hosts share"),
    ],
)
def test_a_host_that_differs_is_reported(change, has_folder, message):
    with pytest.raises(InputError, match=message):
        check_host("there", HERE | change, HERE, folder=Path("/shared/run"), has_folder=has_folder)
    check_host("there", HERE, HERE, folder=Path("/shared/run"), has_folder=True)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("somewhere", "engine.address=somewhere is not the address of a Ray cluster; set it to HOST:PORT or auto"),
        ("127.0.0.1:1", "no Ray cluster of this machine at engine.address=127.0.0.1:1 .*refused.* `ray start --head`"),
    ],
)
def test_a_missing_cluster_is_reported(address, message):
    with pytest.raises(InputError, match=message), ray_session(gpus=None, address=address):
        pass


@pytest.mark.parametrize(("setting", "remedy"), [("engine.address", "engine=local"), ("sweep.address", "sweep.jobs=1")])
def test_without_ray_the_remedy_suits_the_command(setting, remedy, monkeypatch):
    def fail(**arguments):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/shm")

    monkeypatch.setattr(ray, "init", fail)
    sentence = f"could not be started: .* No such file or directory: '/dev/shm'; use {remedy}$"
    with pytest.raises(RayNotStartedError, match=sentence), ray_session(gpus=0, setting=setting):
        pass


@pytest.mark.parametrize(
    ("parent", "sentence"),
    [
        ("missing", r"cannot write to the folder /.*/missing \(No such file or directory\); set .* RAY_TMPDIR to"),
        ("long" * 25, "longlong is too long for the sockets of Ray; set RAY_TMPDIR to a shorter one"),
    ],
)
def test_a_folder_that_ray_cannot_use_is_one_sentence(tmp_path, monkeypatch, parent, sentence):
    if parent != "missing":
        (tmp_path / parent).mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / parent))
    with pytest.raises(InputError, match=sentence), ray_session(gpus=0):
        pass


SLOW_END = """
import os, signal, sys, time
from simulation.ray_session import ray_session

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
try:
    with ray_session(gpus=0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
finally:
    time.sleep(4)  # Ray's own handler aborts after three seconds
"""


@pytest.mark.heavy
def test_a_run_that_ends_slowly_after_sigterm_is_not_aborted():
    process = subprocess.run([sys.executable, "-c", SLOW_END], cwd=REPOSITORY, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (7, "")
