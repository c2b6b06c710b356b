"""Jobs of a sweep in parallel, as Ray tasks on this machine or a cluster.

Each job is a run with ``engine=local`` in a worker process, with the threads of its settings, so that its results do
not depend on what runs beside it. Ray starts a job as soon as its cores, memory and GPU are free. A worker runs one job
after the other, and keeps imports and decoded images.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedssl.config.load import parse_client_config, with_run_folder
from fedssl.config.settings import Settings
from fedssl.errors import InputError, RunError
from fedssl.machine.process import available_cores
from simulation.ray_session import check_hosts, last_line, ray_session
from simulation.run import run
from simulation.sweep import JobWave, group_jobs, group_settings, run_job
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import Job

# Reserved for a job, in addition to the memory of a training step: a run of small images needs 0.7 to 1.1 GB.
JOB_BYTES = 1_300_000_000
STOP_TIMEOUT = 60.0  # seconds in which interrupted jobs write their checkpoints


@dataclass(frozen=True)
class JobTask:
    """A job with the CPUs, GPUs and bytes of memory that it needs."""

    job: Job
    cpus: int
    gpus: float
    memory: int = JOB_BYTES


def parallel_tasks(
    jobs: Sequence[Job], *, limit: int | None, address: str | None, gpus: float = 1
) -> dict[Path, JobTask] | None:
    """Return the jobs with their resources, by folder; None if they must run one after the other.

    ``gpus`` is the number of GPUs of a job that uses any.
    """
    if gpus > 1 and gpus != int(gpus):
        raise InputError(f"sweep.gpus={gpus} must be a share of at most 1, or a whole number of GPUs")
    if not jobs or (address is None and (limit == 1 or len(jobs) < 2 or os.name != "posix")):
        return None
    tasks: dict[Path, JobTask] = {}
    for group in group_jobs(jobs):  # jobs that differ only in the seed need the same
        settings = group_settings(group)
        if settings is not None and settings.engine.name not in ("auto", "local"):  # it starts processes itself
            if address is not None:
                engine = settings.engine.name
                raise InputError(
                    f"sweep.address={address} runs jobs with engine=local only, not {engine}; leave it out"
                )
            return None
        first = _task(group[0], settings, gpus=gpus)
        added = first.job.overrides[len(group[0].overrides) :]
        tasks |= {job.folder: replace(first, job=replace(job, overrides=(*job.overrides, *added))) for job in group}
    cores = available_cores()
    if address is None and not any(task.gpus for task in tasks.values()):
        used = [task.cpus for task in tasks.values()]
        # Few jobs on many cores are faster one after the other: each of them may use Ray for its clients.
        if cores < 2 * min(used) or 2 * sum(used) <= cores:
            return None
    return tasks


def _task(job: Job, settings: Settings | None, *, gpus: float) -> JobTask:
    from client_app.step_memory import estimate_step_memory  # slow imports
    from fedssl.machine.devices import count_accelerators

    if settings is None or settings.engine.name == "auto":
        job = replace(job, overrides=(*job.overrides, "engine=local"))
    if settings is None:
        return JobTask(job, 1, 0)
    if count_accelerators(settings.machine.device):
        return JobTask(job, settings.machine.threads, gpus)
    memory = JOB_BYTES
    with suppress(InputError):  # the job fails with the reason, or has an encoder of the user without an estimate
        step = estimate_step_memory(parse_client_config(with_run_folder(settings, job.folder).client_yaml))
        memory += step.of_batch(settings.training.batch_size)
    return JobTask(job, settings.machine.threads, 0, memory)


def run_in_parallel(
    batches: Iterable[JobWave],
    tasks: Mapping[Path, JobTask],
    progress: SweepProgress,
    *,
    limit: int | None,
    address: str | None,
) -> None:
    """Run the jobs of batches as Ray tasks, at most ``limit`` at once. A batch starts when the one before has ended."""
    import ray
    from ray.exceptions import RayError

    gpus = None if address or any(task.gpus for task in tasks.values()) else 0
    running = dict[Any, Job]()
    common = set[str].intersection(*(set(task.job.overrides) for task in tasks.values()))

    def swept_overrides() -> dict[Path, list[str]]:
        return {job.folder: [o for o in job.overrides if o not in common] for job in [*running.values()]}

    with (
        ray_session(gpus=gpus, address=address, setting="sweep.address", log_to_driver=False),
        progress.live(swept_overrides),
    ):
        if address is not None:
            check_hosts(next(iter(tasks)))
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        try:
            for batch in batches:
                next_tasks = [tasks[job.folder] for job in batch.jobs]
                _run_batch(batch, next_tasks, running, progress, limit=limit, hosts=hosts)
        except KeyboardInterrupt:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=STOP_TIMEOUT)
            raise
        except (RayError, ConnectionError) as error:
            raise RunError(f"Ray has ended during the sweep ({last_line(error)}); resume it") from error


def _run_batch(
    batch: JobWave,
    tasks: Sequence[JobTask],
    running: dict[Any, Job],
    progress: SweepProgress,
    *,
    limit: int | None,
    hosts: Sequence[Mapping[str, float]],
) -> None:
    """Run jobs until the last one has ended. ``running`` has the unfinished jobs by Ray's reference."""
    import ray
    from ray.exceptions import RayError

    remote = ray.remote(max_retries=0)(_run_in_worker)
    waiting = list(reversed(tasks))
    while waiting or running:
        while waiting and (limit is None or len(running) < limit):
            task = waiting.pop()
            job_task = remote.options(**reservation(task, hosts))
            running[job_task.remote(task.job, batch.until, Path.cwd())] = task.job
        done, _ = ray.wait(list(running))
        for reference in done:
            job = running.pop(reference)
            try:
                reason = ray.get(reference)
            except RayError as error:
                reason = f"its process ended: {last_line(error)}"
            progress.end(job.folder, reason, work=batch.work)


def reservation(task: JobTask, hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what Ray reserves for a job. It would wait forever for more than the largest host has.

    ``hosts`` are the resources of Ray's hosts. Raises `InputError` if the job uses a GPU and no host has one.
    """
    usable = [host for host in hosts if host.get("GPU", 0) >= task.gpus]
    if not usable:
        raise InputError("a job uses a GPU but no host of Ray has one; set device=cpu")
    largest = max(usable, key=lambda host: host.get("CPU", 0))
    cpus = min(task.cpus, largest.get("CPU", 0))
    if task.gpus:  # no GPU may wait for a CPU
        cpus = min(cpus, *(host["CPU"] * task.gpus / host["GPU"] for host in usable))
        cpus = int(cpus) if cpus > 1 else cpus  # Ray allows fractions below 1
    return {
        "num_cpus": cpus,
        "num_gpus": task.gpus,
        "memory": min(task.memory, largest.get("memory", 0)),
    }


def _run_in_worker(job: Job, until: int | None, folder: Path) -> str | None:
    """Run a job in the working directory of the sweep until a round; return the reason if it failed."""
    os.chdir(folder)
    return run_job(job, run, until=until)
