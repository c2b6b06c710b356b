"""Jobs of a sweep in parallel, as Ray tasks on this machine or a cluster.

Each job is a run with ``engine=local`` in a worker process, with the threads of its settings, so that its results do
not depend on what runs beside it. Ray starts a job as soon as its cores, memory and GPU are free. A worker runs one job
after the other, and keeps imports and decoded images.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedssl.config.load import load_settings
from fedssl.config.settings import Settings
from fedssl.errors import InputError, RunError
from fedssl.machine.process import available_cores
from fedssl.runs.run import read_run
from simulation.ray_session import check_hosts, last_line, ray_session
from simulation.sweep import Job, job_overrides, run_job

# Memory that Ray reserves for a job: the process of a run with small images needs 0.7 to 1.1 GB.
JOB_BYTES = 1_500_000_000
STOP_TIMEOUT = 60.0  # seconds in which interrupted jobs write their checkpoints


@dataclass(frozen=True)
class JobTask:
    """A job with the CPUs and GPUs that it needs."""

    job: Job
    cpus: int
    gpus: float


def parallel_tasks(jobs: Sequence[Job], *, limit: int | None, address: str | None) -> list[JobTask] | None:
    """Return the jobs with their resources; None if they must run one after the other."""
    if limit == 1 or len(jobs) < 2 or os.name != "posix":
        return None
    tasks = []
    for job in jobs:
        try:
            settings = load_settings(job_overrides(job))
        except InputError:  # the job fails with the reason
            settings = None
        if settings is not None and settings.engine.name not in ("auto", "local"):  # it starts processes itself
            return None
        tasks.append(_task(job, settings))
    cores = available_cores()
    if address is None and not any(task.gpus for task in tasks):
        used = [task.cpus for task in tasks]
        # Few jobs on many cores are faster one after the other: each of them may use Ray for its clients.
        if cores < 2 * min(used) or 2 * sum(used) <= cores:
            return None
    return tasks


def _task(job: Job, settings: Settings | None) -> JobTask:
    from fedssl.machine.devices import count_accelerators  # slow import

    if settings is None or settings.engine.name == "auto":
        job = replace(job, overrides=(*job.overrides, "engine=local"))
    if settings is None:
        return JobTask(job, 1, 0)
    return JobTask(job, settings.machine.threads, 1 if count_accelerators(settings.machine.device) else 0)


def run_in_parallel(tasks: Sequence[JobTask], *, limit: int | None, address: str | None) -> None:
    """Run jobs as Ray tasks, at most ``limit`` at once, and print a line when one ends."""
    import ray
    from ray.exceptions import RayError

    gpus = None if address or any(task.gpus for task in tasks) else 0
    with ray_session(gpus=gpus, address=address, setting="sweep.address", log_to_driver=False):
        if address is not None:
            check_hosts(tasks[0].job.folder)
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        remote = ray.remote(max_retries=0)(_run_in_worker)
        waiting, running = list(reversed(tasks)), dict[Any, Job]()
        progress = _Progress(len(tasks))
        try:
            while waiting or running:
                while waiting and (limit is None or len(running) < limit):
                    task = waiting.pop()
                    job_task = remote.options(**reservation(task, hosts))
                    running[job_task.remote(task.job, Path.cwd())] = task.job
                done, _ = ray.wait(list(running))
                for reference in done:
                    job = running.pop(reference)
                    try:
                        reason = ray.get(reference)
                    except RayError as error:
                        reason = f"its process ended: {last_line(error)}"
                    progress.print_end(job, reason)
        except KeyboardInterrupt:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=STOP_TIMEOUT)
            raise
        except (RayError, ConnectionError) as error:
            raise RunError(f"Ray has ended during the sweep ({last_line(error)}); resume it") from error


def reservation(task: JobTask, hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what Ray reserves for a job. It would wait forever for more than the largest host has.

    ``hosts`` are the resources of Ray's hosts. Raises `InputError` if the job uses a GPU and no host has one.
    """
    usable = [host for host in hosts if host.get("GPU", 0) >= task.gpus]
    if not usable:
        raise InputError("a job uses a GPU but no host of Ray has one; set device=cpu")
    largest = max(usable, key=lambda host: host.get("CPU", 0))
    return {
        "num_cpus": min(task.cpus, largest.get("CPU", 0)),
        "num_gpus": task.gpus,
        "memory": min(JOB_BYTES, largest.get("memory", 0)),
    }


def _run_in_worker(job: Job, folder: Path) -> str | None:
    """Run a job in the working directory of the sweep; return the reason if it failed."""
    from simulation.cli import run  # the command's module imports this one

    os.chdir(folder)
    return run_job(job, run)


class _Progress:
    """Lines about jobs that have ended."""

    def __init__(self, number: int) -> None:
        self._number, self._failed, self._start = number, 0, time.monotonic()
        self._ended = 0
        self._best: dict[str, tuple[float, str]] = {}  # result and job by protocol

    def print_end(self, job: Job, reason: str | None) -> None:
        """Print the outcome of a job, and the progress of the sweep."""
        self._ended += 1
        self._failed += reason is not None
        if reason is None:
            scores = read_run(job.folder).results
            for name, score in scores.items():
                result = score.value, job.folder.name
                self._best[name] = max(self._best.get(name, result), result)
            outcome = "finished" + "".join(f" {name} {score.value:.3f}" for name, score in scores.items())
        else:
            outcome = f"failed: {reason}"
        left = (self._number - self._ended) * (time.monotonic() - self._start) / self._ended
        best = "".join(f", best {name} {value:.3f} (job {number})" for name, (value, number) in self._best.items())
        print(
            f"{job.name} {outcome}\n  {self._ended} of {self._number} jobs ended, {self._failed} failed, "
            f"about {left:.0f} s left{best}",
            flush=True,
        )
