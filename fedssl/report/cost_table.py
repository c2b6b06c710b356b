"""Measured costs of a client in any runs: LW-FedSSL's Table 3 (Tun et al., arXiv 2401.11647).

Memory and FLOPs are those of `fedssl.step_cost`, bytes those of the messages, heads included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import mean
from typing import Any

from fedssl.runs.costs import CostTotals, sum_costs
from fedssl.runs.groups import IGNORED, compared_settings, first_of_each_seed, group_runs, varying
from fedssl.runs.jsonl import format_rounds, read_jsonl
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TableData, TextTable, text_cell, to_csv

BASELINE = "end_to_end"
HARDWARE = {"device", "threads", "engine"}  # change costs but no result
COLUMNS = {
    "memory": "peak memory",
    "flops": "FLOPs",
    "base_bytes": "base bytes, once",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "communication": "down + up",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}


@dataclass(frozen=True)
class CostRow:
    """Mean costs of runs that differ only in their seed. Other rows are relative to the ``baseline``."""

    settings: dict[str, str]  # that differ between rows
    cost: CostTotals
    baseline: bool
    runs: int


@dataclass(frozen=True)
class CostTable(TextTable):
    """Costs, absolute and relative to the run that trains end to end, or to the first one."""

    rows: list[CostRow]
    incomplete: list[str] = field(default_factory=list)  # a line for each run that was left out

    def data(self) -> TableData:
        """Return the cells: every cost, and its ratio to the baseline's."""
        rows = [
            [
                *map(text_cell, row.settings.values()),
                *(_cost(name, *self._pair(row, name)) for name in self._columns),
                text_cell(str(row.runs)),
            ]
            for row in self.rows
        ]
        header = [*self._keys, *self._columns.values(), "runs"]
        notes = {"not counted, because metrics.jsonl lacks rounds:": self.incomplete} if self.incomplete else {}
        return TableData("What a run costs a client", header, rows, left=len(self._keys), notes=notes)

    def csv(self) -> str:
        """Return comma-separated values: costs in full precision, and their ratios to the baseline's."""
        columns = [column for name in self._columns for column in (name, f"{name}_relative")]
        lines: list[list[object]] = [[*self._keys, *columns, "runs"]]
        for row in self.rows:
            numbers = [number for name in self._columns for number in self._pair(row, name)]
            lines.append([*row.settings.values(), *numbers, row.runs])
        return to_csv(lines)

    @property
    def _keys(self) -> list[str]:
        return list(self.rows[0].settings) if self.rows else []

    @property
    def _columns(self) -> dict[str, str]:
        """Return the titles of the columns; virtual time and base layers have one if a run has them."""
        optional = {
            "virtual_seconds": any(row.cost.virtual_seconds is not None for row in self.rows),
            "base_bytes": any(row.cost.base_bytes for row in self.rows),
        }
        return {name: title for name, title in COLUMNS.items() if optional.get(name, True)}

    def _pair(self, row: CostRow, name: str) -> tuple[float | None, float | None]:
        """Return a cost and its ratio to the baseline's, None if unknown."""
        if name == "seconds" and any(other.cost.seconds is None for other in self.rows):
            name = "round_seconds"  # known of all runs
        baseline = next(other for other in self.rows if other.baseline)
        value, base = (getattr(each.cost, name) for each in (row, baseline))
        return value, value / base if value is not None and base else None


def cost_table(runs: Sequence[Run]) -> CostTable:
    """Return the table of the finished runs with lines of their rounds.

    Runs that differ only in their seed, and in settings that change neither results nor costs, make one row. The
    baseline is the first row that trains end to end, or the first one if none does.
    """
    required = ("seconds", "clients", "bytes_down", "bytes_up")
    lines = {run.folder: read_jsonl(run.folder / "metrics.jsonl", required=required) for run in runs if run.finished}
    incomplete = [
        f"{run.folder}: {format_rounds(run.missing_rounds)}" for run in runs if run.finished and run.missing_rounds
    ]
    runs = [run for run in runs if lines.get(run.folder) and not run.missing_rounds]
    groups = group_runs(runs, compared_settings(runs, ignored=IGNORED - HARDWARE))
    if not groups:
        return CostTable([], incomplete)
    shown = varying([group.settings for group in groups])
    end_to_end = [number for number, group in enumerate(groups) if group.runs[0].value("schedule") == BASELINE]
    baseline = end_to_end[0] if end_to_end else 0
    return CostTable(
        [
            CostRow(
                settings={key: group.settings[key] for key in shown},
                cost=_mean([sum_costs(lines[run.folder]) for run in first_of_each_seed(group.runs)]),
                baseline=number == baseline,
                runs=len(first_of_each_seed(group.runs)),
            )
            for number, group in enumerate(groups)
        ],
        incomplete,
    )


def _mean(costs: Sequence[CostTotals]) -> CostTotals:
    """Average each cost over the runs that measured it."""
    known = {
        field.name: [number for cost in costs if (number := getattr(cost, field.name)) is not None]
        for field in fields(CostTotals)
    }
    averages: dict[str, Any] = {name: mean(numbers) if numbers else None for name, numbers in known.items()}
    return CostTotals(**averages)


def _cost(name: str, value: float | None, ratio: float | None) -> TableCell:
    if value is None:
        return TableCell("-")
    if name == "flops":
        shown = f"{value:.3g}"
    elif name in ("seconds", "virtual_seconds"):
        shown = f"{value:.1f}"
    else:
        shown = _size(value)
    return TableCell(shown if ratio is None else f"{shown} ({ratio:.2f}x)", value)


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
