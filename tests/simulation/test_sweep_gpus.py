"""Jobs of a sweep on a host with 16 logical GPUs and 4 CPUs: no GPU is idle while jobs wait."""

import json
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from simulation.parallel_jobs import JobTask, run_in_parallel
from simulation.sweep import JobWave
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_GPUS = 16
TIMEOUT = 180.0


@pytest.fixture
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_health_check_failure_threshold", "100")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        head = {"num_cpus": 4, "num_gpus": NUM_GPUS, "memory": 64e9, "object_store_memory": 200 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def wait_for_a_full_host(job, until, folder):
    """Write the GPU of a job, and wait until as many jobs of its wave have begun as fit on the host."""
    per_gpu = int(dict(override.split("=") for override in job.overrides)["jobs_per_gpu"])
    started = job.folder.parent / "started"
    started.mkdir(exist_ok=True)
    (started / job.folder.name).write_text(json.dumps(ray.get_gpu_ids()))
    number, full = int(job.folder.name), NUM_GPUS * per_gpu
    deadline = time.monotonic() + TIMEOUT
    while len(list(started.iterdir())) < (number // full + 1) * full:
        if time.monotonic() > deadline:
            return "a GPU was idle"
        time.sleep(0.05)
    return None


@pytest.mark.heavy
@pytest.mark.parametrize(("gpus", "jobs_per_gpu"), [(1.0, 1), (0.5, 2)])
def test_all_gpus_run_jobs_at_once(cluster, tmp_path, monkeypatch, capsys, gpus, jobs_per_gpu):
    monkeypatch.setattr("simulation.parallel_jobs._run_in_worker", wait_for_a_full_host)
    monkeypatch.setattr("simulation.parallel_jobs.check_hosts", lambda folder: None)
    full = NUM_GPUS * jobs_per_gpu
    jobs = [Job(tmp_path / str(number), (f"jobs_per_gpu={jobs_per_gpu}",)) for number in range(2 * full)]
    tasks = {job.folder: JobTask(job, cpus=4, gpus=gpus) for job in jobs}
    progress = SweepProgress([job.folder for job in jobs])
    run_in_parallel([JobWave(jobs)], tasks, progress, limit=None, address=cluster.address)
    assert "idle" not in capsys.readouterr().out
    used = [json.loads((tmp_path / "started" / job.folder.name).read_text())[0] for job in jobs]
    assert {used.count(gpu) for gpu in range(NUM_GPUS)} == {2 * jobs_per_gpu}
