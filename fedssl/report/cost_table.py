"""What runs cost a client, side by side: LW-FedSSL's Table 3 (Tun et al., arXiv 2401.11647) for any runs, as measured.

Memory and FLOPs are those of `fedssl.step_cost`, bytes those of the messages, heads included.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any

from fedssl.report.accuracy_table import LEFT_OUT, align
from fedssl.report.runs import Run, read_lines

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


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Cost of a client over all rounds of a run, if it took part in each: of a round it is the mean over its clients.

    Attributes
    ----------
    memory : float or None
        Bytes at the worst moment of a training step; None: it was not measured.
    flops : float or None
        Of all training steps.
    bytes_down, bytes_up : float
        Of the messages.
    seconds : float or None
        Of its part in the rounds; None: clients did not report it.
    round_seconds : float
        Of the rounds, in which clients take turns or work at once.
    """

    memory: float | None
    flops: float | None
    bytes_down: float
    bytes_up: float
    seconds: float | None
    round_seconds: float

    @property
    def communication(self) -> float:
        """Bytes in both directions."""
        return self.bytes_down + self.bytes_up


def totals(rounds: Sequence[Mapping[str, Any]]) -> Totals:
    """Totals of the lines of ``metrics.jsonl``."""
    costs = [line.get("cost") for line in rounds]
    seconds = [line.get("client_seconds") for line in rounds]
    measured = [cost for cost in costs if cost is not None]
    known = [value for value in seconds if value is not None]
    complete = len(measured) == len(rounds) > 0
    return Totals(
        memory=max(cost["peak_memory"] for cost in measured) if complete else None,
        flops=sum(cost["flops"] for cost in measured) if complete else None,
        bytes_down=sum(line["bytes_down"] / line["clients"] for line in rounds),
        bytes_up=sum(line["bytes_up"] / line["clients"] for line in rounds),
        seconds=sum(known) if len(known) == len(rounds) > 0 else None,
        round_seconds=sum(line["seconds"] for line in rounds),
    )


@dataclass(frozen=True)
class CostRow:
    """Runs that differ in nothing but the seed, and the means of what they cost.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line, of what differs between rows.
    cost : Totals
    baseline : bool
        Whether all other rows are relative to this one.
    runs : int
    """

    settings: dict[str, str]
    cost: Totals
    baseline: bool
    runs: int


@dataclass(frozen=True)
class CostTable:
    """Costs side by side, absolute and relative to the run that trains end to end, or to the first one."""

    rows: list[CostRow]

    def text(self) -> str:
        """For the terminal."""
        return align(self._cells(), left=len(self._keys))

    def markdown(self) -> str:
        """As a Markdown table."""
        header, *body = self._cells()
        rule = ["---"] * len(self._keys) + ["---:"] * (len(header) - len(self._keys))
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (header, rule, *body)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """As comma-separated values: bytes, FLOPs and seconds in full precision, and each relative to the baseline."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*self._keys, *(word for name in COLUMNS for word in (name, f"{name}_relative")), "runs"])
        for row in self.rows:
            numbers = [number for name in COLUMNS for number in self._pair(row, name)]
            writer.writerow([*row.settings.values(), *numbers, row.runs])
        return stream.getvalue()

    @property
    def _keys(self) -> list[str]:
        return list(self.rows[0].settings) if self.rows else []

    def _cells(self) -> list[list[str]]:
        body = [
            [*row.settings.values(), *(_cell(name, *self._pair(row, name)) for name in COLUMNS), str(row.runs)]
            for row in self.rows
        ]
        return [[*self._keys, *COLUMNS.values(), "runs"], *body]

    def _pair(self, row: CostRow, name: str) -> tuple[float | None, float | None]:
        """A cost, and the same relative to the baseline's; None where it is not known."""
        if name == "seconds" and any(one.cost.seconds is None for one in self.rows):
            name = "round_seconds"  # the one for all, or else the other
        value, base = (getattr(one.cost, name) for one in (row, next(one for one in self.rows if one.baseline)))
        return value, value / base if value is not None and base else None


def cost_table(runs: Sequence[Run]) -> CostTable:
    """Those of the runs that finished as a table; if they differ only in their seed they make one row.

    There are no rows without a run that has numbers of its rounds.
    """
    lines = {run.folder: read_lines(run.folder / "metrics.jsonl") for run in runs if run.finished}
    runs = [run for run in runs if lines.get(run.folder)]
    left_out = LEFT_OUT - HARDWARE
    given = dict.fromkeys(key for run in runs for key in run.words if key.partition(".")[0] not in left_out)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.value(key) for key in given), []).append(run)
    differing = [key for key, values in zip(given, zip(*groups, strict=True), strict=True) if len(set(values)) > 1]
    whole = [values for values, members in groups.items() if members[0].value("schedule") == BASELINE]
    baseline = next(iter([*whole, *groups]), None)
    return CostTable(
        [
            CostRow(
                {key: value for key, value in zip(given, values, strict=True) if key in differing},
                _mean([totals(lines[run.folder]) for run in members]),
                values == baseline,
                len(members),
            )
            for values, members in groups.items()
        ]
    )


def _mean(costs: Sequence[Totals]) -> Totals:
    """Means over those that know the number."""

    def over(numbers: Iterable[float | None]) -> float | None:
        known = [number for number in numbers if number is not None]
        return mean(known) if known else None

    return Totals(**{field.name: over(getattr(cost, field.name) for cost in costs) for field in fields(Totals)})  # type: ignore[arg-type]  # bytes are always known


def _cell(name: str, value: float | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    if name == "flops":
        shown = f"{value:.3g}"
    elif name == "seconds":
        shown = f"{value:.1f}"
    else:
        shown = _size(value)
    return shown if ratio is None else f"{shown} ({ratio:.2f}x)"


def _size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
