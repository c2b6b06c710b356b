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
from fedssl.config.renamed import check_renamed
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score, as_scores
from fedssl.machine.process import default_threads
from fedssl.runs.groups import (
    OWN_KEYS,
    all_compared_settings,
    first_of_each_seed,
    group_runs,
    same_value,
    score_over_seeds,
)
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import RUN_MARKERS, Run, iter_settings, read_run, run_folders
from fedssl.untrusted import sanitize

DEFAULT_FOLDERS = (Path("runs"), Path("multirun"))
STATUSES = ("finished", "failed", "interrupted", "running", "ended from outside")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)-(\d\d)")
_ABSENT = "(none)"


@dataclass(frozen=True)
class RunEntry:
    """A run as the list shows it.

    Attributes
    ----------
    run : Run
    date : str
        When it began, by the name of its folder or of the sweep's; otherwise when its files were last written.
    status : str
        One of `STATUSES`.
    done : int
        Rounds.
    results : dict
        Final results of a finished run, of another one those of its last evaluation.
    """

    run: Run
    date: str
    status: str
    done: int
    results: dict[str, Score]

    @property
    def name(self) -> str:
        """The folder, as it was found."""
        return str(self.run.folder)

    def value(self, key: str) -> str:
        """Tell what a word of the command asks for: a setting, or ``status``, ``date`` and ``name``."""
        own = {"status": self.status, "date": self.date, "name": self.name}
        return own[key] if key in own else self.run.value(key)


def find_entries(folders: Sequence[Path]) -> tuple[list[RunEntry], list[str]]:
    """Find the runs at and below folders, newest first, and a sentence for each folder that cannot be read.

    Raises
    ------
    InputError
        A folder does not exist, or there is no run anywhere.
    """
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise InputError(f"there is no folder {missing[0]}; give folders of runs or of sweeps, e.g. runs multirun")
    entries, problems = [], []
    for place in dict.fromkeys(place for folder in folders for place in run_folders(folder)):
        try:
            entries.append(read_entry(place))
        except InputError as error:
            problems.append(str(error))
    if not entries and not problems:
        raise InputError(f"there is no run in {', '.join(map(str, folders))}; give folders of runs or of sweeps")
    return sorted(entries, key=lambda entry: (entry.date, entry.name), reverse=True), problems


def read_entry(folder: Path) -> RunEntry:
    """Read a run folder.

    Raises
    ------
    InputError
        It is damaged, or no run's.
    """
    run = read_run(folder)
    if run.summary is None and run.settings is None:
        raise InputError(f"{folder} has no readable summary.json and no config.yaml; it is no run, or was none yet")
    results = run.results
    if not run.finished:
        judged = [line for line in read_jsonl(folder / "metrics.jsonl") if "evaluation" in line]
        results = as_scores(judged[-1]["evaluation"], judged[-1].get("units")) if judged else {}
    return RunEntry(
        run,
        date=_date(folder),
        status=run.state,
        done=run.rounds_done,
        results={sanitize(name): score for name, score in results.items()},
    )


def _date(folder: Path) -> str:
    for name in (folder.name, folder.parent.name):
        found = _DATE.search(name)
        if found:
            return f"{found[1]} {found[2]}:{found[3]}:{found[4]}"
    times = [(folder / mark).stat().st_mtime for mark in RUN_MARKERS if (folder / mark).is_file()]
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(times, default=0)))


def filter_entries(entries: Iterable[RunEntry], overrides: Sequence[str]) -> list[RunEntry]:
    """Keep the entries that agree with all words, such as ``strategy=l_dawa,fedavg`` (either) and ``status=finished``.

    Raises
    ------
    InputError
        A word is none, no run has such a setting, or there is no such status.
    """
    kept = list(entries)
    for word in overrides:
        key, said, values = word.partition("=")
        if not said:
            raise InputError(f"{word} is neither a folder nor a word such as strategy=l_dawa; correct it")
        if kept and not any(entry.value(key) for entry in kept):
            check_renamed(key)
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
        given = values.split(",")
        kept = [entry for entry in kept if any(same_value(entry.value(key), value) for value in given)]
        for value in () if kept else given:
            check_renamed(f"{key}={value}")
    return kept


@dataclass(frozen=True)
class RankedRuns:
    """Runs that differ in nothing but the seed, and what they are worth.

    Attributes
    ----------
    entries : list of RunEntry
        Best first.
    score : Score
        Mean over runs, and spread (divisor n - 1) where there are several.
    """

    entries: list[RunEntry]
    score: Score


def rank_runs(entries: Iterable[RunEntry], metric: str, *, each: bool = False) -> list[RankedRuns]:
    """Rank finished runs by a final result, the largest first.

    Parameters
    ----------
    entries : iterable of RunEntry
    metric : str
    each : bool
        Rank every run by itself; otherwise runs that differ only in their seed are one.

    Raises
    ------
    InputError
        No finished run has that result.
    """
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
        values = [entry.results[metric].value for entry in members]
        ranked.append(RankedRuns(members, score_over_seeds(values, members[0].results[metric].unit)))
    return sorted(ranked, key=lambda one: one.score.value, reverse=True)


def differences_from_defaults(run: Run) -> dict[str, tuple[Any, Any]]:
    """Tell the choices and values of a run that are not the defaults, each with the default.

    A value is compared with that of the choices that the run made: ``strategy=fedavg`` differs as a choice, and of its
    settings those that its file has otherwise. Choices that this version does not have, and experiments, which only set
    values, are compared with the default choice.
    """
    known = config_groups()
    _, usual = compose_config([])
    made = {group: name for group, name in run.choices.items() if name in known.get(group, ())}
    nodes, _ = compose_config([f"{group}={name}" for group, name in made.items() if group != "experiment"])
    found = {
        group: (name, usual.get(group, _ABSENT)) for group, name in run.choices.items() if name != usual.get(group)
    }
    settings = run.settings or {}
    plain: Any = OmegaConf.to_container(nodes)
    if not plain["threads"] and isinstance(plain["dataset"]["size"], int):
        plain["threads"] = default_threads(plain["dataset"]["size"])
    defaults, values = dict(iter_settings(plain)), dict(iter_settings(settings))
    for key in dict.fromkeys([*values, *defaults]) if settings else ():
        one, other = values.get(key, _ABSENT), defaults.get(key, _ABSENT)
        if one != other and key not in OWN_KEYS:
            found[key] = (one, other)
    return found
