"""Final accuracy over a setting that was swept: FedU2's Figure 6 (weight of FUR), FedU's Figure 5 (its threshold)."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

import numpy as np

from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, heading
from fedssl.plots.groups import RunGroup, group_by_seed, line_styles, plot_line
from fedssl.plots.style import SCREEN_FORMATS, new_figure, save_figure
from fedssl.runs.run import Run


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


def draw_sensitivity(runs: Sequence[Run], folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path:
    """Draw final accuracies over the value that was swept to ``figures/sensitivity.png``; values are evenly spaced.

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
        lines.setdefault(RunGroup(others, one.strategy, []).label, []).append(one)
    figure = new_figure(height=3.4, width=max(4.5, 3.6 * len(protocols)))
    rows: list[list[object]] = [["run", "protocol", key, "accuracy", "deviation", "runs"]]
    for column, protocol in enumerate(protocols, start=1):
        axes = figure.add_subplot(1, len(protocols), column, xlabel=key, ylabel=heading(f"{protocol} accuracy", "%"))
        for (label, members), style in zip(lines.items(), line_styles([one[0] for one in lines.values()]), strict=True):
            found = final_scores(members, key, protocol)
            points = 100 * np.array([point[1:3] for point in found]).reshape(-1, 2)
            plot_line(axes, [values.index(point[0]) for point in found], points, {**style, "label": label})
            rows += [[label, protocol, *point] for point in found]
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        if column == 1:
            axes.legend(fontsize="small")
    return save_figure(figure, folder, "sensitivity", rows=rows, formats=formats)


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
