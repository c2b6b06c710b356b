"""Results of the jobs of a sweep or of any runs as a table: mean and standard deviation over seeds."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from fedssl.atomic_files import write_text
from fedssl.evaluation.scores import ACCURACY, Score, column_title
from fedssl.runs.groups import MAIN, compared_settings, first_of_each_seed, group_runs, varying
from fedssl.runs.run import RANKME, Run, read_run
from fedssl.text_table import TableCell, TableData, TextTable, text_cell, to_csv

# Settings and config groups that define the task: results are compared only if they agree.
COMPARISON_KEYS = ("dataset", "partition", "num_clients", "unseen_clients", "experiment")
MARK_CAPTION = (
    "the best accuracy of all rows with the same data and clients, if it is higher than that of each other row by "
    "Welch's t-test over seeds (one-sided, p < 0.05); with one seed of a row nothing is marked"
)
SIGNIFICANCE = 0.05


def comparison_key(settings: dict[str, str]) -> Hashable:
    """Return the settings that define the task."""
    return frozenset((key, value) for key, value in settings.items() if key.partition(".")[0] in COMPARISON_KEYS)


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
    """Return whether the expectation of ``first`` is higher, by Welch's one-sided t-test; False with one value."""
    if min(len(first), len(second)) < 2:
        return False
    if len({*first}) == len({*second}) == 1:  # no spread, for which the test is undefined
        return first[0] > second[0]
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

    def has_draws(self, name: str) -> bool:
        """Return whether the row has one score of this protocol, with a deviation over draws."""
        return [score.std is None for score in self.metrics.get(name, [])] == [False]


@dataclass(frozen=True)
class Table(TextTable):
    """Settings that vary, the federated encoder's results over seeds, and the runs that did not finish or were pruned.

    The deviation of a row with one run is that over the draws of its evaluation.
    """

    rows: list[Row]
    failures: list[str]  # a line for each run that did not finish
    running: list[str] = field(default_factory=list)  # a line for each running run
    pruned: list[str] = field(default_factory=list)  # a line for each pruned job of a sweep
    # A line for each run with the settings and the seed of another one, which is not counted.
    repeats: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)  # a line for each run that early stopping ended
    incomplete: list[str] = field(default_factory=list)  # a line for each file that lacks lines of its run
    units: dict[str, str] = field(default_factory=dict)  # by protocol, in the order in which they ran
    always: tuple[str, ...] = ()  # settings that are displayed even if they do not vary, unless no row has them

    @property
    def failed(self) -> int:
        """Return the number of runs that did not finish."""
        return len(self.failures)

    @property
    def keys(self) -> list[str]:
        """Return the displayed settings: those that vary, then the others of `always`."""
        settings = [dict.fromkeys(self.always, "") | row.settings for row in self.rows]
        hidden = {key for key in self.always if {values[key] for values in settings} == {""}}
        first = varying(settings)
        return [*first, *(key for key in self.always if key not in first and key not in hidden)]

    def data(self) -> TableData:
        """Return the cells; accuracies in percent."""
        header = [*self.keys, *(column_title(name, unit) for name, unit in self.units.items()), "runs", "failed"]
        best = {name: self._best(name) for name in self.units}
        rows = [
            [
                *map(text_cell, self._settings(row)),
                *(_result(self._over_seeds(row, name), best=index in best[name]) for name in self.units),
                *(text_cell(str(number)) for number in (row.runs, row.failed)),
            ]
            for index, row in enumerate(self.rows)
        ]
        over_draws = [name for name in self.units if any(row.has_draws(name) for row in self.rows)]
        notes = {
            "± in rows with one run is that of its evaluation, over draws of images or over models:": over_draws,
            "running:": self.running,
            "pruned:": self.pruned,
            "not finished:": self.failures,
            "ended by early_stopping:": self.early,
            "not counted, because another run has the same settings and seed:": self.repeats,
            "incomplete files:": self.incomplete,
        }
        notes = {title: lines for title, lines in notes.items() if lines}
        return TableData("Results", header, rows, left=len(self.keys), notes=notes, mark_caption=MARK_CAPTION)

    def csv(self) -> str:
        """Return comma-separated values; accuracies in [0, 1], in full precision."""
        columns = [f"{name}_{kind}" for name in self.units for kind in ("mean", "std")]
        lines: list[list[object]] = [[*self.keys, *columns, "runs", "failed"]]
        for row in self.rows:
            scores = [self._over_seeds(row, name) for name in self.units]
            numbers = [number for score in scores for number in ((score.value, score.std) if score else (None, None))]
            lines.append([*self._settings(row), *numbers, row.runs, row.failed])
        return to_csv(lines)

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` and ``results.md``."""
        write_text(folder / "results.csv", self.csv())
        write_text(folder / "results.md", self.markdown())

    def _best(self, name: str) -> set[int]:
        """Return the indices of the marked rows."""
        if self.units[name] != ACCURACY:  # more may be worse
            return set()
        return best_rows(
            [[score.value for score in row.metrics.get(name, [])] for row in self.rows],
            [comparison_key(row.settings) for row in self.rows],
        )

    def _settings(self, row: Row) -> list[str]:
        return [row.settings.get(key, "") for key in self.keys]

    def _over_seeds(self, row: Row, name: str) -> Score | None:
        scores = row.metrics.get(name)
        return Score.over_runs(scores) if scores else None


def sweep_table(folders: Sequence[Path], *, metric: str | None = None) -> Table:
    """Return the table of the jobs of a sweep, with one row for jobs that differ only in their seed.

    Jobs whose folder has no readable ``summary.json`` count as failed. ``metric`` is the result by which the sweep
    compares jobs; `fedssl.runs.run.RANKME` has a column only then.
    """
    runs = [read_run(folder) for folder in folders]
    ignored = {"seed"}
    if any(run.overrides and "engine" not in run.overrides for run in runs):
        ignored.add("engine")  # a sweep adds it to the jobs that it runs in parallel, and no result depends on it
    return _table(
        runs,
        lambda run: {key: value for key, value in run.overrides.items() if key not in ignored},
        with_rankme=metric == RANKME,
    )


def run_table(runs: Sequence[Run]) -> Table:
    """Return the table of any runs, with one row for runs that agree in `compared_settings`."""
    return _table(runs, compared_settings(runs, always=MAIN), always=MAIN)


def _table(
    runs: Sequence[Run],
    settings_of: Callable[[Run], dict[str, str]],
    *,
    always: tuple[str, ...] = (),
    with_rankme: bool = False,
) -> Table:
    rows: list[Row] = []
    row_of: dict[Path, Row] = {}  # of counted runs
    repeated: dict[Path, Run] = {}
    for group in group_runs([run for run in runs if _is_known(run, settings_of(run))], settings_of):
        finished = [run for run in group.runs if run.finished]
        counted = {run.seed: run for run in first_of_each_seed(finished)}
        ended = sum(not (run.finished or run.running or run.pruned) for run in group.runs)
        rows.append(Row(group.settings, runs=len(counted), failed=ended))
        row_of |= {run.folder: rows[-1] for run in counted.values()}
        repeated |= {run.folder: counted[run.seed] for run in finished if counted[run.seed] is not run}
    table = Table(rows, failures=[], always=always, incomplete=[line for run in runs for line in run.incomplete_files])
    for run in runs:
        if not run.finished:
            overrides = " ".join(f"{key}={value}" for key, value in run.overrides.items())
            line = f"{run.folder}{f' ({overrides})' if overrides else ''}: {run.failure_reason}"
            (table.running if run.running else table.pruned if run.pruned else table.failures).append(line)
        elif run.folder in repeated:
            first = repeated[run.folder]
            differs = "" if run.results == first.results else ", with other results"
            table.repeats.append(f"{run.folder} repeats {first.folder}{differs}")
        else:
            if run.ended_early:
                table.early.append(f"{run.folder}: after {run.progress}")
            rankme = run.metric(RANKME) if with_rankme else None
            results = run.results if rankme is None else {**run.results, RANKME: Score(rankme, unit="")}
            _add_results(results, row_of[run.folder], table.units)
    return table


def _is_known(run: Run, settings: Mapping[str, str]) -> bool:
    """Return whether the settings of the run are known."""
    if run.summary is None and run.settings is None:
        return False
    return run.finished or not settings or any(settings.values())


def _add_results(results: Mapping[str, Score], row: Row, units: dict[str, str]) -> None:
    for name, score in results.items():
        if units.setdefault(name, score.unit) != score.unit:  # a protocol of another program
            name = f"{name}, {score.unit}"
            units.setdefault(name, score.unit)
        row.metrics.setdefault(name, []).append(score)


def _result(score: Score | None, *, best: bool) -> TableCell:
    return TableCell("-") if score is None else TableCell(score.number, score.value, best)
