"""Sweeps: ``fedssl -m`` runs every combination of swept values as a job.

The folder of a sweep contains one run folder for each job, by number, and `STATE_FILE` with the overrides of the jobs.
The outcome of a job is in the ``summary.json`` of its run. A sweep can therefore be resumed after any interruption.
"""

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fedssl.atomic_files import make_output_folder, new_folder, saved_rounds, write_text
from fedssl.config.compose import RESUMABLE_KEYS, hydra_value
from fedssl.config.literal import user_path
from fedssl.config.load import load_settings
from fedssl.config.overrides import by_key, key_and_group, parse, quote_value
from fedssl.config.saved_run import points_outside
from fedssl.config.settings import Settings
from fedssl.config.targets import SEARCHPATH_KEY
from fedssl.errors import InputError, RunError, sanitize
from fedssl.locks import PROBE_SECONDS, lock
from fedssl.logs import print_line
from fedssl.report.accuracy_table import NOT_FINISHED, RUNNING, sweep_results
from fedssl.runs.run import LOCK_FILE, read_run, read_summary, write_summary
from simulation.sweep_progress import SweepProgress
from simulation.sweep_state import FOLDER_KEY, PATH_KEY, STATE_FILE, Job

Runner = Callable[[Sequence[str]], object]  # runs or resumes a run with these overrides


@dataclass(frozen=True)
class JobWave:
    """Jobs that run next, until the round ``until``; None: until their end. ``work`` of a job is for time estimates."""

    jobs: Sequence[Job]
    until: int | None = None
    work: float = 1.0


def split_plan(overrides: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether ``plan=true`` is among the overrides, and the others; raises `InputError`."""
    plans = [override for override in parse(overrides) if override.key_or_group == "plan"]
    values = [override.value() for override in plans]
    if any(override.is_sweep_override() or not isinstance(override.value(), bool) for override in plans):
        raise InputError(f"{plans[-1].input_line} must be plan=true or plan=false")
    texts = {override.input_line for override in plans}
    return bool(values and values[-1]), [override for override in overrides if override not in texts]


def needs_hydra(overrides: Sequence[str]) -> bool:
    """Return whether Hydra itself must run a sweep: with its sweepers, launchers or settings."""
    keys = {override.key_or_group for override in parse(overrides)}
    ours = {FOLDER_KEY, SEARCHPATH_KEY}
    return any(key.startswith("hydra") for key in keys - ours)


def new_sweep_folder(overrides: Sequence[str], *, create: bool = True) -> Path:
    """Return the folder of a new sweep, and create it unless only its name is needed; raises `InputError`."""
    folder = user_path(str(hydra_value(overrides, "sweep.dir"))).absolute()
    if create and not {FOLDER_KEY, "experiment"} & by_key(overrides).keys():
        return new_folder(folder, FOLDER_KEY)
    if (folder / STATE_FILE).exists():
        word = shlex.quote(f"resume={folder}")
        raise InputError(f"{FOLDER_KEY}={folder} has a sweep; resume it with {word}, or choose another folder")
    if create:
        make_output_folder(folder, FOLDER_KEY)
    return folder


def folder_to_resume(overrides: Sequence[str]) -> Path | None:
    """Return the folder of the sweep to resume; None without ``resume``. Raises `InputError`."""
    for override in parse(overrides):
        if override.key_or_group != "resume":
            continue
        if override.is_sweep_override() or not (user_path(str(override.value())) / STATE_FILE).exists():
            raise InputError(
                f"{override.input_line} names no sweep, whose folder has {STATE_FILE}; resume a run without -m"
            )
        return user_path(str(override.value())).absolute()
    return None


@contextmanager
def sweep_lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a sweep, for readers that wait for more jobs; raises `InputError` if it is in use.

    If the block rejects a new sweep, the folder is removed, unless it has other files.
    """
    stream = acquire_lock(folder)
    try:
        yield
    except InputError:
        if not (folder / STATE_FILE).exists():
            (folder / LOCK_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # they are not empty
                folder.rmdir()
                if folder.parent.name == "multirun":  # else it may be a folder of the user
                    folder.parent.rmdir()
        raise
    finally:
        if stream is not None:
            stream.close()


def acquire_lock(folder: Path) -> TextIO | None:
    """Lock the folder of a sweep until the returned file is closed or this process ends; None without locks.

    Raise an `InputError` if another process has locked it.
    """
    try:
        stream = (folder / LOCK_FILE).open("w")
        if lock(stream.fileno(), patience=PROBE_SECONDS):
            return stream
    except OSError:  # a file system without locks
        return None
    raise InputError(f"{folder} is in use by another process; wait for its end, or stop it")


def group_jobs(jobs: Iterable[Job]) -> list[list[Job]]:
    """Group jobs that differ only in the seed, in the order of their first jobs."""
    groups: dict[frozenset[str], list[Job]] = {}
    for job in jobs:
        settings = frozenset(override for override in job.overrides if "seed" not in key_and_group(override))
        groups.setdefault(settings, []).append(job)
    return list(groups.values())


def group_settings(group: Iterable[Job]) -> Settings | None:
    """Return the settings of the first valid job of `group_jobs`; None if all are invalid, and fail by themselves."""
    for job in group:
        with suppress(InputError):
            return load_settings(job_overrides(job))
    return None


def check_any_valid(jobs: Sequence[Job]) -> None:
    """Raise the `InputError` of the first job if no job has valid settings."""
    errors: list[InputError] = []
    for job in jobs:
        try:
            load_settings(job_overrides(job))
        except InputError as error:
            errors.append(error)
        else:
            return
    if errors:
        raise InputError(f"no job of the sweep has valid settings: {errors[0]}")


def waiting_jobs(jobs: Sequence[Job], *, retry: bool) -> list[Job]:
    """Return the jobs that are not finished, without those that failed unless they are retried.

    Print how many are finished and have failed, if any are.
    """
    waiting, finished, failed = [], 0, []
    for job in jobs:
        run = read_run(job.folder)
        if run.running:
            raise InputError(f"{job.folder} is in use by another process; wait for its end, or stop it")
        if run.finished:
            finished += 1
        elif run.state == "failed" and not retry:
            failed.append(f"{job.name} failed: {run.failure_reason}")
        else:
            waiting.append(job)
    if failed:
        print("\n".join([*failed, "sweep.retry=true runs failed jobs again"]))
    if finished or failed:
        print(f"{finished} of {len(jobs)} jobs are finished, {len(failed)} failed", flush=True)
    return waiting


def remove_incomplete(jobs: Sequence[Job]) -> None:
    """Remove the folders of jobs of a resumed sweep that ended before their first checkpoint."""
    for job in jobs:
        if not saved_rounds(job.folder / "checkpoints"):
            shutil.rmtree(job.folder, ignore_errors=True)


def job_overrides(job: Job, *, until: int | None = None) -> list[str]:
    """Return the overrides that start or resume a job, which pauses after the round ``until``.

    What points outside the run folder is repeated: `plan_jobs` has refused it unless the user's command gives it.
    """
    pause = [] if until is None else [f"pause_after={until}"]
    if not saved_rounds(job.folder / "checkpoints"):
        return [*job.overrides, *pause, f"output_dir={quote_value(str(job.folder))}"]
    free, file = {*RESUMABLE_KEYS, PATH_KEY}, job.folder / "overrides.yaml"
    repeated = [word for word in job.overrides if key_and_group(word) & free or points_outside(word, file)]
    return [*repeated, *pause, f"resume={quote_value(str(job.folder))}"]


def run_job(job: Job, run: Runner, *, until: int | None = None) -> str | None:
    """Run or resume a job by ``run`` until a round; return the reason if it failed."""
    try:
        run(job_overrides(job, until=until))
    except Exception as error:  # the other jobs go on
        if not (job.folder / "config.yaml").exists():
            with suppress(OSError):  # the disk may be full
                write_status(job, "failed", reason=str(error))
        return sanitize(error)
    return None


def run_jobs(batches: Iterable[JobWave], run: Runner, progress: SweepProgress) -> None:
    """Run jobs one after the other."""
    for batch in batches:
        for job in batch.jobs:
            print_line(f"\n{job.name} {' '.join(job.overrides)}")
            progress.end(job.folder, run_job(job, run, until=batch.until), work=batch.work)


def finish_sweep(folder: Path, jobs: Sequence[Path], *, metric: str | None) -> int:
    """Print and write the table of a sweep. Return the exit status: 1 if a job is neither finished nor pruned."""
    table = sweep_results(jobs, metric=metric).table()
    try:
        write_text(folder / "results.csv", table.csv())
        write_text(folder / "results.md", table.markdown())
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); free disk space") from error
    print(f"\n{table.text()}\n\nresults.csv and results.md are in {folder}")
    return 1 if {NOT_FINISHED, RUNNING} & table.notes.keys() else 0


def write_status(job: Job, status: str, *, reason: str) -> None:
    """Write a status and its reason into the summary of a job."""
    summary = job.folder / "summary.json"
    content = read_summary(summary) or {"overrides": list(job.overrides), "rounds": 0}
    job.folder.mkdir(parents=True, exist_ok=True)
    write_summary(summary, {**content, "status": status, "reason": reason})
