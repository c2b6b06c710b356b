"""What runs cost a client, side by side: LW-FedSSL's Table 3 (Tun et al., arXiv 2401.11647) for any runs, as measured.

Memory and FLOPs are those of `fedssl.step_cost`, bytes those of the messages, heads included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any

from fedssl.runs.costs import CostTotals, sum_costs
from fedssl.runs.groups import IGNORED, compared_settings, first_of_each_seed, group_runs, varying
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TableData, TextTable, text_cell, to_csv

BASELINE = "end_to_end"
HARDWARE = {"device", "threads", "engine"}  # change no result, but what it costs
COLUMNS = {
    "memory": "peak memory",
    "flops": "FLOPs",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "communication": "down + up",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class CostRow:
    """Runs that differ in nothing but the seed, and the means of what they cost.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line, of what differs between rows.
    cost : CostTotals
    baseline : bool
        Whether all other rows are relative to this one.
    runs : int
    """

    settings: dict[str, str]
    cost: CostTotals
    baseline: bool
    runs: int


@dataclass(frozen=True)
class CostTable(TextTable):
    """Costs side by side, absolute and relative to the run that trains end to end, or to the first one."""

    rows: list[CostRow]

    def data(self) -> TableData:
        """The table as cells: every cost, and behind it the same relative to the baseline."""
        rows = [
            [
                *map(text_cell, row.settings.values()),
                *(_cost(name, *self._pair(row, name)) for name in COLUMNS),
                text_cell(str(row.runs)),
            ]
            for row in self.rows
        ]
        header = [*self._keys, *COLUMNS.values(), "runs"]
        return TableData("What a run costs a client", header, rows, left=len(self._keys))

    def csv(self) -> str:
        """As comma-separated values: bytes, FLOPs and seconds in full precision, and each relative to the baseline."""
        lines: list[list[object]] = [
            [*self._keys, *(word for name in COLUMNS for word in (name, f"{name}_relative")), "runs"]
        ]
        for row in self.rows:
            numbers = [number for name in COLUMNS for number in self._pair(row, name)]
            lines.append([*row.settings.values(), *numbers, row.runs])
        return to_csv(lines)

    @property
    def _keys(self) -> list[str]:
        return list(self.rows[0].settings) if self.rows else []

    def _pair(self, row: CostRow, name: str) -> tuple[float | None, float | None]:
        """Return a cost, and the same relative to the baseline's; None where it is not known."""
        if name == "seconds" and any(one.cost.seconds is None for one in self.rows):
            name = "round_seconds"  # runs whose clients reported no time can be compared by this only
        value, base = (getattr(one.cost, name) for one in (row, next(one for one in self.rows if one.baseline)))
        return value, value / base if value is not None and base else None


def cost_table(runs: Sequence[Run]) -> CostTable:
    """Make a table of those runs that finished and have numbers of their rounds.

    Runs that differ only in their seed, and in settings that change neither a number nor a cost, make one row. All rows
    are relative to the first one that trains end to end, or to the first one if none does.
    """
    required = ("seconds", "clients", "bytes_down", "bytes_up")
    lines = {run.folder: read_jsonl(run.folder / "metrics.jsonl", required=required) for run in runs if run.finished}
    runs = [run for run in runs if lines.get(run.folder)]
    groups = group_runs(runs, compared_settings(runs, ignored=IGNORED - HARDWARE))
    if not groups:
        return CostTable([])
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
        ]
    )


def _mean(costs: Sequence[CostTotals]) -> CostTotals:
    """Average every number over those that know it."""
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
    elif name == "seconds":
        shown = f"{value:.1f}"
    else:
        shown = _size(value)
    return TableCell(shown if ratio is None else f"{shown} ({ratio:.2f}x)", value)


def _size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
