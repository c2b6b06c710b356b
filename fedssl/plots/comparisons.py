"""Plots that compare several runs; runs that differ only in their seed make one line, in the color of their strategy.

- accuracy over rounds (L-DAWA, Figure 6), bytes and FLOPs of a client, and over virtual time if a run has it. Costs are
  those of `fedssl.report.cost_table`
- the mean cosine of clients' models with the global one over rounds (L-DAWA, Figure 4); `fedssl.plots.curves` plots it
  for a single run and its layers
- the trade-off of adaptation: accuracy on other data sets, such as the source domain, over that on the run's own. An
  evaluation with results ``NAME`` on the run's data set and ``NAME@OTHER`` on others (``evaluation=domains``) gives a
  point per round

The first point is the encoder before the first round, if the end of the run was evaluated in the same way. Horizontal
lines are the accuracies of that encoder and of raw pixels: gray if they are those of all runs, else in a run's color.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, Score, as_scores, column_title, mean_and_std
from fedssl.plots.style import (
    MARKERS,
    PlotData,
    axes_over_rounds,
    by_round,
    line_style,
    new_figure,
    nth_line_style,
    plot_band,
)
from fedssl.runs.costs import cumulative_bytes
from fedssl.runs.groups import RunGroup, evaluates_alike, group_by_seed
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VIRTUAL_TIME = "virtual_seconds"
COSTS = {"round": "round", "bytes": "sent and received by a client", "flops": "FLOPs of a client"}
COSTS[VIRTUAL_TIME] = "virtual time"
UNITS = {"bytes": "B", "flops": "", VIRTUAL_TIME: "s"}

# Kinds of encoders of `Run.results_of`, with their name in the legend and the style of their lines.
BASELINES = {"untrained": ("untrained encoder", "--"), "pixels": ("raw pixels", ":")}

Accuracies = dict[int, dict[str, float]]  # by round, 0 before the first, and by result


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


def accuracies(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return those of the scores that are accuracies, in [0, 1]."""
    return {name: score.value for name, score in scores.items() if score.unit == ACCURACY}


def _accuracies_of(line: Mapping[str, Any]) -> dict[str, float]:
    return accuracies(as_scores(line.get("evaluation", {}), line.get("units")))


@dataclass(frozen=True)
class EvaluationPoint:
    """Accuracies in [0, 1] by protocol, and the costs until then of a client that takes part in every round."""

    round: int
    bytes: float | None  # down and up; None if lines of earlier rounds are missing
    flops: float | None  # None if not measured
    scores: dict[str, float]
    virtual_seconds: float | None = None  # None in wall-clock time


def evaluation_points(
    lines: Sequence[Mapping[str, Any]],
    *,
    initial: Mapping[str, float] | None = None,
    final: Mapping[str, float] | None = None,
) -> list[EvaluationPoint]:
    """Return the evaluations in lines of ``metrics.jsonl``; the cost of a round is the mean over its clients.

    ``initial`` are accuracies before the first round, whose costs are 0, and ``final`` those after the last one.
    """
    flops, points = 0.0, []
    complete = measured = True
    if initial:
        virtual = 0.0 if any(line.get("virtual_time") is not None for line in lines) else None
        points.append(EvaluationPoint(0, 0.0, 0.0, dict(initial), virtual))
    for round, (line, (down, up, _)) in enumerate(zip(lines, cumulative_bytes(lines), strict=True), start=1):
        complete = complete and line["round"] == round
        measured = measured and complete and "cost" in line
        flops += line["cost"]["flops"] if measured else 0.0
        scores = _accuracies_of(line)
        if final and round == len(lines):
            scores = {**final, **scores}
        if scores:
            costs = down + up if complete else None, flops if measured else None
            points.append(EvaluationPoint(line["round"], *costs, scores, line.get("virtual_time")))
    return points


def mean_over_seeds(runs: Sequence[Sequence[EvaluationPoint]], protocol: str) -> list[tuple[Any, ...]]:
    """Return the costs of `COSTS`, mean and standard deviation of an accuracy for rounds of all runs.

    Runs without this accuracy, such as those that have not ended, are not counted.
    """
    of_runs = [{point.round: point for point in points if protocol in point.scores} for points in runs]
    rows = []
    for round, points in _common_rounds(of_runs):
        costs = zip(*((point.bytes, point.flops, point.virtual_seconds) for point in points), strict=True)
        means = (None if None in values else mean(values) for values in costs)
        rows.append((round, *means, *mean_and_std([point.scores[protocol] for point in points])))
    return rows


def _common_rounds(runs: Sequence[Mapping[int, Any]]) -> list[tuple[int, list[Any]]]:
    """Return the rounds of all runs that have any, with the value of each run."""
    runs = [of_run for of_run in runs if of_run]
    rounds = sorted(set.intersection(*map(set, runs))) if runs else []
    return [(round, [of_run[round] for of_run in runs]) for round in rounds]


def plot_accuracy(runs: Sequence[Run]) -> PlotData | None:
    """Plot accuracy over rounds, bytes, FLOPs and virtual time; None if no run was evaluated.

    If no run was evaluated in its rounds, the results at the end of the run make the only point after the first.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    groups = group_by_seed(runs)
    in_rounds = _names_in_rounds(accuracies_by_round(run) for group in groups for run in group.runs)
    evaluations = [[_points_of(run, in_rounds) for run in group.runs] for group in groups]
    points_of_all = [point for of_group in evaluations for of_run in of_group for point in of_run]
    names = dict.fromkeys(name for point in points_of_all for name in point.scores)
    protocols = in_rounds or list(filter(runs[0].selects, names))
    if not protocols:
        return None
    has_virtual_time = any(point.virtual_seconds is not None for point in points_of_all)
    costs = [cost for cost in COSTS if has_virtual_time or cost != VIRTUAL_TIME]
    figure = new_figure(height=3.2 * len(protocols) + 0.2 * (len(groups) + len(BASELINES)), width=11.0 * len(costs) / 3)
    drawn: list[tuple[str, float, str]] = []
    rows: list[list[object]] = [["run", "protocol", *costs, "accuracy", "deviation"]]
    for row, protocol in enumerate(protocols):
        means = [mean_over_seeds(group, protocol) for group in evaluations]
        baselines = [baseline for kind in BASELINES for baseline in _baselines(groups, kind, protocol, in_rounds)]
        drawn += baselines
        for column, cost in enumerate(costs):
            position = len(protocols), len(costs), len(costs) * row + column + 1
            axes = figure.add_subplot(*position, xlabel=COSTS[cost])
            for style, points in zip(line_styles(groups), means, strict=True):
                known = [point for point in points if point[column] is not None]
                plot_band(axes, [point[column] for point in known], [point[-2:] for point in known], style, scale=100)
            for kind, value, color in baselines:
                axes.axhline(100 * value, color=color, linestyle=BASELINES[kind][1], linewidth=1)
            if cost == "round":
                axes.set_ylabel(column_title(f"{protocol} accuracy", "%"))
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.xaxis.set_major_formatter(EngFormatter(unit=UNITS[cost]))
                axes.xaxis.set_major_locator(MaxNLocator(5))
        for group, points in zip(groups, means, strict=True):
            rows += [[group.label, protocol, *point[: len(costs)], *point[-2:]] for point in points]
    for kind in dict.fromkeys(kind for kind, *_ in drawn):
        label, linestyle = BASELINES[kind]
        figure.axes[0].plot([], [], color="0.5", linestyle=linestyle, linewidth=1, label=label)
    _add_legend(figure)
    return PlotData(figure, rows)


def _baselines(
    groups: Sequence[RunGroup], kind: str, protocol: str, in_rounds: Sequence[str]
) -> list[tuple[str, float, str]]:
    """Return the kind, accuracy and color of each line of a baseline; a single gray one if all groups have the same."""
    found = []
    for group, style in zip(groups, line_styles(groups), strict=True):
        scores = [_final_accuracies(run, kind, in_rounds).get(protocol) for run in group.runs]
        if known := [score for score in scores if score is not None]:
            found.append((kind, mean(known), style["color"]))
    same = len({value for _, value, _ in found}) == 1
    return [(kind, found[0][1], "0.5")] if same else found


def _final_accuracies(run: Run, kind: str, in_rounds: Sequence[str]) -> dict[str, float]:
    """Return the final accuracies, without those that another protocol has given the names ``in_rounds``."""
    alike, scores = evaluates_alike(run), accuracies(run.results_of(kind))
    return {name: score for name, score in scores.items() if alike or name not in in_rounds}


def _points_of(run: Run, in_rounds: Sequence[str]) -> list[EvaluationPoint]:
    return evaluation_points(
        read_jsonl(run.folder / "metrics.jsonl", required=("bytes_down", "bytes_up", "clients")),
        initial=_final_accuracies(run, "untrained", in_rounds),
        final=_final_accuracies(run, "federated", in_rounds),
    )


def _names_in_rounds(runs: Iterable[Accuracies]) -> list[str]:
    """Return the names of the results in rounds, without those before the first."""
    return list(dict.fromkeys(name for run in runs for round, of_round in run.items() if round for name in of_round))


def _add_legend(figure: "Figure") -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small", frameon=False)


def mean_cosines(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean over clients of their model's cosine by round: mu_delta of L-DAWA's Figure 4."""
    return {round: mean(values) for round, values in by_round(lines, "model_cosine").items()}


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
    for group, style, of_runs in zip(groups, line_styles(groups), cosines, strict=True):
        points = [(round, *mean_and_std(values)) for round, values in _common_rounds(of_runs)]
        plot_band(axes, [point[0] for point in points], [point[1:] for point in points], style)
        rows += [[group.label, *point] for point in points]
    axes.legend(fontsize="small")
    return PlotData(figure, rows)


def accuracies_by_round(run: Run) -> Accuracies:
    """Return the accuracies in [0, 1] of each evaluated round, and as round 0 those before, by the same protocol."""
    found: Accuracies = {0: accuracies(run.results_of("untrained")) if evaluates_alike(run) else {}}
    for line in read_jsonl(run.folder / "metrics.jsonl"):
        found[line["round"]] = {name: value for name, value in _accuracies_of(line).items() if run.selects(name)}
    return {round: values for round, values in found.items() if values}


def mean_points(runs: Sequence[Accuracies], pair: tuple[str, str]) -> list[tuple[Any, ...]]:
    """Return the rounds of all runs that have both results, and mean and standard deviation of each."""
    both = [{round: values for round, values in run.items() if values.keys() >= set(pair)} for run in runs]
    points = []
    for round, of_runs in _common_rounds(both):
        own, other = ([values[name] for values in of_runs] for name in pair)
        points.append((round, *mean_and_std(own), *mean_and_std(other)))
    return points


def plot_tradeoff(runs: Sequence[Run]) -> PlotData | None:
    """Plot the accuracy on each other data set over that on the run's own; None if no run has both in its rounds.

    A line goes from the first round to the last, which has a larger mark.
    """
    groups = group_by_seed(runs)
    values = [[accuracies_by_round(run) for run in group.runs] for group in groups]
    names = _names_in_rounds(chain.from_iterable(values))
    pairs = [(own, name) for name in names for own, at, _ in [name.partition("@")] if at and own in names]
    if not pairs:
        return None
    longest = max(len(group.label) for group in groups)
    figure = new_figure(height=3.6 + 0.2 * len(groups), width=max(4.5 * len(pairs), 0.8 + 0.065 * longest))
    rows: list[list[object]] = [["run", "round", "own", "own deviation", "other", "accuracy", "deviation"]]
    for column, pair in enumerate(pairs, start=1):
        xlabel, ylabel = (column_title(f"{name} accuracy", "%") for name in pair)
        axes = figure.add_subplot(1, len(pairs), column, xlabel=xlabel, ylabel=ylabel)
        for group, style, of_runs in zip(groups, line_styles(groups), values, strict=True):
            points = mean_points(of_runs, pair)
            x, x_std, y, y_std = 100 * np.array([point[1:] for point in points], dtype=float).reshape(-1, 4).T
            axes.plot(x, y, markersize=3, **style)
            axes.errorbar(x[-1:], y[-1:], y_std[-1:], x_std[-1:], fmt=style["marker"], color=style["color"])
            rows += [[group.label, *point[:3], pair[1], *point[3:]] for point in points]
    _add_legend(figure)
    return PlotData(figure, rows)
