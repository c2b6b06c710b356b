"""Plots that compare several runs; runs that differ only in their seed make one line, in the color of their strategy.

- accuracy over rounds (L-DAWA, Figure 6), bytes and FLOPs of a client, and over virtual time if a run has it. Costs are
  those of `fedssl.report.cost_table`
- the mean cosine of clients' models with the global one over rounds (L-DAWA, Figure 4); `fedssl.plots.curves` plots it
  for a single run and its layers
- final accuracy over a swept setting: FedU2's Figure 6 (weight of FUR), FedU's Figure 5 (threshold)
- a heat map of final accuracies over two swept settings
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, Score, as_scores, column_title, mean_and_std
from fedssl.plots.style import MARKERS, PlotData, axes_over_rounds, line_style, new_figure, nth_line_style
from fedssl.runs.groups import RunGroup, group_by_seed
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VIRTUAL_TIME = "virtual_seconds"
COSTS = {"round": "round", "bytes": "sent and received by a client", "flops": "FLOPs of a client"}
COSTS[VIRTUAL_TIME] = "virtual time"
UNITS = {"bytes": "B", "flops": "", VIRTUAL_TIME: "s"}


def line_styles(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the line style of each group: color and dashes of its strategy, and different markers within it.

    Several groups of a single strategy differ in color as well.
    """
    single = len(groups) > 1 and len({group.strategy for group in groups}) == 1
    styles: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        before = sum(other.strategy == group.strategy for other in groups[:index])
        style = nth_line_style(index) if single else line_style(group.strategy)
        styles.append({**style._asdict(), "marker": MARKERS[before % len(MARKERS)], "label": group.label})
    return styles


def plot_line(axes: "Axes", x: Sequence[Any], points: np.ndarray, style: Mapping[str, Any]) -> None:
    """Plot means with a band of one standard deviation, ``(n, 2)``; no band where it is NaN."""
    axes.plot(x, points[:, 0], markersize=4, **style)
    if np.isfinite(points[:, 1]).any():
        axes.fill_between(
            x, points[:, 0] - points[:, 1], points.sum(axis=1), color=style["color"], alpha=0.2, linewidth=0
        )


@dataclass(frozen=True)
class EvaluationPoint:
    """Accuracies in [0, 1] by protocol, and the costs until then of a client that takes part in every round."""

    round: int
    bytes: float | None  # down and up; None if lines of earlier rounds are missing
    flops: float | None  # None if not measured
    scores: dict[str, float]
    virtual_seconds: float | None = None  # None in wall-clock time

    @property
    def costs(self) -> tuple[float | None, ...]:
        """Return the costs in the order of `COSTS`, without the round."""
        return self.bytes, self.flops, self.virtual_seconds


def evaluation_points(
    lines: Iterable[Mapping[str, Any]],
    *,
    initial: Mapping[str, float] | None = None,
    final: Mapping[str, float] | None = None,
) -> list[EvaluationPoint]:
    """Return the evaluations in lines of ``metrics.jsonl``; the cost of a round is the mean over its clients.

    ``initial`` are accuracies before the first round, whose costs are 0, and ``final`` those after the last one.
    """
    lines = list(lines)
    sent, flops, points = 0.0, 0.0, []
    complete = measured = True
    if initial:
        virtual = 0.0 if any(line.get("virtual_time") is not None for line in lines) else None
        points.append(EvaluationPoint(0, 0.0, 0.0, dict(initial), virtual))
    for round, line in enumerate(lines, start=1):
        complete = complete and line["round"] == round
        sent += (line["bytes_down"] + line["bytes_up"]) / line["clients"]
        measured = measured and complete and "cost" in line
        flops += line["cost"]["flops"] if measured else 0.0
        scores = accuracies(as_scores(line.get("evaluation", {}), line.get("units")))
        if final and round == len(lines):
            scores = {**final, **scores}
        if scores:
            costs = sent if complete else None, flops if measured else None
            points.append(EvaluationPoint(line["round"], *costs, scores, line.get("virtual_time")))
    return points


def accuracies(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return those of the scores that are accuracies, in [0, 1]."""
    return {name: score.value for name, score in scores.items() if score.unit == ACCURACY}


def mean_over_seeds(runs: Sequence[Sequence[EvaluationPoint]], protocol: str) -> list[tuple[Any, ...]]:
    """Return the costs of `COSTS`, mean and standard deviation of an accuracy for rounds of all runs.

    Runs without this accuracy, such as those that have not ended, are not counted.
    """
    by_round = [{point.round: point for point in points if protocol in point.scores} for points in runs]
    by_round = [points for points in by_round if points]
    rows = []
    for round in sorted(set.intersection(*map(set, by_round))) if by_round else []:
        points = [of_run[round] for of_run in by_round]
        values = [point.scores[protocol] for point in points]
        costs = (_mean(values) for values in zip(*(point.costs for point in points), strict=True))
        rows.append((round, *costs, *mean_and_std(values)))
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def plot_accuracy(runs: Sequence[Run]) -> PlotData | None:
    """Plot accuracy over rounds, bytes, FLOPs and virtual time; None if no run was evaluated.

    The first point is the encoder before the first round, if the end of the run was evaluated in the same way. If no
    run was evaluated in its rounds, the results at the end of the run make the only other point.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    required = ("bytes_down", "bytes_up", "clients")
    groups = group_by_seed(runs)
    evaluations = [
        [
            evaluation_points(
                read_jsonl(run.folder / "metrics.jsonl", required=required),
                initial=accuracies(run.results_of("untrained")),
                final=accuracies(run.results_of("federated")),
            )
            for run in group.runs
        ]
        for group in groups
    ]
    names = dict.fromkeys(name for group in evaluations for run in group for point in run for name in point.scores)
    protocols = _evaluated_in_rounds(groups) or list(filter(runs[0].selects, names))
    if not protocols:
        return None
    has_virtual_time = any(point.virtual_seconds is not None for group in evaluations for run in group for point in run)
    costs = [cost for cost in COSTS if has_virtual_time or cost != VIRTUAL_TIME]
    width = 11.0 * len(costs) / 3
    figure = new_figure(height=3.2 * len(protocols) + 0.2 * len(groups), width=width)
    rows: list[list[object]] = [["run", "protocol", *costs, "accuracy", "deviation"]]
    for row, protocol in enumerate(protocols):
        means = [mean_over_seeds(group, protocol) for group in evaluations]
        for column, cost in enumerate(costs):
            position = len(protocols), len(costs), len(costs) * row + column + 1
            axes = figure.add_subplot(*position, xlabel=COSTS[cost])
            for style, points in zip(line_styles(groups), means, strict=True):
                known = [point for point in points if point[column] is not None]
                across = [point[column] for point in known]
                plot_line(
                    axes, across, 100 * np.array([point[-2:] for point in known], dtype=float).reshape(-1, 2), style
                )
            if cost == "round":
                axes.set_ylabel(column_title(f"{protocol} accuracy", "%"))
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.xaxis.set_major_formatter(EngFormatter(unit=UNITS[cost]))
                axes.xaxis.set_major_locator(MaxNLocator(5))
        for group, points in zip(groups, means, strict=True):
            rows += [[group.label, protocol, *point[: len(costs)], *point[-2:]] for point in points]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small", frameon=False)
    return PlotData(figure, rows)


def _evaluated_in_rounds(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the accuracies in lines of rounds."""
    names: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        for line in read_jsonl(run.folder / "metrics.jsonl"):
            scores = accuracies(as_scores(line.get("evaluation", {}), line.get("units")))
            names |= dict.fromkeys(filter(run.selects, scores))
    return list(names)


def mean_cosines(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean over clients of their model's cosine by round: mu_delta of L-DAWA's Figure 4."""
    rounds: dict[int, list[float]] = {}
    for line in lines:
        if line.get("model_cosine") is not None:
            rounds.setdefault(line["round"], []).append(line["model_cosine"])
    return {round: mean(values) for round, values in sorted(rounds.items())}


def plot_divergence(runs: Sequence[Run]) -> PlotData:
    """Plot the mean cosine of clients' models with the global one; raise an `InputError` if no run has cosines."""
    groups = group_by_seed(runs)
    cosines = [
        [mean_cosines(read_jsonl(run.folder / "clients.jsonl", required=("client",))) for run in group.runs]
        for group in groups
    ]
    if not any(any(group) for group in cosines):
        raise InputError("no run has cosines of clients' models; use a strategy that exchanges weights, e.g. fedavg")
    figure = new_figure(height=3.6)
    axes = axes_over_rounds(figure, (1, 1, 1), "mean cosine with the global model")
    rows: list[list[object]] = [["run", "round", "cosine", "deviation"]]
    for group, style, runs_cosines in zip(groups, line_styles(groups), cosines, strict=True):
        runs_cosines = [of_run for of_run in runs_cosines if of_run]  # without runs that have not started
        common = sorted(set.intersection(*map(set, runs_cosines))) if runs_cosines else []
        points = [mean_and_std([of_run[round] for of_run in runs_cosines]) for round in common]
        plot_line(axes, common, np.array(points, dtype=float).reshape(-1, 2), style)
        rows += [[group.label, round, *point] for round, point in zip(common, points, strict=True)]
    axes.legend(fontsize="small")
    return PlotData(figure, rows)


def numeric_settings(groups: Sequence[RunGroup]) -> list[str]:
    """Return the settings that vary and are numbers in all groups."""
    keys = groups[0].settings if groups else {}
    return [key for key in keys if all(_number(group.settings[key]) for group in groups)]


def _check_swept(keys: Sequence[str], number: int, *, plot: str, what: str, sweep: str) -> None:
    if len(keys) != number:
        found = f"{len(keys)} do ({', '.join(keys)})" if keys else "none does"
        raise InputError(
            f"{plot} needs runs in which {what}, and {found}; give the folder of a sweep such as fedssl -m {sweep}"
        )


def swept_setting(groups: Sequence[RunGroup]) -> str:
    """Return the only numeric setting that varies; raise an `InputError` if there is none or several."""
    keys = numeric_settings(groups)
    _check_swept(keys, 1, plot="sensitivity", what="one number differs", sweep="regularizer.weight=0,0.1,0.5")
    return keys[0]


def plot_sensitivity(runs: Sequence[Run]) -> PlotData:
    """Plot final accuracies over the swept value, evenly spaced."""
    groups = group_by_seed([run for run in runs if run.finished])
    key = swept_setting(groups)
    values = sorted({float(group.settings[key]) for group in groups})
    protocols = _accuracies(groups)
    lines: dict[str, list[RunGroup]] = {}
    for group in groups:
        others = {name: value for name, value in group.settings.items() if name != key}
        lines.setdefault(replace(group, settings=others).label, []).append(group)
    figure = new_figure(height=3.4, width=max(4.5, 3.6 * len(protocols)))
    rows: list[list[object]] = [["run", "protocol", key, "accuracy", "deviation", "runs"]]
    for column, protocol in enumerate(protocols, start=1):
        axes = figure.add_subplot(
            1, len(protocols), column, xlabel=key, ylabel=column_title(f"{protocol} accuracy", "%")
        )
        styles = line_styles([members[0] for members in lines.values()])
        for (label, members), style in zip(lines.items(), styles, strict=True):
            scores = final_scores(members, key, protocol)
            points = 100 * np.array([score[1:3] for score in scores], dtype=float).reshape(-1, 2)
            plot_line(axes, [values.index(score[0]) for score in scores], points, {**style, "label": label})
            rows += [[label, protocol, *score] for score in scores]
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        if column == 1:
            axes.legend(fontsize="small")
    return PlotData(figure, rows)


def plot_heatmap(runs: Sequence[Run]) -> PlotData:
    """Plot final accuracies over two swept numbers, with a column for each protocol and a row for all other settings.

    A cell has the mean over seeds, and the standard deviation if there are several.
    """
    groups = group_by_seed([run for run in runs if run.finished])
    keys = numeric_settings(groups)
    _check_swept(keys, 2, plot="heatmap", what="two numbers differ", sweep="partition.alpha=0.1,1 num_clients=5,10")
    protocols = _accuracies(groups)
    columns, rows = (sorted({float(group.settings[key]) for group in groups}) for key in keys)
    panels: dict[str, list[RunGroup]] = {}
    for group in groups:
        others = {name: value for name, value in group.settings.items() if name not in keys}
        panels.setdefault(replace(group, settings=others).label, []).append(group)
    shape = len(panels), len(protocols)
    figure = new_figure(
        width=max(4.5, shape[1] * (1.5 + 0.9 * len(columns))), height=shape[0] * (1.4 + 0.5 * len(rows))
    )
    lines: list[list[object]] = [["run", "protocol", *keys, "accuracy", "deviation", "runs"]]
    for number, (label, protocol) in enumerate(itertools.product(panels, protocols), start=1):
        axes = figure.add_subplot(*shape, number, xlabel=keys[0], ylabel=keys[1])
        axes.set_title(f"{label}: {column_title(f'{protocol} accuracy', '%')}", fontsize="small")
        scores = {
            (score[0], float(group.settings[keys[1]])): score[1:]
            for group in panels[label]
            for score in final_scores([group], keys[0], protocol)
        }
        cells = np.array([[100 * scores.get((x, y), (math.nan,))[0] for x in columns] for y in rows])
        image = axes.imshow(np.ma.masked_invalid(cells), cmap="cividis", aspect="auto", origin="lower")
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2 if scores else 0
        for (x, y), (score, deviation, num_runs) in scores.items():
            text = f"{100 * score:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
            color = "black" if 100 * score > middle else "white"
            axes.text(columns.index(x), rows.index(y), text, ha="center", va="center", color=color, fontsize="small")
            lines.append([label, protocol, x, y, score, deviation, num_runs])
        axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        figure.colorbar(image, ax=axes)
    return PlotData(figure, lines)


def _accuracies(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the final accuracies of all runs; raises an `InputError` without any."""
    results = [run.results for group in groups for run in group.runs]
    protocols = list(dict.fromkeys(name for scores in results for name, s in scores.items() if s.unit == ACCURACY))
    if not protocols:
        raise InputError("no run has a final accuracy; run again with final_evaluation=probes")
    return protocols


def final_scores(groups: Sequence[RunGroup], key: str, protocol: str) -> list[tuple[float, float, float | None, int]]:
    """Return setting, mean and standard deviation of a final accuracy over seeds, and number of runs."""
    scores = []
    for group in groups:
        results = [run.results[protocol].value for run in group.runs if protocol in run.results]
        if results:
            scores.append((float(group.settings[key]), *mean_and_std(results), len(results)))
    return sorted(scores)


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
