"""Plots of final accuracies over the settings of a sweep; runs that differ only in their seed make one value.

- over one setting: FedU2's Figure 6 (weight of FUR), FedU's Figure 5 (threshold)
- a heat map over two settings
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import column_title, mean_and_std
from fedssl.plots.comparisons import accuracies, line_styles
from fedssl.plots.style import PlotData, new_figure, plot_band
from fedssl.runs.groups import RunGroup, group_by_seed
from fedssl.runs.run import Run
from fedssl.text_table import text_cell


class Sweep(NamedTuple):
    """The finished runs of a sweep."""

    keys: list[str]  # settings that vary and are numbers in all groups
    values: list[list[float]]  # of each key, ascending
    groups: dict[str, list[RunGroup]]  # by the label of all other settings
    protocols: list[str]  # with final accuracies


def read_sweep(runs: Sequence[Run], number: int, *, plot: str, what: str, example: str) -> Sweep:
    """Return a sweep; raises `InputError` unless ``number`` settings vary and are numbers, and without accuracies."""
    groups = group_by_seed([run for run in runs if run.finished])
    settings = groups[0].settings if groups else {}
    keys = [key for key in settings if all(text_cell(group.settings[key]).value is not None for group in groups)]
    if len(keys) != number:
        found = f"{len(keys)} do ({', '.join(keys)})" if keys else "none does"
        raise InputError(
            f"{plot} needs runs in which {what}, and {found}; give the folder of a sweep such as fedssl -m {example}"
        )
    protocols = list(dict.fromkeys(name for group in groups for run in group.runs for name in accuracies(run.results)))
    if not protocols:
        raise InputError("no run has a final accuracy; run again with final_evaluation=probes")
    labeled: dict[str, list[RunGroup]] = {}
    for group in groups:
        others = {name: value for name, value in group.settings.items() if name not in keys}
        labeled.setdefault(replace(group, settings=others).label, []).append(group)
    values = [sorted({float(group.settings[key]) for group in groups}) for key in keys]
    return Sweep(keys, values, labeled, protocols)


def final_scores(groups: Sequence[RunGroup], keys: Sequence[str], protocol: str) -> list[tuple[Any, ...]]:
    """Return settings, mean and standard deviation of a final accuracy over seeds, and number of runs."""
    scores = []
    for group in groups:
        results = [run.results[protocol].value for run in group.runs if protocol in run.results]
        if results:
            settings = (float(group.settings[key]) for key in keys)
            scores.append((*settings, *mean_and_std(results), len(results)))
    return scores


def plot_sensitivity(runs: Sequence[Run]) -> PlotData:
    """Plot final accuracies over the swept value, evenly spaced."""
    example = "regularizer.weight=0,0.1,0.5"
    sweep = read_sweep(runs, 1, plot="sensitivity", what="one number differs", example=example)
    (key,), (values,), lines, protocols = sweep
    figure = new_figure(height=3.4, width=max(4.5, 3.6 * len(protocols)))
    rows: list[list[object]] = [["run", "protocol", key, "accuracy", "deviation", "runs"]]
    for column, protocol in enumerate(protocols, start=1):
        ylabel = column_title(f"{protocol} accuracy", "%")
        axes = figure.add_subplot(1, len(protocols), column, xlabel=key, ylabel=ylabel)
        styles = line_styles([members[0] for members in lines.values()])
        for (label, members), style in zip(lines.items(), styles, strict=True):
            scores = sorted(final_scores(members, [key], protocol))
            across = [values.index(score[0]) for score in scores]
            plot_band(axes, across, [score[1:3] for score in scores], {**style, "label": label}, scale=100)
            rows += [[label, protocol, *score] for score in scores]
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        if column == 1:
            axes.legend(fontsize="small")
    return PlotData(figure, rows)


def plot_heatmap(runs: Sequence[Run]) -> PlotData:
    """Plot final accuracies over two swept numbers, with a column for each protocol and a row for all other settings.

    A cell has the mean over seeds, and the standard deviation if there are several.
    """
    example = "partition.alpha=0.1,1 num_clients=5,10"
    sweep = read_sweep(runs, 2, plot="heatmap", what="two numbers differ", example=example)
    keys, (columns, rows), panels, protocols = sweep
    shape = len(panels), len(protocols)
    width, height = shape[1] * (1.5 + 0.9 * len(columns)), shape[0] * (1.4 + 0.5 * len(rows))
    figure = new_figure(width=max(4.5, width), height=height)
    lines: list[list[object]] = [["run", "protocol", *keys, "accuracy", "deviation", "runs"]]
    for number, (label, protocol) in enumerate(itertools.product(panels, protocols), start=1):
        axes = figure.add_subplot(*shape, number, xlabel=keys[0], ylabel=keys[1])
        axes.set_title(f"{label}: {column_title(f'{protocol} accuracy', '%')}", fontsize="small")
        scores = final_scores(panels[label], keys, protocol)
        cells = np.full((len(rows), len(columns)), math.nan)
        for x, y, score, *_ in scores:
            cells[rows.index(y), columns.index(x)] = 100 * score
        image = axes.imshow(np.ma.masked_invalid(cells), cmap="cividis", aspect="auto", origin="lower")
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2 if scores else 0
        for x, y, score, deviation, num_runs in scores:
            text = f"{100 * score:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
            color = "black" if 100 * score > middle else "white"
            axes.text(columns.index(x), rows.index(y), text, ha="center", va="center", color=color, fontsize="small")
            lines.append([label, protocol, x, y, score, deviation, num_runs])
        axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        figure.colorbar(image, ax=axes)
    return PlotData(figure, lines)
