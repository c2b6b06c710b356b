"""Measured costs of a client in any runs: LW-FedSSL's Table 3 (Tun et al., arXiv 2401.11647).

Memory and FLOPs are those of `fedssl.step_cost`, bytes those of the messages, heads included.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import mean
from typing import Any

from fedssl.runs.costs import CostTotals, sum_costs
from fedssl.runs.groups import IGNORED, compared_settings, group_runs, newest_of_each_seed, varying
from fedssl.runs.jsonl import format_rounds, read_jsonl
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TextTable, text_cell

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


def cost_table(runs: Sequence[Run]) -> TextTable:
    """Return the table of the finished runs with lines of their rounds: every cost, and its ratio to the baseline's.

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
    keys = varying([group.settings for group in groups])
    seeds = [newest_of_each_seed(group.runs) for group in groups]
    costs = [_mean([sum_costs(lines[run.folder]) for run in of_group]) for of_group in seeds]
    end_to_end = [number for number, group in enumerate(groups) if group.runs[0].value("schedule") == BASELINE]
    columns = dict(COLUMNS)
    if not any(cost.base_bytes for cost in costs):
        del columns["base_bytes"]
    if all(cost.virtual_seconds is None for cost in costs):
        del columns["virtual_seconds"]
    if any(cost.seconds is None for cost in costs):
        costs = [replace(cost, seconds=cost.round_seconds) for cost in costs]  # known of all runs
    rows = [
        [
            *(text_cell(group.settings[key]) for key in keys),
            *(_cell(name, cost, costs[end_to_end[0] if end_to_end else 0]) for name in columns),
            text_cell(str(len(of_group))),
        ]
        for group, of_group, cost in zip(groups, seeds, costs, strict=True)
    ]
    return TextTable(
        "What a run costs a client",
        [*keys, *columns.values(), "runs"],
        rows,
        left=len(keys),
        notes={"not counted, because metrics.jsonl lacks rounds:": incomplete} if incomplete else {},
        csv_header=[*keys, *(column for name in columns for column in (name, f"{name}_relative")), "runs"],
    )


def _mean(costs: Sequence[CostTotals]) -> CostTotals:
    """Average each cost over the runs that measured it."""
    known = {
        field.name: [number for cost in costs if (number := getattr(cost, field.name)) is not None]
        for field in fields(CostTotals)
    }
    averages: dict[str, Any] = {name: mean(numbers) if numbers else None for name, numbers in known.items()}
    return CostTotals(**averages)


def _cell(name: str, cost: CostTotals, baseline: CostTotals) -> TableCell:
    value, base = (getattr(each, name) for each in (cost, baseline))
    if value is None:
        return TableCell("-", numbers=(None, None))
    if name == "flops":
        shown = f"{value:.3g}"
    elif name in ("seconds", "virtual_seconds"):
        shown = f"{value:.1f}"
    else:
        shown = _size(value)
    ratio = value / base if base else None
    return TableCell(shown if ratio is None else f"{shown} ({ratio:.2f}x)", value, numbers=(value, ratio))


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
