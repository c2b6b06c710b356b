"""Tables of results: encoders side by side, the jobs of a sweep, any runs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

from fedssl.atomic_files import write_text
from fedssl.evaluation.scores import ACCURACY, Score, column_title
from fedssl.runs.groups import MAIN, compared_settings, first_of_each_seed, group_runs, score_over_seeds, varying
from fedssl.runs.run import Run, read_run
from fedssl.text_table import TableCell, TableData, TextTable, text_cell, to_csv

# Settings, and groups of them, that say what is to be learned and how it is spread: across these nothing is best.
COMPARISON_KEYS = ("dataset", "partition", "num_clients", "unseen_clients", "experiment")
MARK_CAPTION = (
    "the best accuracy of all rows with the same data and clients, where its mean leads the second best by more than "
    "the larger of their standard deviations over seeds; with one seed of either nothing is marked"
)


def comparison_key(settings: dict[str, str]) -> Hashable:
    """What rows must agree in so that one can be better than another."""
    return frozenset((key, value) for key, value in settings.items() if key.partition(".")[0] in COMPARISON_KEYS)


def best_rows(values: Sequence[Sequence[float]], tasks: Sequence[Hashable]) -> set[int]:
    """Positions of the rows that are best among those of their task, as `MARK_CAPTION` has it.

    Parameters
    ----------
    values : sequence of sequence of float
        The accuracies of every row, one for each seed; a row without any is passed over.
    tasks : sequence of hashable
        One for each row.
    """
    found = set()
    for task in set(tasks):
        rows = [row for row in range(len(tasks)) if tasks[row] == task and values[row]]
        rows.sort(key=lambda row: mean(values[row]), reverse=True)
        first, second = (values[row] for row in rows[:2]) if len(rows) > 1 else ([], [])
        if min(len(first), len(second)) > 1 and mean(first) - mean(second) > max(stdev(first), stdev(second)):
            found.add(rows[0])
    return found


@dataclass
class Row:
    """Runs that differ in nothing but the seed.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line.
    metrics : dict
        Protocol to one value per finished run.
    runs, failed : int
        Number of runs that finished, and of those that ended otherwise.
    """

    settings: dict[str, str]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Table(TextTable):
    """Settings that vary, the federated encoder's results over seeds, and the runs that did not finish.

    Standard deviations are those of a sample (divisor n - 1), and absent where there is one run.

    Attributes
    ----------
    rows : list of Row
    failures : list of str
        A line for each run that did not finish.
    running : list of str
        A line for each run that goes on.
    repeats : list of str
        A line for each run that has the settings and the seed of another one: it is not counted, for it says nothing
        of how results vary.
    early : list of str
        A line for each run that finished before its last round.
    units : dict
        Protocol to the unit of its values, in the order in which protocols ran.
    always : tuple of str
        Settings that are shown even if all rows agree in them, unless none has them.
    """

    rows: list[Row]
    failures: list[str]
    running: list[str] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    always: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """Number of runs that did not finish."""
        return len(self.failures)

    @property
    def keys(self) -> list[str]:
        """Settings that are shown: `always`, then those in which rows differ, in the order of the command line."""
        settings = [dict.fromkeys(self.always, "") | row.settings for row in self.rows]
        hidden = {key for key in self.always if {one[key] for one in settings} == {""}}
        shown = {*varying(settings), *self.always} - hidden
        return [key for key in dict.fromkeys([*self.always, *(key for one in settings for key in one)]) if key in shown]

    @property
    def metrics(self) -> list[str]:
        """Protocols, in the order in which they ran."""
        return list(self.units)

    def data(self) -> TableData:
        """The table as cells; accuracies in per cent."""
        header = [*self.keys, *(column_title(name, unit) for name, unit in self.units.items()), "runs", "failed"]
        best = {name: self._best(name) for name in self.metrics}
        rows = [
            [
                *map(text_cell, self._settings(row)),
                *(_result(self._over_seeds(row, name), best=place in best[name]) for name in self.metrics),
                *(text_cell(str(number)) for number in (row.runs, row.failed)),
            ]
            for place, row in enumerate(self.rows)
        ]
        notes = {
            "runs that go on:": self.running,
            "runs that did not finish:": self.failures,
            "runs that early_stopping ended:": self.early,
            "runs that repeat another one, with the same settings and seed, and are not counted:": self.repeats,
        }
        notes = {title: lines for title, lines in notes.items() if lines}
        return TableData("Results", header, rows, left=len(self.keys), notes=notes, mark_caption=MARK_CAPTION)

    def csv(self) -> str:
        """As comma-separated values; accuracies in [0, 1], in full precision."""
        columns = [f"{name}_{kind}" for name in self.metrics for kind in ("mean", "std")]
        lines: list[list[object]] = [[*self.keys, *columns, "runs", "failed"]]
        for row in self.rows:
            scores = [self._over_seeds(row, name) for name in self.metrics]
            numbers = [number for one in scores for number in ((one.value, one.std) if one else (None, None))]
            lines.append([*self._settings(row), *numbers, row.runs, row.failed])
        return to_csv(lines)

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` and ``results.md``."""
        write_text(folder / "results.csv", self.csv())
        write_text(folder / "results.md", self.markdown())

    def _best(self, name: str) -> set[int]:
        """Positions of the rows that are marked; of what is no accuracy nobody knows whether more is better."""
        if self.units[name] != ACCURACY:
            return set()
        return best_rows(
            [row.metrics.get(name, []) for row in self.rows], [comparison_key(row.settings) for row in self.rows]
        )

    def _settings(self, row: Row) -> list[str]:
        return [row.settings.get(key, "") for key in self.keys]

    def _over_seeds(self, row: Row, name: str) -> Score | None:
        values = row.metrics.get(name)
        return score_over_seeds(values, self.units[name]) if values else None


def sweep_table(folders: Sequence[Path]) -> Table:
    """Make one table of the jobs of a sweep; jobs that differ only in their seed make one row.

    Parameters
    ----------
    folders : sequence of Path
        Run folders with ``summary.json``. Without a readable one the job counts as failed.
    """
    return _table(
        [read_run(folder) for folder in folders],
        lambda run: {key: value for key, value in run.overrides.items() if key != "seed"},
    )


def run_table(runs: Sequence[Run]) -> Table:
    """Make one table of any runs: those that agree in `MAIN` and all settings that one of them was given make one row.

    See `compared_settings`.
    """
    return _table(runs, compared_settings(runs, always=MAIN), always=MAIN)


def _table(runs: Sequence[Run], settings_of: Callable[[Run], dict[str, str]], *, always: tuple[str, ...] = ()) -> Table:
    rows: list[Row] = []
    row_of: dict[Path, Row] = {}  # of runs that are counted
    repeated: dict[Path, Run] = {}
    for group in group_runs([run for run in runs if _is_known(run, settings_of(run))], settings_of):
        finished = [run for run in group.runs if run.finished]
        counted = {run.seed: run for run in first_of_each_seed(finished)}
        ended = sum(not (run.finished or run.running) for run in group.runs)
        rows.append(Row(group.settings, runs=len(counted), failed=ended))
        row_of |= {run.folder: rows[-1] for run in counted.values()}
        repeated |= {run.folder: counted[run.seed] for run in finished if counted[run.seed] is not run}
    table = Table(rows, failures=[], always=always)
    for run in runs:
        if not run.finished:
            overrides = " ".join(f"{key}={value}" for key, value in run.overrides.items())
            line = f"{run.folder}{f' ({overrides})' if overrides else ''}: {run.failure_reason}"
            (table.running if run.running else table.failures).append(line)
        elif run.folder in repeated:
            first = repeated[run.folder]
            differs = "" if run.results == first.results else ", with other results"
            table.repeats.append(f"{run.folder} repeats {first.folder}{differs}")
        else:
            if run.ended_early:
                table.early.append(f"{run.folder}: after {run.progress}")
            _add_results(run, row_of[run.folder], table.units)
    return table


def _is_known(run: Run, settings: Mapping[str, str]) -> bool:
    """Whether something tells what the run was."""
    if run.summary is None and run.settings is None:
        return False
    return run.finished or not settings or any(settings.values())


def _add_results(run: Run, row: Row, units: dict[str, str]) -> None:
    for name, score in run.results.items():
        if units.setdefault(name, score.unit) != score.unit:  # another program's protocol of the same name
            name = f"{name}, {score.unit}"
            units.setdefault(name, score.unit)
        row.metrics.setdefault(name, []).append(score.value)


def _cell(score: Score | None) -> str:
    return "-" if score is None else score.number


def _result(score: Score | None, *, best: bool) -> TableCell:
    return TableCell(_cell(score), None if score is None else score.value, best)
