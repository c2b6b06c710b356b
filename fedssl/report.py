"""Tables and pictures from run folders: encoders side by side, a sweep as one table, curves over the rounds."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPREAD = "_std"  # ending of a result that is the standard deviation of another


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
    return _align([["accuracy in %", *results], *body], left=1)


@dataclass
class Row:
    """The jobs of a sweep that differ in nothing but the seed.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line.
    metrics : dict
        Protocol to one accuracy per finished job.
    runs, failed : int
        Number of finished and of other jobs.
    """

    settings: dict[str, str]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Table:
    """A sweep: the settings that vary, the federated encoder's accuracy over seeds, and the jobs that failed.

    Standard deviations are those of a sample (divisor n - 1), and absent where there is one run.
    """

    rows: list[Row]
    failures: list[str]

    @property
    def failed(self) -> int:
        """Number of jobs that did not finish."""
        return len(self.failures)

    @property
    def keys(self) -> list[str]:
        """Settings in which rows differ, in the order of the command line."""
        names = dict.fromkeys(key for row in self.rows for key in row.settings)
        return [key for key in names if len({row.settings.get(key) for row in self.rows}) > 1]

    @property
    def metrics(self) -> list[str]:
        """Protocols, in the order in which they ran."""
        return _protocols(row.metrics for row in self.rows)

    def text(self) -> str:
        """For the terminal; accuracies in per cent."""
        return "\n".join([_align(self._cells(), left=len(self.keys)), *self._failure_lines()])

    def markdown(self) -> str:
        """As a Markdown table; accuracies in per cent."""
        header, *body = self._cells()
        rule = ["---"] * len(self.keys) + ["---:"] * (len(header) - len(self.keys))
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (header, rule, *body)]
        return "\n".join([*lines, *self._failure_lines(bullet="- ")]) + "\n"

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` (accuracies in [0, 1], full precision) and ``results.md``."""
        with (folder / "results.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            columns = [f"{name}_{kind}" for name in self.metrics for kind in ("mean", "std")]
            writer.writerow([*self.keys, *columns, "runs", "failed"])
            for row in self.rows:
                numbers = [value for name in self.metrics for value in _mean_std(row.metrics.get(name, []))]
                writer.writerow([*(row.settings.get(key, "") for key in self.keys), *numbers, row.runs, row.failed])
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
            ["", "jobs that did not finish:", "", *(bullet + line for line in self.failures)] if self.failures else []
        )


def sweep_table(folders: Sequence[Path]) -> Table:
    """The jobs of a sweep as one table; jobs that differ only in their seed make one row.

    Parameters
    ----------
    folders : sequence of Path
        Run folders with ``summary.json``. Without a readable one the job counts as failed.
    """
    rows: dict[frozenset[tuple[str, str]], Row] = {}
    failures = []
    for folder in folders:
        summary = _read_summary(folder)
        if summary is None:
            failures.append(f"{folder}: no readable summary.json, so it was ended from outside")
            continue
        words = summary["overrides"]
        pairs = dict(word.partition("=")[::2] for word in words)
        settings = {key.lstrip("+"): value for key, value in pairs.items() if key != "seed"}
        row = rows.setdefault(frozenset(settings.items()), Row(settings))
        if summary["status"] != "finished":
            row.failed += 1
            reason = " ".join((summary["reason"] or summary["status"]).split())
            failures.append(f"{folder} ({' '.join(words)}): {reason}")
            continue
        row.runs += 1
        for name, value in summary["final"].get("federated", {}).items():
            if not name.endswith(SPREAD):
                row.metrics.setdefault(name, []).append(value)
    return Table(list(rows.values()), failures)


def draw_metrics(folder: Path) -> Path | None:
    """Draw the loss and the accuracies of a run over its rounds to ``figures/metrics.png``.

    Returns
    -------
    Path or None
        The picture; None if the run recorded neither.
    """
    lines = _read_lines(folder / "metrics.jsonl")
    losses = {"loss": [(line["round"], line["loss"]) for line in lines if line["loss"] is not None]}
    evaluated = [line for line in lines if "evaluation" in line]
    accuracies = {
        name: [(line["round"], line["evaluation"][name]) for line in evaluated if name in line["evaluation"]]
        for name in _protocols(line["evaluation"] for line in evaluated)
    }
    panels = [
        (title, series)
        for title, series in (("mean loss of the clients", losses), ("accuracy", accuracies))
        if any(series.values())
    ]
    if not panels:
        return None
    figure = _figure(height=3.0 * len(panels))
    for position, (title, series) in enumerate(panels, start=1):
        axes = _axes(figure, (len(panels), 1, position), title)
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.legend()
    return _save(figure, folder / "figures" / "metrics.png")


def draw_cosines(folder: Path) -> Path | None:
    """Draw how close the clients stay to the global model to ``figures/cosines.png`` (L-DAWA, Fig. 4).

    A client's value is the mean over its layers; the line is the mean over the clients of a round, the band one
    standard deviation over them to either side.

    Returns
    -------
    Path or None
        The picture; None if no cosines were recorded.
    """
    clients: dict[int, list[float]] = {}
    for line in _read_lines(folder / "clients.jsonl"):
        if line["cosine"]:
            clients.setdefault(line["round"], []).append(mean(line["cosine"].values()))
    if not clients:
        return None
    rounds = sorted(clients)
    center = np.array([np.mean(clients[round]) for round in rounds])
    spread = np.array([np.std(clients[round]) for round in rounds])
    figure = _figure(height=3.5)
    axes = _axes(figure, (1, 1, 1), "cosine with the global model")
    axes.plot(rounds, center, marker=".", label="mean over clients and layers")
    axes.fill_between(rounds, center - spread, center + spread, alpha=0.25, label="standard deviation over clients")
    axes.legend()
    return _save(figure, folder / "figures" / "cosines.png")


def draw_spectra(folder: Path) -> Path | None:
    """Draw the singular values of the covariance of representations to ``figures/spectrum.png`` (FedU2, Fig. 3).

    Those of the global model and of every client, in the last round in which they were measured, as base-10 logarithms.

    Returns
    -------
    Path or None
        The picture; None if nothing was measured.
    """
    file = folder / "health.jsonl"
    lines = _read_lines(file) if file.exists() else []
    if not lines:
        return None
    last = lines[-1]["round"]
    figure = _figure(height=3.5)
    axes = figure.add_subplot(1, 1, 1, xlabel="index of the singular value", ylabel="log10 singular value")
    for line in (line for line in lines if line["round"] == last):
        values = np.log10(np.maximum(line["singular_values"], 1e-12))
        if line["client"] is None:
            axes.plot(values, color="black", linewidth=2, zorder=3, label=f"global model, round {last}")
        else:
            axes.plot(values, color="tab:blue", alpha=0.4, label="clients")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    return _save(figure, folder / "figures" / "spectrum.png")


def _figure(*, height: float) -> "Figure":
    # Not pyplot: it keeps figures and may look for a display. Imported here because it takes half a second.
    from matplotlib.figure import Figure

    return Figure(figsize=(7.0, height), layout="constrained")


def _axes(figure: "Figure", position: tuple[int, int, int], title: str) -> "Axes":
    """Axes over rounds, with whole numbers on the horizontal one."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(*position, xlabel="round", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def _save(figure: "Figure", file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def _protocols(results: Iterable[Mapping[str, object]]) -> list[str]:
    """Names of the accuracies in several mappings, each once, without the standard deviations."""
    return [name for name in dict.fromkeys(name for one in results for name in one) if not name.endswith(SPREAD)]


def _mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    return mean(values) if values else None, stdev(values) if len(values) > 1 else None


def _percent(value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f}"


def _align(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns of equal width; the first ``left`` start, the others end, at the same place."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position < left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _read_summary(folder: Path) -> dict[str, Any] | None:
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return summary


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
