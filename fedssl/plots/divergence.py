"""How close clients' models stay to the global one under several rules, over the rounds: L-DAWA's Figure 4.

`fedssl.plots.curves.draw_cosines` draws the same for one run, with its layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedssl.errors import InputError
from fedssl.plots.groups import group_by_seed, line_styles, plot_line
from fedssl.plots.style import SCREEN_FORMATS, axes_over_rounds, new_figure, save_figure
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run


def mean_cosines(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Mean over clients of the cosine of their model with the global one, by round: mu_delta of L-DAWA's Figure 4."""
    rounds: dict[int, list[float]] = {}
    for line in lines:
        if line.get("model_cosine") is not None:
            rounds.setdefault(line["round"], []).append(line["model_cosine"])
    return {round: mean(values) for round, values in sorted(rounds.items())}


def draw_divergence(runs: Sequence[Run], folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path:
    """Draw the mean cosine of clients' models with the global one over rounds to ``figures/divergence.png``.

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
    return save_figure(figure, folder, "divergence", rows=rows, formats=formats)
