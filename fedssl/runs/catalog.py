"""List, filter and rank runs from their folders, and compare a run's settings with the defaults."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedssl.config.compose import compose_config
from fedssl.config.overrides import config_groups, did_you_mean
from fedssl.errors import InputError
from fedssl.evaluation.scores import Score
from fedssl.machine.process import default_threads
from fedssl.plain_values import flatten
from fedssl.runs.groups import MAIN, OWN_KEYS, compared_settings, group_runs, newest_of_each_seed, same_value
from fedssl.runs.run import LABEL_FREE, Run, read_run, run_folders

DEFAULT_FOLDERS = (Path("runs"), Path("multirun"))
STATUSES = ("finished", "failed", "interrupted", "paused", "pruned", "running", "ended from outside")
_ABSENT = "(none)"


def readable_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs at and below folders, newest first, and a sentence for each file that cannot be read."""
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise InputError(f"there is no folder {missing[0]}; give folders of runs or of sweeps, e.g. runs multirun")
    runs, problems = [], []
    for path in {path.resolve(): path for folder in folders for path in run_folders(folder)}.values():
        try:
            runs.append(read_listed(path))
            problems += runs[-1].incomplete_files
        except InputError as error:
            problems.append(str(error))
    if not runs and not problems:
        raise InputError(f"there is no run in {', '.join(map(str, folders))}; give folders of runs or of sweeps")
    return sorted(runs, key=lambda run: (run.date, str(run.folder)), reverse=True), problems


def read_listed(folder: Path) -> Run:
    """Read a run folder; raise an `InputError` if a file that lists show is damaged, or if it is not of a run."""
    run = read_run(folder)
    if run.summary is None and run.settings is None:
        raise InputError(f"{folder} has no readable summary.json and no config.yaml; it is no run, or was none yet")
    _ = run.latest_results, run.rounds_done  # read the lines
    return run


def filter_runs(runs: Iterable[Run], overrides: Sequence[str]) -> list[Run]:
    """Select runs by filters such as ``strategy=l_dawa,fedavg`` (either) and ``status=finished``."""
    kept = list(runs)
    for override in overrides:
        key, equals, values = override.partition("=")
        if not equals:
            raise InputError(f"{override} is neither a folder nor a filter such as strategy=l_dawa; correct it")
        if kept and not any(_value(run, key) for run in kept):
            known = dict.fromkeys(key for run in kept for key in (*run.choices, *run.overrides, "status"))
            raise InputError(
                f"no run has a setting {key!r}{did_you_mean(key, known)}; `fedssl-runs show RUN` lists settings"
            )
        unknown = [value for value in values.split(",") if key == "status" and value.lower() not in STATUSES]
        if unknown:
            raise InputError(
                f"there is no status={unknown[0]}{did_you_mean(unknown[0], STATUSES)}; "
                f"choose one of {', '.join(STATUSES)}"
            )
        allowed = {values, *values.split(",")}  # a list has commas
        kept = [run for run in kept if any(same_value(_value(run, key), value) for value in allowed)]
    return kept


def _value(run: Run, key: str) -> str:
    """Return a setting of the run, or ``status``, ``date`` and ``name``."""
    fields = {"status": run.state, "date": run.date, "name": str(run.folder)}
    return fields[key] if key in fields else run.value(key)


@dataclass(frozen=True)
class RankedRuns:
    """Runs that differ only in their seed, best first, and their score: mean and standard deviation."""

    runs: list[Run]
    score: Score


def rank_runs(runs: Iterable[Run], metric: str, *, each: bool = False) -> list[RankedRuns]:
    """Rank finished runs by a final result, the best first; with ``each`` every seed by itself.

    The best is the largest, but of an error the smallest, and of ``alpha_req`` the nearest to 1.
    """
    finished = [run for run in runs if run.finished]
    scores = {
        run.folder: run.score(metric) if metric in LABEL_FREE else run.latest_results.get(metric) for run in finished
    }
    known_scores = {folder: score for folder, score in scores.items() if score is not None}
    with_result = [run for run in finished if run.folder in known_scores]
    if not with_result and metric in LABEL_FREE:
        raise InputError(
            f"no finished run has recorded {metric}; set evaluate_every and collapse_images above 0 in the next runs"
        )
    if not with_result:
        known = dict.fromkeys(name for run in finished for name in run.latest_results)
        raise InputError(
            f"no finished run has the result {metric!r}{did_you_mean(metric, known)}; "
            f"there are {', '.join(known) or 'none'}"
        )
    ranked = []
    settings_of = compared_settings(with_result, always=MAIN)
    for group in group_runs(
        with_result,
        lambda run: {"folder": str(run.folder)} if each or not run.settings else settings_of(run),
    ):
        members = newest_of_each_seed(group.runs)
        members.sort(key=lambda run: goodness(metric, known_scores[run.folder]), reverse=True)
        ranked.append(RankedRuns(members, Score.over_runs([known_scores[run.folder] for run in members])))
    return sorted(ranked, key=lambda group: goodness(metric, group.score), reverse=True)


def goodness(metric: str, score: Score) -> float:
    """Return a number that is larger for better results."""
    return -abs(score.value - 1) if metric == "alpha_req" else score.goodness


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
