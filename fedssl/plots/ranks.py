"""Critical-difference diagram: mean ranks of strategies over scenarios (Demsar, JMLR 2006).

A scenario is what runs share apart from strategy, regularizer and seed; its value is the mean over the seeds that all
strategies have. Ranks are compared by Friedman's test, and by Nemenyi's for all pairs: strategies that the bar
connects do not differ significantly (p >= 0.05).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from fedssl.errors import InputError
from fedssl.plots.comparisons import accuracies
from fedssl.plots.style import PlotData, new_figure
from fedssl.runs.groups import RunGroup, group_by_seed
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL = 0.95
_OWN = ("strategy", "regularizer")  # groups of a strategy's settings: some select a regularizer
_CHOICE = "regularizer="
Table = dict[str, dict[str, dict[str, float]]]  # scenario -> strategy -> seed -> value


def critical_difference(strategies: int, blocks: int) -> float:
    """Return Nemenyi's difference of mean ranks: q sqrt(k (k + 1) / (6 N)) for k strategies and N blocks."""
    from scipy.stats import studentized_range  # slow import

    q = float(studentized_range.ppf(LEVEL, strategies, np.inf)) / math.sqrt(2)
    return q * math.sqrt(strategies * (strategies + 1) / (6 * blocks))


def complete_blocks(table: Table) -> dict[str, list[float]]:
    """Return values by strategy, one per block that has all strategies.

    Blocks are scenarios, or the seeds of the only one. Strategies in less than half as many scenarios as the most
    frequent one are left out, such as those of a study of their own parameter.
    """
    counts = Counter(strategy for of_scenario in table.values() for strategy in of_scenario)
    kept = [name for name, count in counts.items() if 2 * count >= max(counts.values())]
    complete = [of_scenario for of_scenario in table.values() if of_scenario.keys() >= set(kept)]
    values: dict[str, list[float]] = {name: [] for name in kept}
    for of_scenario in complete:
        seeds = set.intersection(*(set(of_scenario[name]) for name in kept))
        for name in kept if seeds else ():
            by_seed = [of_scenario[name][seed] for seed in sorted(seeds)]
            values[name] += by_seed if len(complete) == 1 else [mean(by_seed)]
    return values


def cliques(ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """Return first and last index of the longest runs of ascending ranks that differ by less than ``difference``."""
    ends = [max(j for j, rank in enumerate(ranks) if rank - first < difference) for first in ranks]
    found = [(i, end) for i, end in enumerate(ends) if end > i]
    return [(i, end) for i, end in found if not any(j < i and end <= other for j, other in found)]


def plot_critical_difference(runs: Sequence[Run]) -> PlotData:
    """Plot mean ranks of strategies with Nemenyi's critical difference, a row for each final accuracy."""
    groups = group_by_seed([run for run in runs if run.finished])
    protocols = dict.fromkeys(name for group in groups for run in group.runs for name in accuracies(run.results))
    compared = {name: _shortened(complete_blocks(_table(groups, name))) for name in protocols}
    compared = {name: found for name, found in compared.items() if len(found) > 2 and min(map(len, found.values())) > 1}
    if not compared:
        raise InputError(
            "critical_difference needs three strategies with accuracies in two scenarios or seeds; give the folder of "
            "a sweep such as fedssl -m experiment=review"
        )
    most = max(map(len, compared.values()))
    figure = new_figure(height=(0.9 + 0.2 * most) * len(compared), width=7)
    rows: list[list[object]] = [["protocol", "strategy", "mean rank", "blocks", "critical difference", "Friedman p"]]
    for number, (protocol, values) in enumerate(compared.items(), start=1):
        rows += _draw(figure.add_subplot(len(compared), 1, number), protocol, values)
    return PlotData(figure, rows)


def _table(groups: Sequence[RunGroup], protocol: str) -> Table:
    table: Table = {}
    for group in groups:
        own = {key: value for key, value in group.settings.items() if key.split(".")[0] in _OWN}
        others = {key: value for key, value in group.settings.items() if key not in own}
        options = [
            f"{key.removeprefix('strategy.')}={value}" for key, value in own.items() if key != "strategy" and value
        ]
        name = ", ".join([group.strategy, *options])
        values = {run.seed: run.results[protocol].value for run in group.runs if protocol in run.results}
        if values:
            table.setdefault(repr(sorted(others.items())), {})[name] = values
    return table


def _shortened(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return values by names without the parameters that all rows of a strategy share."""
    parts = {name: name.split(", ") for name in values}
    shared: dict[str, set[str]] = {}
    for strategy, *options in parts.values():
        shared[strategy] = shared.get(strategy, set(options)) & set(options)
    return {
        ", ".join([strategy, *(one for one in options if one not in shared[strategy] or one.startswith(_CHOICE))]): of
        for (strategy, *options), of in zip(parts.values(), values.values(), strict=True)
    }


def _draw(axes: "Axes", protocol: str, values: Mapping[str, Sequence[float]]) -> list[list[object]]:
    from scipy.stats import friedmanchisquare, rankdata  # slow import

    table = np.array(list(values.values()))  # (strategies, blocks)
    mean_ranks = rankdata(-table, axis=0).mean(axis=1)
    order = np.argsort(mean_ranks, kind="stable")
    names, ranks = [list(values)[index] for index in order], mean_ranks[order].tolist()
    count, blocks = table.shape
    difference = critical_difference(count, blocks)
    p = float(friedmanchisquare(*table).pvalue) if np.ptp(table, axis=0).any() else 1.0
    half = (count + 1) // 2
    for index, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        left = index < half  # better ones stand on the left
        height, end = (index if left else count - 1 - index) + 2.0, 0.6 if left else count + 0.4
        axes.plot([rank, rank, end], [0, height, height], color="black", linewidth=0.8)
        text = f"{name} ({rank:.2f})"
        axes.text(end, height, text, ha="right" if left else "left", va="center", fontsize="small")
    for level, (first, last) in enumerate(cliques(ranks, difference)):
        y = 0.4 + 0.35 * level
        axes.plot([ranks[first] - 0.04, ranks[last] + 0.04], [y, y], color="black", linewidth=3, solid_capstyle="butt")
    axes.plot([1, min(1 + difference, count)], [-1, -1], color="black", linewidth=1.5)
    axes.text(1, -1.15, f"critical difference {difference:.2f}", va="bottom", fontsize="small")
    axes.set_xlim(0.5, count + 0.5)
    axes.set_ylim(half + 2.5, -2)
    axes.set_yticks([])
    axes.xaxis.tick_top()
    axes.set_xticks(range(1, count + 1))
    for side in ("left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{protocol}: mean rank over {blocks} scenarios or seeds, Friedman p = {p:.2g}", fontsize="small")
    return [[protocol, name, rank, blocks, difference, p] for name, rank in zip(names, ranks, strict=True)]
