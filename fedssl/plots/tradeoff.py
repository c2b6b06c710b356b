"""Trade-off of adaptation: accuracy on other data sets, such as the source domain, over that on the run's own.

An evaluation with results ``NAME`` on the run's data set and ``NAME@OTHER`` on others (``evaluation=domains``) gives a
point per round. The first point is the encoder before the first round, if the end of the run was evaluated in the same
way (``final_evaluation=domains``). Runs that differ only in their seed make one line.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fedssl.evaluation.scores import as_scores, column_title, mean_and_std
from fedssl.plots.comparisons import accuracies, line_styles
from fedssl.plots.style import PlotData, new_figure
from fedssl.runs.groups import group_by_seed
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run

Accuracies = dict[int, dict[str, float]]  # by round, 0 before the first, and by result


def accuracies_by_round(run: Run) -> Accuracies:
    """Return the accuracies in [0, 1] of each evaluated round, and those before the first round as round 0 if known."""
    found: Accuracies = {0: accuracies(run.results_of("untrained"))}
    for line in read_jsonl(run.folder / "metrics.jsonl"):
        scores = accuracies(as_scores(line.get("evaluation", {}), line.get("units")))
        found[line["round"]] = {name: value for name, value in scores.items() if run.selects(name)}
    return {round: values for round, values in found.items() if values}


def domain_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of results on the run's data set and on another one, ``("knn", "knn@source")``."""
    names = list(dict.fromkeys(names))
    return [(own, name) for name in names for own, at, _ in [name.partition("@")] if at and own in names]


def mean_points(
    runs: Sequence[Accuracies], pair: tuple[str, str]
) -> list[tuple[int, float, float | None, float, float | None]]:
    """Return the rounds in which all runs have both results, and mean and standard deviation of each."""
    rounds = set.intersection(*({round for round, values in run.items() if values.keys() >= set(pair)} for run in runs))
    points = []
    for round in sorted(rounds):
        own, other = ([run[round][name] for run in runs] for name in pair)
        points.append((round, *mean_and_std(own), *mean_and_std(other)))
    return points


def plot_tradeoff(runs: Sequence[Run]) -> PlotData | None:
    """Plot the accuracy on each other data set over that on the run's own; None if no run has both in its rounds.

    A line goes from the first round to the last, which has a larger mark.
    """
    groups = group_by_seed(runs)
    values = [[accuracies_by_round(run) for run in group.runs] for group in groups]
    in_rounds = (of_round for group in values for run in group for round, of_round in run.items() if round)
    pairs = domain_pairs(name for of_round in in_rounds for name in of_round)
    if not pairs:
        return None
    longest = max(len(group.label) for group in groups)
    figure = new_figure(height=3.6 + 0.2 * len(groups), width=max(4.5 * len(pairs), 0.8 + 0.065 * longest))
    rows: list[list[object]] = [["run", "round", "own", "own deviation", "other", "accuracy", "deviation"]]
    for column, (own, other) in enumerate(pairs, start=1):
        axes = figure.add_subplot(
            1,
            len(pairs),
            column,
            xlabel=column_title(f"{own} accuracy", "%"),
            ylabel=column_title(f"{other} accuracy", "%"),
        )
        for group, style, of_runs in zip(groups, line_styles(groups), values, strict=True):
            points = mean_points(of_runs, (own, other))
            x, x_std, y, y_std = 100 * np.array([point[1:] for point in points], dtype=float).reshape(-1, 4).T
            axes.plot(x, y, markersize=3, **style)
            axes.errorbar(x[-1:], y[-1:], y_std[-1:], x_std[-1:], fmt=style["marker"], color=style["color"])
            rows += [[group.label, *point[:3], other, *point[3:]] for point in points]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small", frameon=False)
    return PlotData(figure, rows)
