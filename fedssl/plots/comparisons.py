"""Accuracy of runs over rounds (L-DAWA, Figure 6), and over the bytes and the FLOPs that a client paid for it.

Costs are counted as in `fedssl.report.cost_table`; LW-FedSSL's Figure 5 has them without the accuracy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, as_scores, heading
from fedssl.plots.groups import group_by_seed, line_styles, plot_line
from fedssl.plots.style import SCREEN_FORMATS, PlotData, new_figure, save_figure
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run

COSTS = {"round": "round", "bytes": "sent and received by a client", "flops": "FLOPs of a client"}


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation of a run, and what a client that took part in every round had to bear until then.

    Attributes
    ----------
    round : int
    bytes : float
        Down and up.
    flops : float or None
        None: they were not measured.
    scores : dict of str to float
        Accuracies by protocol, in [0, 1].
    """

    round: int
    bytes: float
    flops: float | None
    scores: dict[str, float]


def evaluation_points(lines: Iterable[Mapping[str, Any]]) -> list[EvaluationPoint]:
    """The evaluations in the lines of ``metrics.jsonl``; a round costs a client what it cost those of it on average."""
    sent, flops, steps = 0.0, 0.0, []
    measured = True
    for line in lines:
        sent += (line["bytes_down"] + line["bytes_up"]) / line["clients"]
        measured = measured and "cost" in line
        flops += line["cost"]["flops"] if measured else 0.0
        found = as_scores(line.get("evaluation", {}), line.get("units"))
        scores = {name: score.value for name, score in found.items() if score.unit == ACCURACY}
        if scores:
            steps.append(EvaluationPoint(line["round"], sent, flops if measured else None, scores))
    return steps


def mean_over_seeds(
    runs: Sequence[Sequence[EvaluationPoint]], protocol: str
) -> list[tuple[int, float, float | None, float, float]]:
    """Round, bytes, FLOPs, and mean and standard deviation (divisor n) of an accuracy, where all runs have it."""
    by_round = [{step.round: step for step in steps if protocol in step.scores} for steps in runs]
    common = sorted(set.intersection(*map(set, by_round)))
    rows = []
    for round in common:
        steps = [found[round] for found in by_round]
        known = [step.flops for step in steps if step.flops is not None]
        values = [step.scores[protocol] for step in steps]
        flops = mean(known) if len(known) == len(steps) else None
        rows.append((round, mean(step.bytes for step in steps), flops, mean(values), pstdev(values)))
    return rows


def draw_accuracy(runs: Sequence[Run], folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path:
    """Draw `accuracies` to ``figures/accuracy.png`` of a folder.

    Raises
    ------
    InputError
        No run was evaluated in its rounds.
    """
    drawing = accuracies(runs)
    if drawing is None:
        raise InputError("no run was evaluated in its rounds; run again with evaluation=knn evaluate_every=1")
    return save_figure(drawing.figure, folder, "accuracy", rows=drawing.rows, formats=formats)


def accuracies(runs: Sequence[Run]) -> PlotData | None:
    """Plot accuracy over rounds, bytes and FLOPs; None if no run was evaluated in its rounds."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    required = ("bytes_down", "bytes_up", "clients")
    groups = group_by_seed(runs)
    steps = [
        [evaluation_points(read_jsonl(run.folder / "metrics.jsonl", required=required)) for run in one.runs]
        for one in groups
    ]
    protocols = list(dict.fromkeys(name for group in steps for run in group for one in run for name in one.scores))
    if not protocols:
        return None
    figure = new_figure(height=3.2 * len(protocols) + 0.2 * len(groups), width=11.0)
    rows: list[list[object]] = [["run", "protocol", *COSTS, "accuracy", "deviation"]]
    for row, protocol in enumerate(protocols):
        found = [mean_over_seeds(group, protocol) for group in steps]
        for column, (cost, title) in enumerate(COSTS.items()):
            axes = figure.add_subplot(len(protocols), 3, 3 * row + column + 1, xlabel=title)
            for style, points in zip(line_styles(groups), found, strict=True):
                known = [point for point in points if point[column] is not None]
                across = [point[column] for point in known]
                plot_line(axes, across, 100 * np.array([point[3:] for point in known]).reshape(-1, 2), style)
            if cost == "round":
                axes.set_ylabel(heading(f"{protocol} accuracy", "%"))
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.xaxis.set_major_formatter(EngFormatter(unit="B" if cost == "bytes" else ""))
                axes.xaxis.set_major_locator(MaxNLocator(5))
        rows += [[one.label, protocol, *point] for one, points in zip(groups, found, strict=True) for point in points]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small", frameon=False)
    return PlotData(figure, rows)
