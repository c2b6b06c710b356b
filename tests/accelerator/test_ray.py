"""Runs on Ray with a strict accelerator for each of its logical GPUs: which client uses which, and what is lost."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from fedssl.config.load import load_settings, with_run_folder
from fedssl.machine.devices import device_with_most_memory
from simulation.gpu_placement import OUTSIDE_TENSORS, client_memory, device_failure
from simulation.run import run
from tests.accelerator import device, on_ray
from tests.accelerator.results import assert_equal, numbers_of
from tests.accelerator.test_runs import BASE

SMALL = [*BASE, "encoder.width=4", "num_clients=8", "dataset.limit=160", "channels_last=false"]
EVALUATED = [*SMALL, "num_clients=4", "evaluate_every=1", "final_evaluation=knn", "method=byol", "strategy=fedu"]
GB = 10**9
Line = dict[str, Any]


def memory_of_a_client(folder: Path, num_bytes: int, overrides: list[str]) -> tuple[int, int, int]:
    """Return free memory, memory of a client and number of clients on a device with this memory."""
    gc.collect()  # of earlier tests
    used = torch.accelerator.memory_allocated(f"{device.NAME}:1")
    with device.limited_memory(torch.device(device.NAME, 1), used + num_bytes):
        memory = client_memory(with_run_folder(load_settings(overrides), folder).client_yaml)
    return memory.free, memory.each, memory.clients


def test_the_memory_of_a_client_is_measured(accelerator, tmp_path):
    small = accelerator(memory_of_a_client, tmp_path, 4 * GB, SMALL).result()
    large = accelerator(memory_of_a_client, tmp_path, 4 * GB, [*SMALL, "encoder.width=64"]).result()
    assert small[0] == large[0] == 4 * GB
    assert small[2] == 6
    weights = 4 * 64 * 64 * 9  # bytes of the largest layer, which is in memory three times with gradient and momentum
    assert OUTSIDE_TENSORS + 1_000_000 < small[1] < small[1] + 3 * weights < large[1]
    barely = small[1] - OUTSIDE_TENSORS - 10_000  # too little for a step
    assert accelerator(memory_of_a_client, tmp_path, barely, SMALL).result() == (barely, barely, 1)


def test_no_memory_is_measured_on_a_cpu(tmp_path):
    assert client_memory(with_run_folder(load_settings(SMALL), tmp_path).client_yaml) is None


def devices_with_memory(*num_bytes: int) -> list[str]:
    def select_device(name: str) -> torch.device:  # that of other processes selects one of the two
        return torch.device(device.NAME if name == "auto" else name)

    with (
        device.limited_memory(torch.device(device.NAME, 0), num_bytes[0]),
        device.limited_memory(torch.device(device.NAME, 1), num_bytes[1]),
        patch("fedssl.machine.devices.select_device", select_device),
    ):
        return [device_with_most_memory(name) for name in ("auto", device.NAME, f"{device.NAME}:0", "cpu")]


@pytest.mark.parametrize(("num_bytes", "found"), [((9 * GB, GB), 0), ((GB, 9 * GB), 1), ((0, 0), 1)])
def test_the_server_uses_the_device_with_most_free_memory(accelerator, num_bytes, found):
    expected = [f"{device.NAME}:{found}"] * 2 + [f"{device.NAME}:0", "cpu"]
    assert accelerator(devices_with_memory, *num_bytes).result() == expected


def failures() -> list[str | None]:
    """Return the failures of a device that works, of one that is full, and of one that does not exist."""
    full = torch.device(device.NAME, 1)
    with device.limited_memory(full, 0):
        return [device_failure(torch.device(device.NAME, index)) for index in (0, 1, 7)]


def test_a_full_device_has_not_failed(accelerator):
    assert accelerator(failures).result() == [None, None, "pretend:7 does not exist"]
    assert device_failure(torch.device("cpu")) is None


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Return the environment of a run on Ray; skip the test without a compiler."""
    if device.compiler() is None:
        pytest.skip("the strict accelerator is a C++ extension, and there is no compiler (g++, or $CXX)")
    device.build()
    (tmp_path / "lost").mkdir()
    own = {on_ray.CPUS: "4", on_ray.TRAINED: str(tmp_path / "trained"), on_ray.LOST: str(tmp_path / "lost")}
    return os.environ | own | {"PYTHONPATH": str(device.ROOT), "PYTHONUNBUFFERED": "1"}


def start(overrides: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.accelerator.on_ray", "engine=ray", *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_on_ray(overrides: list[str], environment: dict[str, str]) -> tuple[str, list[Line], Line]:
    """Return the output, what each client of each round has used, and what the server has used."""
    process = start(overrides, environment)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    *clients, server = read_lines(environment)
    assert server["client"] == "server"
    return output, clients, server


def read_lines(environment: dict[str, str]) -> list[Line]:
    return [json.loads(line) for line in Path(environment[on_ray.TRAINED]).read_text().splitlines()]


def processes_of_gpus(clients: list[Line]) -> dict[tuple[str, str], int]:
    """Return the number of processes on each GPU of each host; each has used only the GPU that Ray assigned."""
    for line in clients:
        assert [index for index, peak in enumerate(line["peaks"]) if peak] == [int(line["visible"])]
    return Counter(place for place, _ in {((line["host"], line["visible"]), line["pid"]) for line in clients})


@pytest.mark.heavy
def test_one_client_per_gpu_and_the_server_where_memory_is(accelerator, environment, tmp_path):
    """The numbers are those of one process on one device, bit for bit."""
    environment[on_ray.MEMORY] = f"{2 * GB},{8 * GB},{4 * GB},{4 * GB}"
    output, clients, server = run_on_ray([*EVALUATED, f"output_dir={tmp_path / 'ray'}"], environment)
    assert "4 clients at once, each on 1 of 4 CPUs and 1 of 4 GPUs" in output
    assert set(processes_of_gpus(clients).values()) == {1}
    assert "the server uses pretend:1" in output
    assert [index for index, peak in enumerate(server["peaks"]) if peak] == [1]
    accelerator(run, [*EVALUATED, "engine=local", f"output_dir={tmp_path / 'local'}"]).result()
    assert_equal(numbers_of(tmp_path / "ray"), numbers_of(tmp_path / "local"))


@pytest.mark.heavy
def test_shares_use_every_gpu_before_any_has_two_clients(environment, tmp_path):
    environment[on_ray.CPUS] = "6"
    overrides = [*SMALL, "engine.client_gpus=0.25", "rounds=1", f"output_dir={tmp_path / 'run'}"]
    output, clients, _ = run_on_ray(overrides, environment)
    assert "6 clients at once, each on 1 of 6 CPUs and 0.25 of 4 GPUs" in output
    assert sorted(processes_of_gpus(clients).values()) == [1, 1, 2, 2]


@pytest.mark.heavy
@pytest.mark.parametrize(("num_bytes", "fit"), [(2 * OUTSIDE_TENSORS + 10**6, 1), (2 * OUTSIDE_TENSORS + GB // 4, 2)])
def test_measured_memory_limits_the_clients_of_a_gpu(environment, tmp_path, num_bytes, fit):
    """Without the tensors of a step, which occupy more than a megabyte, two clients would fit both times."""
    environment |= {on_ray.MEMORY: ",".join([str(num_bytes)] * 4), on_ray.CPUS: "8"}
    output, clients, _ = run_on_ray([*SMALL, "rounds=1", f"output_dir={tmp_path / 'run'}"], environment)
    limited = ", because each needs 601 MB of GPU memory" if fit == 1 else ""
    share = {1: "1", 2: "0.5"}[fit]
    assert f"{4 * fit} clients at once, each on 1 of 8 CPUs and {share} of 4 GPUs{limited}\n" in output
    assert max(processes_of_gpus(clients).values()) == fit


@pytest.mark.heavy
def test_a_lost_gpu_costs_one_client_of_one_round(environment, tmp_path):
    folder = tmp_path / "run"
    process = start([*SMALL, "rounds=1000", f"output_dir={folder}"], environment)
    assert process.stdout is not None
    output, again = "", 0
    for line in process.stdout:
        output += line
        if "round 2/" in line:
            (tmp_path / "lost" / "2").touch()
        again += "has failed again" in output and "round " in line
        if again == 3:
            break
    os.killpg(process.pid, signal.SIGINT)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    assert "continue with: fedssl resume=" in output
    assert output.count("its process for clients is restarted: GPU 2 of ") == 1
    assert output.count("a GPU has failed again, and one process less is used for clients: GPU 2 of ") == 1
    assert "pretend error: device 2 is lost" in output
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = Counter(json.loads(line)["round"] for line in (folder / "clients.jsonl").read_text().splitlines())
    assert sorted(trained[metrics["round"]] for metrics in rounds) == [7] + [8] * (len(rounds) - 1)
    assert {line["visible"] for line in read_lines(environment)[-8:]} <= {"0", "1", "3"}


@pytest.fixture
def cluster(environment) -> Iterator[Cluster]:
    """Two hosts with one GPU and with three, whose workers have the devices."""
    with pytest.MonkeyPatch.context() as variables:
        for name, value in environment.items():
            variables.setenv(name, value)
        variables.setenv("RAY_worker_niceness", "0")
        variables.setenv("RAY_health_check_failure_threshold", "100")
        variables.setenv("PYTHONPATH", os.pathsep.join([str(on_ray.HOOKS), str(device.ROOT)]))
        memory = {"object_store_memory": 200 * 2**20}
        head = {"num_cpus": 8, "num_gpus": 1, "include_dashboard": False, **memory}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, num_gpus=3, **memory)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.heavy
def test_two_hosts_with_different_numbers_of_gpus(accelerator, environment, cluster, tmp_path):
    """The second host has CPUs for two clients only, which are on two of its GPUs."""
    on_cluster = ["engine.client_gpus=0.5", f"engine.address={cluster.address}", f"output_dir={tmp_path / 'ray'}"]
    output, clients, _ = run_on_ray([*SMALL, *on_cluster], environment)
    assert "4 clients at once, each on 1 of 10 CPUs and 0.5 of 4 GPUs of 2 hosts" in output
    one, other = cluster.head_node.node_id, cluster.worker_nodes.copy().pop().node_id
    assert processes_of_gpus(clients) == {(one, "0"): 2, (other, "0"): 1, (other, "1"): 1}
    accelerator(run, [*SMALL, "engine=local", f"output_dir={tmp_path / 'local'}"]).result()
    assert_equal(numbers_of(tmp_path / "ray"), numbers_of(tmp_path / "local"))
