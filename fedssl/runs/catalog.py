"""List, filter and rank runs from their folders, and compare a run's settings with the defaults."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedssl.config.compose import compose_config
from fedssl.config.overrides import config_groups, did_you_mean
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, as_scores
from fedssl.machine.process import default_threads
from fedssl.plain_values import flatten
from fedssl.runs.groups import OWN_KEYS, all_compared_settings, first_of_each_seed, group_runs, same_value
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import RUN_MARKERS, Run, read_run, run_folders
from fedssl.safe_io import sanitize

DEFAULT_FOLDERS = (Path("runs"), Path("multirun"))
STATUSES = ("finished", "failed", "interrupted", "paused", "pruned", "running", "ended from outside")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)-(\d\d)")
_ABSENT = "(none)"


@dataclass(frozen=True)
class RunEntry:
    """A run in a list."""

    run: Run
    date: str  # of the start, in the name of the folder or of the sweep's; else of the earliest file
    status: str  # one of `STATUSES`
    rounds_done: int
    results: dict[str, Score]  # final ones of a finished run, else those of the last evaluation

    @property
    def name(self) -> str:
        """Return the path of the folder."""
        return str(self.run.folder)

    def value(self, key: str) -> str:
        """Return a setting of the run, or ``status``, ``date`` and ``name``."""
        fields = {"status": self.status, "date": self.date, "name": self.name}
        return fields[key] if key in fields else self.run.value(key)


def find_entries(folders: Sequence[Path]) -> tuple[list[RunEntry], list[str]]:
    """Return the runs at and below folders, newest first, and a sentence for each file that cannot be read."""
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise InputError(f"there is no folder {missing[0]}; give folders of runs or of sweeps, e.g. runs multirun")
    entries, problems = [], []
    for path in dict.fromkeys(path for folder in folders for path in run_folders(folder)):
        try:
            entries.append(read_entry(path))
            problems += entries[-1].run.incomplete_files
        except InputError as error:
            problems.append(str(error))
    if not entries and not problems:
        raise InputError(f"there is no run in {', '.join(map(str, folders))}; give folders of runs or of sweeps")
    return sorted(entries, key=lambda entry: (entry.date, entry.name), reverse=True), problems


def read_entry(folder: Path) -> RunEntry:
    """Read a run folder; raise an `InputError` if it is damaged or not of a run."""
    run = read_run(folder)
    if run.summary is None and run.settings is None:
        raise InputError(f"{folder} has no readable summary.json and no config.yaml; it is no run, or was none yet")
    results = run.results
    if not run.finished:
        evaluated = [line for line in read_jsonl(folder / "metrics.jsonl") if "evaluation" in line]
        results = as_scores(evaluated[-1]["evaluation"], evaluated[-1].get("units")) if evaluated else {}
    return RunEntry(
        run,
        date=_date(folder),
        status=run.state,
        rounds_done=run.rounds_done,
        results={sanitize(name): score for name, score in results.items()},
    )


def _date(folder: Path) -> str:
    for name in (folder.name, folder.parent.name):
        if match := _DATE.search(name):
            return f"{match[1]} {match[2]}:{match[3]}:{match[4]}"
    times = [(folder / mark).stat().st_mtime for mark in RUN_MARKERS if (folder / mark).is_file()]
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(times, default=0)))


def filter_entries(entries: Iterable[RunEntry], overrides: Sequence[str]) -> list[RunEntry]:
    """Select entries by filters such as ``strategy=l_dawa,fedavg`` (either) and ``status=finished``."""
    kept = list(entries)
    for override in overrides:
        key, equals, values = override.partition("=")
        if not equals:
            raise InputError(f"{override} is neither a folder nor a filter such as strategy=l_dawa; correct it")
        if kept and not any(entry.value(key) for entry in kept):
            known = dict.fromkeys(key for entry in kept for key in (*entry.run.choices, *entry.run.overrides, "status"))
            raise InputError(
                f"no run has a setting {key!r}{did_you_mean(key, known)}; `fedssl-runs show RUN` lists settings"
            )
        unknown = [value for value in values.split(",") if key == "status" and value.lower() not in STATUSES]
        if unknown:
            raise InputError(
                f"there is no status={unknown[0]}{did_you_mean(unknown[0], STATUSES)}; "
                f"choose one of {', '.join(STATUSES)}"
            )
        allowed = values.split(",")
        kept = [entry for entry in kept if any(same_value(entry.value(key), value) for value in allowed)]
    return kept


@dataclass(frozen=True)
class RankedRuns:
    """Runs that differ only in their seed, best first, and their score: mean and standard deviation."""

    entries: list[RunEntry]
    score: Score


def rank_runs(entries: Iterable[RunEntry], metric: str, *, each: bool = False) -> list[RankedRuns]:
    """Rank finished runs by a final result, the largest first; with ``each`` every seed by itself."""
    finished = [entry for entry in entries if entry.run.finished]
    entry_of = {entry.run.folder: entry for entry in finished if metric in entry.results}
    if not entry_of:
        known = dict.fromkeys(name for entry in finished for name in entry.results)
        raise InputError(
            f"no finished run has the result {metric!r}{did_you_mean(metric, known)}; "
            f"there are {', '.join(known) or 'none'}"
        )
    runs = [entry.run for entry in entry_of.values()]
    ranked = []
    for group in group_runs(runs, (lambda run: {"folder": str(run.folder)}) if each else all_compared_settings):
        members = [entry_of[run.folder] for run in first_of_each_seed(group.runs)]
        members.sort(key=lambda entry: entry.results[metric].value, reverse=True)
        ranked.append(RankedRuns(members, Score.over_runs([entry.results[metric] for entry in members])))
    return sorted(ranked, key=lambda group: group.score.value, reverse=True)


def differences_from_defaults(run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the choices and settings of a run that differ from the defaults, each with the default.

    The defaults of settings are those of the run's choices. For choices that this version does not have, and for
    experiments, which only set values, they are those of the default choice.
    """
    known = config_groups()
    _, usual = compose_config([])
    made = {group: name for group, name in run.choices.items() if name in known.get(group, ())}
    nodes, _ = compose_config([f"{group}={name}" for group, name in made.items() if group != "experiment"])
    differences = {
        group: (name, usual.get(group, _ABSENT)) for group, name in run.choices.items() if name != usual.get(group)
    }
    settings = run.settings or {}
    plain: Any = OmegaConf.to_container(nodes)
    del plain["sweep"], plain["plan"]  # no settings of a run
    if not plain["threads"] and isinstance(plain["dataset"]["size"], int):
        plain["threads"] = default_threads(plain["dataset"]["size"])
    defaults, values = dict(flatten(plain)), dict(flatten(settings))
    for key in dict.fromkeys([*values, *defaults]) if settings else ():
        value, default = values.get(key, _ABSENT), defaults.get(key, _ABSENT)
        if value != default and key not in OWN_KEYS:
            differences[key] = (value, default)
    return differences
