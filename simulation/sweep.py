"""Sweeps: ``fedssl -m`` runs every combination of swept values as a job.

The folder of a sweep contains one run folder for each job, by number, and `STATE_FILE` with the overrides of the jobs.
The outcome of a job is in the ``summary.json`` of its run. A sweep can therefore be resumed after any interruption.
"""

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedssl.atomic_files import make_output_folder, saved_rounds, write_text
from fedssl.config.compose import RESULT_KEYS, RESUMABLE_KEYS, hydra_value, validate_names
from fedssl.config.literal import literal_values, user_path
from fedssl.config.load import IMAGES_FILE, compose, load_settings
from fedssl.config.overrides import by_key, key_and_group, parse, quote_value, to_text
from fedssl.config.saved_run import check_directory, check_saved_overrides, points_outside
from fedssl.config.settings import Settings
from fedssl.config.targets import SEARCHPATH_KEY
from fedssl.errors import InputError, RunError, sanitize
from fedssl.report.accuracy_table import NOT_FINISHED, sweep_results
from fedssl.runs.groups import OWN_KEYS
from fedssl.runs.run import LOCK_FILE, acquire_lock, is_locked, read_run, read_summary, write_summary
from fedssl.safe_io import checksum_line, corrupt_file_error, read_text, read_yaml
from simulation.axes import OPTIONS, expand_axes, not_in, with_experiment_values
from simulation.sweep_progress import SweepProgress

Runner = Callable[[Sequence[str]], object]  # runs or resumes a run with these overrides

STATE_FILE = "sweep.yaml"
FOLDER_KEY, PATH_KEY = "hydra.sweep.dir", "dataset.path"
SAVED_OPTIONS = {"metric", "reduction_factor", "min_rounds", *OPTIONS}  # they decide which jobs there are, or end early


@dataclass(frozen=True)
class Job:
    """A job of a sweep. ``overrides`` are those of a new run, without its folder."""

    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"[job {self.folder.name}]"


@dataclass(frozen=True)
class JobWave:
    """Jobs that run next, until the round ``until``; None: until their end. ``work`` of a job is for time estimates."""

    jobs: Sequence[Job]
    until: int | None = None
    work: float = 1.0


def split_options(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the explicit options of the sweep by name, and the other overrides; raises `InputError`."""
    options = [override for override in overrides if override.partition("=")[0].split(".")[0] == "sweep"]
    for override in parse(options):
        if override.key_or_group == "sweep":
            raise InputError(f"{override.input_line} must name an option, e.g. sweep.jobs=2")
        if override.is_sweep_override():
            raise InputError(f"{override.input_line} has several values, but an option of a sweep has one")
    compose(options)  # validates them
    values = {override.key_or_group.removeprefix("sweep."): override.value() for override in parse(options)}
    return values, [override for override in overrides if override not in options]


def split_plan(overrides: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether ``plan=true`` is among the overrides, and the others; raises `InputError`."""
    plans = [override for override in parse(overrides) if override.key_or_group == "plan"]
    values = [override.value() for override in plans]
    if any(override.is_sweep_override() or not isinstance(override.value(), bool) for override in plans):
        raise InputError(f"{plans[-1].input_line} must be plan=true or plan=false")
    texts = {override.input_line for override in plans}
    return bool(values and values[-1]), [override for override in overrides if override not in texts]


def needs_hydra(flags: Sequence[str], overrides: Sequence[str]) -> bool:
    """Return whether Hydra itself must run a sweep: with its other flags, sweepers, launchers or settings."""
    keys = {override.key_or_group for override in parse(overrides)}
    ours = {FOLDER_KEY, SEARCHPATH_KEY}
    return not {"-m", "--multirun"}.issuperset(flags) or any(key.startswith("hydra") for key in keys - ours)


def new_sweep_folder(overrides: Sequence[str], *, create: bool = True) -> Path:
    """Return the folder of a new sweep, and create it unless only its name is needed; raises `InputError`."""
    folder = user_path(str(hydra_value(overrides, "sweep.dir"))).absolute()
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
    if is_locked(folder):
        raise InputError(f"{folder} is in use by another process; wait for its end, or stop it")
    lock = acquire_lock(folder)
    try:
        yield
    except InputError:
        if not (folder / STATE_FILE).exists():
            (folder / LOCK_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # they are not empty
                folder.rmdir()
                folder.parent.rmdir()
        raise
    finally:
        if lock is not None:
            lock.close()


@dataclass(frozen=True)
class SweepState:
    """The content of `STATE_FILE`: overrides of the sweep, those of its jobs by number, and `SAVED_OPTIONS`.

    ``directory`` is the working directory in which it was started, to which paths may be relative.
    """

    overrides: list[str]
    jobs: dict[str, list[str]]
    options: dict[str, Any]
    directory: str

    def jobs_in(self, folder: Path) -> list[Job]:
        """Return the jobs of the sweep in a folder."""
        return [Job(folder / name, tuple(job)) for name, job in self.jobs.items()]

    def resume_command(self, folder: Path) -> str:
        """Return the shell command that resumes the sweep in a folder, with what is accepted only from there."""
        words = {word for job in self.jobs.values() for word in job if points_outside(word, folder / STATE_FILE)}
        own = [word for word in self.overrides if word.partition("=")[0] in by_key(words)]
        return shlex.join(["fedssl", "-m", *own, f"resume={folder}"])

    def save(self, folder: Path) -> None:
        """Write the file into the folder of the sweep."""
        options = [f"sweep.{name}={to_text(value)}" for name, value in self.options.items()]
        content = {"overrides": self.overrides, "jobs": self.jobs, "options": options, "directory": self.directory}
        text = "# To change a sweep, give overrides: fedssl -m resume=FOLDER key=value. An edited file is refused.\n"
        text += yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        # An edited job would count as finished with the results of other settings.
        write_text(folder / STATE_FILE, f"{checksum_line(text)}\n{text}")


def plan_jobs(folder: Path, overrides: Sequence[str], options: Mapping[str, Any] = {}) -> SweepState:
    """Return the jobs of a sweep, those of its earlier start first.

    New overrides replace earlier ones of the same key or group, and so do options. A job keeps its number if its
    settings are the same, apart from `RESUMABLE_KEYS` that are not swept and change no result, and the path of the same
    images. Saved overrides are validated as those of a run folder. Raises `InputError`, also if the folder of a new job
    exists.
    """
    given = by_key(with_experiment_values(overrides))
    given.pop(FOLDER_KEY, None)
    earlier = _read_state(folder / STATE_FILE)
    inherited = not_in(earlier.overrides, given.values())
    check_directory(inherited, folder / STATE_FILE, directory=earlier.directory)
    merged = [*inherited, *given.values()]
    swept = {override.key_or_group for override in parse(merged) if override.is_sweep_override()}
    kept = [override for override in inherited if not key_and_group(override) & swept]
    check_saved_overrides(kept, folder / STATE_FILE)
    free = (RESUMABLE_KEYS - RESULT_KEYS - swept) | {SEARCHPATH_KEY}
    if PATH_KEY in given.keys() - swept:
        current = [override for override in given.values() if key_and_group(override) & {*free, PATH_KEY}]
        free |= {PATH_KEY} if _have_moved(earlier.jobs_in(folder), current) else set()
    current = [override for override in given.values() if key_and_group(override) & free]
    jobs = {}
    for name, job in earlier.jobs.items():
        kept = not_in(job, current)
        check_saved_overrides(kept, folder / STATE_FILE)
        jobs[name] = [*kept, *current]
    names = {_identity(job, free): name for name, job in jobs.items()}
    if len(names) < len(jobs):
        raise corrupt_file_error(folder / STATE_FILE, "it has a job twice")
    options = earlier.options | {name: value for name, value in options.items() if name in SAVED_OPTIONS}
    for job in expand_axes(merged, options):
        if _identity(job, free) in names:
            continue
        check_saved_overrides(not_in(job, given.values()), folder / STATE_FILE)
        name = names[_identity(job, free)] = str(len(jobs))
        jobs[name] = job
        if (folder / name).exists():
            raise InputError(f"{folder / name} exists but is no job of this sweep; set another {FOLDER_KEY} or move it")
    validate_names(merged)
    return SweepState(merged, jobs, options, str(Path.cwd()))


def _have_moved(jobs: Sequence[Job], current: Sequence[str]) -> bool:
    """Return whether overrides name a new path of the images of all jobs, by the digest of the first that has begun."""
    paths = {by_key(job.overrides).get(PATH_KEY) for job in jobs}
    for job in jobs if len(paths) == 1 and by_key(current)[PATH_KEY] not in paths else ():
        saved = read_text(job.folder / IMAGES_FILE)
        if saved is not None:
            from fedssl.datasets.base import load_federated  # slow import

            kept = not_in(job.overrides, current)
            check_saved_overrides(kept, job.folder.with_name(STATE_FILE))
            origin = load_federated(load_settings([*kept, *current]).data).origin
            return origin is not None and origin[0].describe_files() == saved.strip()
    return False


def _read_state(file: Path) -> SweepState:
    """Return the saved state of a sweep, empty if it is new; raises `InputError` if the file is damaged."""
    saved: Any = read_yaml(file, dict) or {"overrides": [], "jobs": {}}
    overrides, jobs, options = saved.get("overrides"), saved.get("jobs"), saved.get("options", [])
    lists: list[Any] = [overrides, options, *jobs.values()] if isinstance(jobs, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists):
        raise corrupt_file_error(file, "it has no lists of overrides")
    directory = saved.get("directory", str(Path.cwd()))
    if list(jobs) != [str(number) for number in range(len(jobs))]:
        raise corrupt_file_error(file, "the jobs are not numbered from 0")
    if any(by_key(each).keys() & OWN_KEYS for each in lists):
        raise corrupt_file_error(file, f"it sets {' or '.join(sorted(OWN_KEYS))}")
    check_saved_overrides(options, file)  # before they are composed
    values, others = split_options(options)
    if others or values.keys() - SAVED_OPTIONS:
        raise corrupt_file_error(file, f"its options are not {', '.join(sorted(SAVED_OPTIONS))}")
    jobs = {name: literal_values(job) for name, job in jobs.items()}  # as on the command line
    return SweepState(literal_values(overrides, sweep=True), jobs, values, directory)


def _identity(overrides: Iterable[str], free: Set[str]) -> frozenset[str]:
    """Return the overrides that decide whether two jobs are the same run: those of keys that are not ``free``."""
    return frozenset(override for override in overrides if not key_and_group(override) & free)


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
    """Return the overrides that start or resume a job, which pauses after the round ``until``."""
    pause = [] if until is None else [f"pause_after={until}"]
    if not saved_rounds(job.folder / "checkpoints"):
        return [*job.overrides, *pause, f"output_dir={quote_value(str(job.folder))}"]
    free = [override for override in job.overrides if key_and_group(override) & {*RESUMABLE_KEYS, PATH_KEY}]
    return [*free, *pause, f"resume={quote_value(str(job.folder))}"]


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
            print(f"\n{job.name} {' '.join(job.overrides)}", flush=True)
            progress.end(job.folder, run_job(job, run, until=batch.until), work=batch.work)


def finish_sweep(folder: Path, jobs: Sequence[Path], *, metric: str | None) -> int:
    """Print and write the table of a sweep. Return the exit status, which is 1 if a job is not finished or pruned."""
    table = sweep_results(jobs, metric=metric).table()
    try:
        write_text(folder / "results.csv", table.csv())
        write_text(folder / "results.md", table.markdown())
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); free disk space") from error
    print(f"\n{table.text()}\n\nresults.csv and results.md are in {folder}")
    return 1 if NOT_FINISHED in table.notes else 0


def write_status(job: Job, status: str, *, reason: str) -> None:
    """Write a status and its reason into the summary of a job."""
    summary = job.folder / "summary.json"
    content = read_summary(summary) or {"overrides": list(job.overrides), "rounds": 0}
    job.folder.mkdir(parents=True, exist_ok=True)
    write_summary(summary, {**content, "status": status, "reason": reason})
