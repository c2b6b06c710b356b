"""Plots that compare several runs; runs that differ only in their seed make one line, in the color of their strategy.

- accuracy over rounds (L-DAWA, Figure 6), and over the bytes and the FLOPs that a client paid for it. Costs are counted
  as in `fedssl.report.cost_table`; LW-FedSSL's Figure 5 has them without the accuracy
- the mean cosine of clients' models with the global one over the rounds (L-DAWA, Figure 4); for a single run, and with
  its layers, see `fedssl.plots.curves`
- final accuracy over a setting that was swept: FedU2's Figure 6 (weight of FUR), FedU's Figure 5 (its threshold)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, as_scores, column_title
from fedssl.plots.style import MARKERS, PlotData, axes_over_rounds, line_style, new_figure
from fedssl.runs.groups import RunGroup, group_by_seed
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COSTS = {"round": "round", "bytes": "sent and received by a client", "flops": "FLOPs of a client"}


def line_styles(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """How the line of every group looks: colour and dashes of its rule, and a mark of its own among the same rule's."""
    found: list[dict[str, Any]] = []
    for number, one in enumerate(groups):
        before = sum(other.strategy == one.strategy for other in groups[:number])
        found.append(
            {**line_style(one.strategy)._asdict(), "marker": MARKERS[before % len(MARKERS)], "label": one.label}
        )
    return found


def plot_line(axes: "Axes", x: Sequence[Any], points: np.ndarray, style: Mapping[str, Any]) -> None:
    """Plot means with a band of one deviation to either side, ``(n, 2)``."""
    axes.plot(x, points[:, 0], markersize=4, **style)
    if points[:, 1].any():
        axes.fill_between(
            x, points[:, 0] - points[:, 1], points.sum(axis=1), color=style["color"], alpha=0.2, linewidth=0
        )


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


def plot_accuracy(runs: Sequence[Run]) -> PlotData | None:
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
                axes.set_ylabel(column_title(f"{protocol} accuracy", "%"))
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.xaxis.set_major_formatter(EngFormatter(unit="B" if cost == "bytes" else ""))
                axes.xaxis.set_major_locator(MaxNLocator(5))
        rows += [[one.label, protocol, *point] for one, points in zip(groups, found, strict=True) for point in points]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small", frameon=False)
    return PlotData(figure, rows)


def mean_cosines(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Mean over clients of the cosine of their model with the global one, by round: mu_delta of L-DAWA's Figure 4."""
    rounds: dict[int, list[float]] = {}
    for line in lines:
        if line.get("model_cosine") is not None:
            rounds.setdefault(line["round"], []).append(line["model_cosine"])
    return {round: mean(values) for round, values in sorted(rounds.items())}


def plot_divergence(runs: Sequence[Run]) -> PlotData:
    """Plot the mean cosine of clients' models with the global one over rounds.

    Raises
    ------
    InputError
        No run has cosines.
    """
    groups = group_by_seed(runs)
    cosines = [
        [mean_cosines(read_jsonl(run.folder / "clients.jsonl", required=("client",))) for run in g.runs] for g in groups
    ]
    if not any(found for group in cosines for found in group):
        raise InputError("no run has cosines of clients' models; they are there where weights travel, also with fedavg")
    figure = new_figure(height=3.6)
    axes = axes_over_rounds(figure, (1, 1, 1), "mean cosine with the global model")
    rows: list[list[object]] = [["run", "round", "cosine", "deviation"]]
    for one, style, found in zip(groups, line_styles(groups), cosines, strict=True):
        common = sorted(set.intersection(*map(set, found)))
        values = np.array([[own[round] for own in found] for round in common]).reshape(-1, len(found))
        points = np.stack([values.mean(axis=1), values.std(axis=1)], axis=1)
        plot_line(axes, common, points, style)
        rows += [[one.label, round, *point] for round, point in zip(common, points.tolist(), strict=True)]
    axes.legend(fontsize="small")
    return PlotData(figure, rows)


def swept_setting(groups: Sequence[RunGroup]) -> str:
    """The only setting whose values are numbers and differ.

    Raises
    ------
    InputError
        There is none, or more than one.
    """
    keys = [key for key in (groups[0].settings if groups else {}) if all(_number(one.settings[key]) for one in groups)]
    if len(keys) != 1:
        found = f"{len(keys)} do ({', '.join(keys)})" if keys else "none does"
        raise InputError(
            f"sensitivity needs runs in which one number differs, and {found}; give the folder of a sweep such as "
            "fedssl -m regularizer.weight=0,0.1,0.5"
        )
    return keys[0]


def plot_sensitivity(runs: Sequence[Run]) -> PlotData:
    """Plot final accuracies over the value that was swept; values are evenly spaced.

    Raises
    ------
    InputError
        No run has finished with an accuracy, or not exactly one number differs.
    """
    groups = group_by_seed([run for run in runs if run.finished])
    key = swept_setting(groups)
    values = sorted({float(one.settings[key]) for one in groups})
    scores = [{name: s for name, s in run.results.items() if s.unit == ACCURACY} for g in groups for run in g.runs]
    protocols = list(dict.fromkeys(name for found in scores for name in found))
    if not protocols:
        raise InputError("no run has a final accuracy; run again with final_evaluation=probes")
    lines: dict[str, list[RunGroup]] = {}
    for one in groups:
        others = {name: value for name, value in one.settings.items() if name != key}
        lines.setdefault(replace(one, settings=others).label, []).append(one)
    figure = new_figure(height=3.4, width=max(4.5, 3.6 * len(protocols)))
    rows: list[list[object]] = [["run", "protocol", key, "accuracy", "deviation", "runs"]]
    for column, protocol in enumerate(protocols, start=1):
        axes = figure.add_subplot(
            1, len(protocols), column, xlabel=key, ylabel=column_title(f"{protocol} accuracy", "%")
        )
        for (label, members), style in zip(lines.items(), line_styles([one[0] for one in lines.values()]), strict=True):
            found = final_scores(members, key, protocol)
            points = 100 * np.array([point[1:3] for point in found]).reshape(-1, 2)
            plot_line(axes, [values.index(point[0]) for point in found], points, {**style, "label": label})
            rows += [[label, protocol, *point] for point in found]
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        if column == 1:
            axes.legend(fontsize="small")
    return PlotData(figure, rows)


def final_scores(groups: Sequence[RunGroup], key: str, protocol: str) -> list[tuple[float, float, float, int]]:
    """Value of a setting, mean and deviation (divisor n) of a final accuracy over seeds, and runs; by the value."""
    found = []
    for one in groups:
        results = [run.results[protocol].value for run in one.runs if protocol in run.results]
        if results:
            found.append((float(one.settings[key]), mean(results), pstdev(results), len(results)))
    return sorted(found)


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
