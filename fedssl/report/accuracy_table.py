"""Tables of results: encoders side by side, the jobs of a sweep, any runs."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

from fedssl.config import MAY_CHANGE
from fedssl.report.runs import SPREAD, Run, read_run

# What a table of any runs always tells of them, and what it never does: settings that change no final number.
MAIN = ("strategy", "method", "encoder", "partition", "partition.alpha", "num_clients", "rounds")
LEFT_OUT = {"seed", *MAY_CHANGE} - {"rounds"}


def format_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracies side by side: a column for each key of ``results``, a row for each protocol, in per cent.

    Parameters
    ----------
    results : mapping
        What was evaluated (``"federated"``) to protocol (``"knn"``) to accuracy in [0, 1]. A protocol's standard
        deviation, under its name with ``_std``, is put behind its accuracy.
    """
    protocols = _protocols(results.values())
    if not protocols:
        return "nothing was evaluated: no labelled pictures, or no protocol"
    body = [
        [name, *(_percent(column.get(name), column.get(name + SPREAD)) for column in results.values())]
        for name in protocols
    ]
    return align([["accuracy in %", *results], *body], left=1)


@dataclass
class Row:
    """Runs that differ in nothing but the seed.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line.
    metrics : dict
        Protocol to one accuracy per finished run.
    runs, failed : int
        Number of finished and of other runs.
    """

    settings: dict[str, str]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Table:
    """Settings that vary, the federated encoder's accuracy over seeds, and the runs that did not finish.

    Standard deviations are those of a sample (divisor n - 1), and absent where there is one run.

    Attributes
    ----------
    rows : list of Row
    failures : list of str
        A line for each run that did not finish.
    always : tuple of str
        Settings that are shown even if all rows agree in them, unless none has them.
    """

    rows: list[Row]
    failures: list[str]
    always: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """Number of runs that did not finish."""
        return len(self.failures)

    @property
    def keys(self) -> list[str]:
        """Settings that are shown: `always`, then those in which rows differ, in the order of the command line."""
        names = dict.fromkeys([*self.always, *(key for row in self.rows for key in row.settings)])
        values = {key: {row.settings.get(key, "") for row in self.rows} for key in names}
        return [key for key in names if len(values[key]) > 1 or (key in self.always and values[key] != {""})]

    @property
    def metrics(self) -> list[str]:
        """Protocols, in the order in which they ran."""
        return _protocols(row.metrics for row in self.rows)

    def text(self) -> str:
        """For the terminal; accuracies in per cent."""
        return "\n".join([align(self._cells(), left=len(self.keys)), *self._failure_lines()])

    def markdown(self) -> str:
        """As a Markdown table; accuracies in per cent."""
        header, *body = self._cells()
        rule = ["---"] * len(self.keys) + ["---:"] * (len(header) - len(self.keys))
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (header, rule, *body)]
        return "\n".join([*lines, *self._failure_lines(bullet="- ")]) + "\n"

    def csv(self) -> str:
        """As comma-separated values; accuracies in [0, 1], in full precision."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        columns = [f"{name}_{kind}" for name in self.metrics for kind in ("mean", "std")]
        writer.writerow([*self.keys, *columns, "runs", "failed"])
        for row in self.rows:
            numbers = [value for name in self.metrics for value in _mean_std(row.metrics.get(name, []))]
            writer.writerow([*(row.settings.get(key, "") for key in self.keys), *numbers, row.runs, row.failed])
        return stream.getvalue()

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` and ``results.md``."""
        (folder / "results.csv").write_text(self.csv())
        (folder / "results.md").write_text(self.markdown())

    def _cells(self) -> list[list[str]]:
        header = [*self.keys, *(f"{name} (%)" for name in self.metrics), "runs", "failed"]
        body = [
            [
                *(row.settings.get(key, "") for key in self.keys),
                *(_percent(*_mean_std(row.metrics.get(name, []))) for name in self.metrics),
                str(row.runs),
                str(row.failed),
            ]
            for row in self.rows
        ]
        return [header, *body]

    def _failure_lines(self, *, bullet: str = "  ") -> list[str]:
        return (
            ["", "runs that did not finish:", "", *(bullet + line for line in self.failures)] if self.failures else []
        )


def sweep_table(folders: Sequence[Path]) -> Table:
    """The jobs of a sweep as one table; jobs that differ only in their seed make one row.

    Parameters
    ----------
    folders : sequence of Path
        Run folders with ``summary.json``. Without a readable one the job counts as failed.
    """
    return _table(
        [read_run(folder) for folder in folders],
        lambda run: {key: value for key, value in run.words.items() if key != "seed"},
    )


def run_table(runs: Sequence[Run]) -> Table:
    """Any runs as one table: those that agree in `MAIN` and in all settings that one of them was given make one row.

    Settings that one run was given and another has by default are compared by their values, so that it does not matter
    how a run was told them.
    """
    given = dict.fromkeys(key for run in runs for key in run.words if key.partition(".")[0] not in LEFT_OUT)
    return _table(runs, lambda run: {key: run.value(key) for key in (*MAIN, *given)}, always=MAIN)


def _table(runs: Sequence[Run], settings_of: Callable[[Run], dict[str, str]], *, always: tuple[str, ...] = ()) -> Table:
    rows: dict[frozenset[tuple[str, str]], Row] = {}
    failures = []
    for run in runs:
        if not run.finished:
            words = f" ({' '.join(f'{key}={value}' for key, value in run.words.items())})" if run.words else ""
            failures.append(f"{run.folder}{words}: {run.ending}")
        if run.summary is None and run.settings is None:
            continue  # nothing tells what it was
        settings = settings_of(run)
        row = rows.setdefault(frozenset(settings.items()), Row(settings))
        row.runs += run.finished
        row.failed += not run.finished
        for name, value in run.results.items():
            if not name.endswith(SPREAD):
                row.metrics.setdefault(name, []).append(value)
    return Table(list(rows.values()), failures, always)


def _protocols(results: Iterable[Mapping[str, object]]) -> list[str]:
    """Names of the accuracies in several mappings, each once, without the standard deviations."""
    return [name for name in dict.fromkeys(name for one in results for name in one) if not name.endswith(SPREAD)]


def _mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    return mean(values) if values else None, stdev(values) if len(values) > 1 else None


def _percent(value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f}"


def align(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns of equal width; the first ``left`` start, the others end, at the same place."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position < left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
