"""Results of the jobs of a sweep or of any runs as a table: mean and standard deviation over seeds."""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from fedssl.evaluation.scores import IN_PERCENT, Score, column_title
from fedssl.runs.groups import MAIN, compared_settings, differing_results, group_runs, newest_of_each_seed, varying
from fedssl.runs.run import RANKME, Run, read_run
from fedssl.runs.same_images import IMAGES_KEY, images_by_run
from fedssl.text_table import TableCell, TextTable, text_cell

# Settings and config groups that define the task: results are compared only if they agree.
COMPARISON_KEYS = (
    *("dataset", "partition", "imbalance", "feature_shift", "num_clients", "unseen_clients", "experiment"),
    "final_evaluation",
)
MARK_CAPTION = (
    "the best accuracy of all rows with the same data and clients, if it is higher than that of each other row by "
    "Welch's t-test over seeds (one-sided, p < 0.05), or the permutation test if neither has any spread; with one seed "
    "of a row nothing is marked"
)
SIGNIFICANCE = 0.05
# Titles of notes.
RUNNING, PRUNED, NOT_FINISHED, EARLY = "running:", "pruned:", "not finished:", "ended by early_stopping:"
REPEATS = "not counted, because another run has the same settings and seed:"


def best_rows(values: Sequence[Sequence[float]], tasks: Sequence[Hashable]) -> set[int]:
    """Return the indices of the best rows of each task (`MARK_CAPTION`), by each row's accuracies over seeds."""
    best = set()
    for task in set(tasks):
        rows = [row for row in range(len(tasks)) if tasks[row] == task and values[row]]
        rows.sort(key=lambda row: mean(values[row]), reverse=True)
        first, *others = rows or [-1]
        if others and all(is_higher(values[first], values[row]) for row in others):
            best.add(first)
    return best


def is_higher(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the expectation of ``first`` is significantly higher (`MARK_CAPTION`); False with one value."""
    if min(len(first), len(second)) < 2:
        return False
    if len({*first}) == len({*second}) == 1:  # Welch's test is undefined, and two seeds would be certain
        p_of_permutations = 1 / math.comb(len(first) + len(second), len(first))
        return first[0] > second[0] and p_of_permutations < SIGNIFICANCE
    from scipy.stats import ttest_ind  # slow import

    with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # one of them may have no spread
        return bool(ttest_ind(first, second, equal_var=False, alternative="greater").pvalue < SIGNIFICANCE)


@dataclass
class Row:
    """Runs that differ only in their seed."""

    settings: dict[str, str]
    metrics: dict[str, list[Score]] = field(default_factory=dict)  # protocol to the score of each finished run
    runs: int = 0  # finished
    failed: int = 0


class Results(NamedTuple):
    """Rows of runs, the units of their results in the order in which the protocols ran, and notes."""

    rows: list[Row]
    units: dict[str, str]
    notes: dict[str, list[str]]  # by title: a line for each run
    always: Sequence[str] = ()  # settings that are displayed even if they do not vary, unless no row has them

    def table(self) -> TextTable:
        """Return settings that vary, the federated encoder's results over seeds, and the notes; accuracies in percent.

        The deviation of a row with one run is that over the draws of its evaluation.
        """
        rows, units = self.rows, self.units
        settings = [dict.fromkeys(self.always, "") | row.settings for row in rows]
        keys = varying(settings)
        keys += [key for key in self.always if key not in keys and {values[key] for values in settings} != {""}]
        tasks = [
            frozenset((key, value) for key, value in row.settings.items() if key.partition(".")[0] in COMPARISON_KEYS)
            for row in rows
        ]
        scores = {name: [row.metrics.get(name, []) for row in rows] for name in units}
        best = {
            name: best_rows([[score.value for score in of_row] for of_row in scores[name]], tasks)
            for name, unit in units.items()
            if unit in IN_PERCENT  # more of another unit may be worse
        }
        cells = [
            [
                *(text_cell(row.settings.get(key, "")) for key in keys),
                *(score_cell(scores[name][index], best=index in best.get(name, ())) for name in units),
                *(text_cell(str(number)) for number in (row.runs, row.failed)),
            ]
            for index, row in enumerate(rows)
        ]
        over_draws = [
            name for name in units if any([score.std is None for score in of] == [False] for of in scores[name])
        ]
        notes = {"± in rows with one run is that of its evaluation, over draws of images or over models:": over_draws}
        return TextTable(
            "Results",
            [*keys, *(column_title(name, unit) for name, unit in units.items()), "runs", "failed"],
            cells,
            left=len(keys),
            notes={title: lines for title, lines in (notes | self.notes).items() if lines},
            mark_caption=MARK_CAPTION,
            csv_header=[*keys, *(f"{name}_{kind}" for name in units for kind in ("mean", "std")), "runs", "failed"],
        )


def sweep_results(folders: Sequence[Path], *, metric: str | None = None) -> Results:
    """Return the results of the jobs of a sweep, with one row for jobs that differ only in their seed.

    Jobs whose folder has no readable ``summary.json`` count as failed. ``metric`` is the result by which the sweep
    compares jobs; `fedssl.runs.run.RANKME` has a column only then.
    """
    runs = [read_run(folder) for folder in folders]
    ignored = {"seed"}
    if any(run.overrides and "engine" not in run.overrides for run in runs):
        ignored.add("engine")  # a sweep adds it to the jobs that it runs in parallel, and no result depends on it
    images = images_by_run(runs, lambda run: frozenset(_other_overrides(run, {*ignored, IMAGES_KEY}).items()))

    def settings_of(run: Run) -> dict[str, str]:
        values = _other_overrides(run, ignored)
        return values | ({IMAGES_KEY: images.get(run.folder, values[IMAGES_KEY])} if IMAGES_KEY in values else {})

    return read_results(runs, settings_of, with_rankme=metric == RANKME)


def _other_overrides(run: Run, ignored: Set[str]) -> dict[str, str]:
    return {key: value for key, value in run.overrides.items() if key not in ignored}


def run_results(runs: Sequence[Run]) -> Results:
    """Return the results of any runs, with one row for runs that agree in `compared_settings`."""
    return read_results(runs, compared_settings(runs, always=MAIN))._replace(always=MAIN)


def read_results(
    runs: Sequence[Run], settings_of: Callable[[Run], dict[str, str]], *, with_rankme: bool = False
) -> Results:
    """Return a row for runs with the same settings, and a note for each run that is not counted."""
    rows: list[Row] = []
    row_of: dict[Path, Row] = {}  # of counted runs
    repeated: dict[Path, Run] = {}
    for group in group_runs([run for run in runs if _is_known(run, settings_of(run))], settings_of):
        finished = [run for run in group.runs if run.finished]
        counted = {run.seed: run for run in newest_of_each_seed(finished)}
        ended = sum(not (run.finished or run.running or run.pruned) for run in group.runs)
        rows.append(Row(group.settings, runs=len(counted), failed=ended))
        row_of |= {run.folder: rows[-1] for run in counted.values()}
        repeated |= {run.folder: counted[run.seed] for run in finished if counted[run.seed] is not run}
    units: dict[str, str] = {}
    notes: dict[str, list[str]] = {title: [] for title in (RUNNING, PRUNED, NOT_FINISHED, EARLY, REPEATS)}
    for run in runs:
        if not run.finished:
            overrides = " ".join(f"{key}={value}" for key, value in run.overrides.items())
            line = f"{run.folder}{f' ({overrides})' if overrides else ''}: {run.failure_reason}"
            notes[RUNNING if run.running else PRUNED if run.pruned else NOT_FINISHED].append(line)
        elif run.folder in repeated:
            used = repeated[run.folder]
            differing = differing_results(run, used)
            differs = f", with other results ({differing})" if differing else ""
            notes[REPEATS].append(f"{run.folder} repeats {used.folder}{differs}")
        else:
            if run.ended_early:
                notes[EARLY].append(f"{run.folder}: after {run.progress}")
            rankme = run.metric(RANKME) if with_rankme else None
            results = run.results if rankme is None else {**run.results, RANKME: Score(rankme, unit="")}
            _add_results(results, row_of[run.folder], units)
    notes["incomplete files:"] = [line for run in runs for line in run.incomplete_files]
    return Results(rows, units, notes)


def _is_known(run: Run, settings: Mapping[str, str]) -> bool:
    if run.summary is None and run.settings is None:
        return False
    return run.finished or not settings or any(settings.values())


def _add_results(results: Mapping[str, Score], row: Row, units: dict[str, str]) -> None:
    for name, score in results.items():
        if units.setdefault(name, score.unit) != score.unit:  # a protocol of another program
            name = f"{name}, {score.unit}"
            units.setdefault(name, score.unit)
        row.metrics.setdefault(name, []).append(score)


def score_cell(scores: Sequence[Score], *, best: bool = False) -> TableCell:
    """Return the cell of a result over runs."""
    if not scores:
        return TableCell("-", numbers=(None, None))
    score = Score.over_runs(scores)
    return TableCell(score.number, score.value, best, (score.value, score.std))
