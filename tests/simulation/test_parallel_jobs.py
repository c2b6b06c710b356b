"""Jobs of a sweep in parallel: what each reserves of the cores, the memory and the GPUs."""

from dataclasses import replace

import pytest

from fedssl.errors import InputError
from simulation.cli import _run_sweep
from simulation.parallel_jobs import JOB_BYTES, JobTask, parallel_tasks, reservation
from simulation.sweep_state import Job
from tests.simulation.test_sweep import QUICK, plan_jobs


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr("simulation.parallel_jobs.available_cores", lambda: 4)


def test_jobs_have_their_threads_and_one_process(tmp_path):
    jobs = plan_jobs(tmp_path, [*QUICK[:-1], "threads=1,2"])
    tasks = parallel_tasks(jobs, limit=None, address=None)
    assert [(task.cpus, task.gpus) for task in tasks.values()] == [(1, 0), (2, 0)]
    assert all(JOB_BYTES < task.memory < 1.05 * JOB_BYTES for task in tasks.values())
    assert all(task.job.overrides[-1] == "engine=local" for task in tasks.values())


def test_an_invalid_seed_changes_no_other_job(tmp_path):
    jobs = plan_jobs(tmp_path, [*QUICK[:-1], "threads=2", "seed=-1,0,1"])
    tasks = parallel_tasks(jobs, limit=None, address=None)
    assert [task.cpus for task in tasks.values()] == [2, 2, 2]


def test_memory_of_a_step_is_reserved(tmp_path):
    """The stem of ResNet-18 saves 64 maps of 64 x 64 float32 for each image. The batches differ by 510 images."""
    overrides = [*QUICK[:4], "encoder=resnet18", "dataset.size=64", "threads=1", "seed=0,1,2"]
    small, large = (
        next(iter(parallel_tasks(plan_jobs(folder, [*overrides, batch]), limit=None, address=None).values())).memory
        for folder, batch in ((tmp_path / "0", "batch_size=2"), (tmp_path / "1", "batch_size=512"))
    )
    assert large - small > 510 * 64 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        (["seed=0,1,2"], 1),
        (["seed=0"], None),  # one job
        (["seed=0,1"], None),  # half of the cores: each job may use Ray for its clients
        (["seed=0,1,2", "threads=3"], None),  # two do not fit
        (["seed=0,1,2", "engine=ray"], None),
    ],
)
def test_other_jobs_run_one_after_the_other(tmp_path, overrides, limit):
    assert parallel_tasks(plan_jobs(tmp_path, overrides), limit=limit, address=None) is None


def test_no_more_is_reserved_than_the_largest_host_has(tmp_path):
    task = JobTask(Job(tmp_path, ()), cpus=8, gpus=0)
    small, large = {"CPU": 2.0, "memory": 8e9}, {"CPU": 4.0, "memory": 1e9, "GPU": 1.0}
    assert reservation(task, [small, large]) == {"num_cpus": 4, "num_gpus": 0, "memory": 1e9}
    assert reservation(task, [small]) == {"num_cpus": 2, "num_gpus": 0, "memory": JOB_BYTES}
    assert reservation(replace(task, memory=10**10), [small])["memory"] == 8e9
    on_gpu = JobTask(Job(tmp_path, ()), cpus=1, gpus=1)
    assert reservation(on_gpu, [small, large])["num_gpus"] == 1
    with pytest.raises(InputError, match="no host of Ray has one; set device=cpu"):
        reservation(on_gpu, [small])


def test_a_share_of_several_gpus_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"sweep.gpus=1.5 must be a share of at most 1, or a whole number of GPUs"):
        _run_sweep(["seed=0,1", "sweep.gpus=1.5", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("seeds", "limit"), [("0", None), ("0,1", 1)])
def test_a_cluster_runs_also_one_job_at_a_time(tmp_path, seeds, limit):
    jobs = plan_jobs(tmp_path, [*QUICK, f"seed={seeds}"])
    assert len(parallel_tasks(jobs, limit=limit, address="auto")) == len(jobs)
    ray_jobs = plan_jobs(tmp_path / "ray", [*QUICK, "engine=ray"])
    with pytest.raises(InputError, match="sweep.address=auto runs jobs with engine=local only, not ray; leave it out"):
        parallel_tasks(ray_jobs, limit=limit, address="auto")


def test_an_invalid_job_fails_by_itself(tmp_path):
    jobs = plan_jobs(tmp_path, ["num_clients=3", "clients_per_round=1,2,9"])
    assert len(parallel_tasks(jobs, limit=None, address=None)) == 3


def test_no_gpu_waits_for_a_cpu(tmp_path):
    """16 GPUs and 8 CPUs: half a CPU for each job, and a quarter for two jobs per GPU."""
    host = {"CPU": 8.0, "memory": 1e12, "GPU": 16.0}
    assert reservation(JobTask(Job(tmp_path, ()), cpus=4, gpus=1), [host])["num_cpus"] == 0.5
    assert reservation(JobTask(Job(tmp_path, ()), cpus=4, gpus=0.5), [host])["num_cpus"] == 0.25
    assert reservation(JobTask(Job(tmp_path, ()), cpus=4, gpus=1), [{**host, "CPU": 40.0}])["num_cpus"] == 2
    assert reservation(JobTask(Job(tmp_path, ()), cpus=4, gpus=1), [{**host, "CPU": 99.0}])["num_cpus"] == 4
