"""Runs side by side in one figure: those that differ only in their seed make one line, in the colour of its rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.plots.style import MARKERS, line_style
from fedssl.report.accuracy_table import LEFT_OUT, MAIN
from fedssl.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but the seed.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line, of what differs between groups.
    strategy : str
        The name of the strategy.
    runs : list of Run
    """

    settings: dict[str, str]
    strategy: str
    runs: list[Run]

    @property
    def label(self) -> str:
        """For a legend: the rule, and what else differs."""
        others = [f"{key}={value}" for key, value in self.settings.items() if key != "strategy" and value]
        return ", ".join([self.strategy, *others])


def group_by_seed(runs: Sequence[Run]) -> list[RunGroup]:
    """Put runs with the same settings together, one for every seed."""
    given = dict.fromkeys(key for run in runs for key in run.overrides if not {key, key.partition(".")[0]} & LEFT_OUT)
    keys = dict.fromkeys([*MAIN, *given])
    found: dict[tuple[str, ...], dict[str, Run]] = {}
    for run in runs:
        found.setdefault(tuple(run.value(key) for key in keys), {}).setdefault(run.seed, run)
    differs = [place for place in range(len(keys)) if len({values[place] for values in found}) > 1]
    names = list(keys)
    return [
        RunGroup(
            {names[place]: values[place] for place in differs}, values[names.index("strategy")], list(same.values())
        )
        for values, same in found.items()
    ]


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
