"""The jobs of a sweep, and the file with their overrides, by which a sweep is resumed."""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedssl.atomic_files import write_text
from fedssl.config.compose import RESULT_KEYS, RESUMABLE_KEYS, validate_names
from fedssl.config.literal import literal_values
from fedssl.config.load import IMAGES_FILE, compose, load_settings
from fedssl.config.overrides import by_key, key_and_group, parse, to_text
from fedssl.config.saved_run import check_directory, check_saved_overrides, points_outside
from fedssl.config.targets import SEARCHPATH_KEY
from fedssl.errors import InputError
from fedssl.runs.groups import OWN_KEYS
from fedssl.safe_io import checksum_line, corrupt_file_error, read_text, read_yaml
from simulation.axes import OPTIONS, axes_of, expand_axes, not_in, possible_values, with_experiment_values

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
        if words - possible_values(own, {}):
            own.append(f"sweep.axes={to_text(axes_of(self.overrides, self.options))}")
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
    settings are the same, apart from `RESUMABLE_KEYS` that change no result and are the same in all jobs, and the path
    of the same images. What the user's command does not give is validated as the overrides of a run folder. Raises
    `InputError`, also if the folder of a new job exists.
    """
    file, given = folder / STATE_FILE, by_key(with_experiment_values(overrides))
    given.pop(FOLDER_KEY, None)
    options = {name: value for name, value in options.items() if name in SAVED_OPTIONS}
    if options.get("reduction_factor", 0) is None:  # without pruning no earlier number of rounds has an effect
        options = {"min_rounds": None, **options}
    own = possible_values([*given.values()], options)
    earlier = _read_state(file, replaced=options.keys())
    inherited = not_in(earlier.overrides, given.values())
    check_directory(inherited, file, directory=earlier.directory)
    merged = [*inherited, *given.values()]
    swept = {override.key_or_group for override in parse(merged) if override.is_sweep_override()}
    check_saved_overrides([override for override in inherited if not key_and_group(override) & swept], file)
    options = earlier.options | options
    expanded = expand_axes(merged, options)
    differing = _differing_keys(expanded) | _differing_keys(earlier.jobs.values())
    free = (RESUMABLE_KEYS - RESULT_KEYS | {SEARCHPATH_KEY}) - differing
    current = [override for override in given.values() if key_and_group(override) & free]
    for job in (*expanded, *(not_in(job, current) for job in earlier.jobs.values())):
        check_saved_overrides([override for override in job if override not in own], file)
    if PATH_KEY in given.keys() - differing and _have_moved(earlier.jobs_in(folder), [*current, given[PATH_KEY]]):
        free, current = free | {PATH_KEY}, [*current, given[PATH_KEY]]
    jobs = {name: [*not_in(job, current), *current] for name, job in earlier.jobs.items()}
    names = {_identity(job, free): name for name, job in jobs.items()}
    if len(names) < len(jobs):
        raise corrupt_file_error(file, "it has a job twice")
    for job in expanded:
        if _identity(job, free) in names:
            continue
        name = names[_identity(job, free)] = str(len(jobs))
        jobs[name] = job
        if (folder / name).exists():
            raise InputError(f"{folder / name} exists but is no job of this sweep; set another {FOLDER_KEY} or move it")
    validate_names(merged)
    return SweepState(merged, jobs, options, str(Path.cwd()))


def _differing_keys(jobs: Collection[Sequence[str]]) -> set[str]:
    """Return the keys and groups of the overrides in which jobs differ."""
    counts = Counter(override for job in jobs for override in {*job})
    return {key for override, count in counts.items() if count < len(jobs) for key in key_and_group(override)}


def _have_moved(jobs: Sequence[Job], current: Sequence[str]) -> bool:
    """Return whether overrides name a new path of the images of all jobs, by the digest of the first that has begun."""
    paths = {by_key(job.overrides).get(PATH_KEY) for job in jobs}
    for job in jobs if len(paths) == 1 and by_key(current)[PATH_KEY] not in paths else ():
        saved = read_text(job.folder / IMAGES_FILE)
        if saved is not None:
            from fedssl.datasets.base import load_federated  # slow import

            origin = load_federated(load_settings([*not_in(job.overrides, current), *current]).data).origin
            return origin is not None and origin[0].describe_files() == saved.strip()
    return False


def _read_state(file: Path, *, replaced: Collection[str]) -> SweepState:
    """Return the saved state of a sweep, empty if it is new, without options that are ``replaced``.

    Raises `InputError` if the file is damaged.
    """
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
    options = [word for word in options if word.partition("=")[0].removeprefix("sweep.") not in replaced]
    check_saved_overrides(options, file)  # before they are composed
    values, others = split_options(options)
    if others or values.keys() - SAVED_OPTIONS:
        raise corrupt_file_error(file, f"its options are not {', '.join(sorted(SAVED_OPTIONS))}")
    jobs = {name: literal_values(job) for name, job in jobs.items()}  # as on the command line
    return SweepState(literal_values(overrides, sweep=True), jobs, values, directory)


def _identity(overrides: Iterable[str], free: Set[str]) -> frozenset[str]:
    """Return the overrides that decide whether two jobs are the same run: those of keys that are not ``free``."""
    return frozenset(override for override in overrides if not key_and_group(override) & free)
