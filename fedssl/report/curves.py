"""Curves from the lines of a run folder: loss and accuracy, cosines (L-DAWA, Fig. 4), spectra (FedU2, Fig. 3).

A run draws them at its end; ``fedssl-report --pictures`` draws them again, also while it goes on.
"""

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from fedssl.report.runs import SPREAD, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[int, float]]


def draw_curves(folder: Path) -> list[Path]:
    """Draw everything below for which the run folder has lines, and return the pictures."""
    drawn = (draw_metrics(folder), draw_cosines(folder), draw_spectra(folder))
    return [file for file in drawn if file is not None]


def draw_metrics(folder: Path) -> Path | None:
    """Draw the loss and the accuracies of a run over its rounds to ``figures/metrics.png``.

    Returns
    -------
    Path or None
        The picture; None if the run recorded neither.
    """
    lines = read_lines(folder / "metrics.jsonl")
    losses = {"loss": [(line["round"], line["loss"]) for line in lines if line["loss"] is not None]}
    accuracies: dict[str, Points] = {}
    for line in lines:
        for name, value in line.get("evaluation", {}).items():
            if not name.endswith(SPREAD):
                accuracies.setdefault(name, []).append((line["round"], value))
    panels = [
        (title, series)
        for title, series in (("mean loss of the clients", losses), ("accuracy", accuracies))
        if any(series.values())
    ]
    if not panels:
        return None
    figure = new_figure(height=3.0 * len(panels))
    for position, (title, series) in enumerate(panels, start=1):
        axes = _over_rounds(figure, (len(panels), 1, position), title)
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.legend()
    return save_figure(figure, folder, "metrics")


def draw_cosines(folder: Path) -> Path | None:
    """Draw how close the clients stay to the global model to ``figures/cosines.png`` (L-DAWA, Fig. 4).

    A client's value is the mean over its layers; the line is the mean over the clients of a round, the band one
    standard deviation over them to either side. Thin lines are layers, each the mean over clients.

    Returns
    -------
    Path or None
        The picture; None if no cosines were recorded.
    """
    clients: dict[int, list[float]] = {}
    layers: dict[str, dict[int, list[float]]] = {}
    for line in read_lines(folder / "clients.jsonl"):
        if line["cosine"]:
            clients.setdefault(line["round"], []).append(mean(line["cosine"].values()))
        for name, value in line["cosine"].items():
            layers.setdefault(name, {}).setdefault(line["round"], []).append(value)
    if not clients:
        return None
    from matplotlib import colormaps

    figure = new_figure(height=3.5)
    axes = _over_rounds(figure, (1, 1, 1), "cosine with the global model")
    shades = colormaps["viridis"](np.linspace(0, 1, len(layers)))
    for shade, (name, values) in zip(shades, layers.items(), strict=True):
        means = [float(np.mean(values[round])) for round in sorted(values)]
        axes.plot(sorted(values), means, color=shade, linewidth=0.5, label=f"_{name}")  # _: not in the legend
    axes.plot([], [], color=shades[len(shades) // 2], linewidth=0.5, label="layers, the first dark, the last bright")
    rounds = sorted(clients)
    center = np.array([np.mean(clients[round]) for round in rounds])
    spread = np.array([np.std(clients[round]) for round in rounds])
    axes.plot(rounds, center, marker=".", color="tab:red", label="mean over clients and layers")
    band = (center - spread, center + spread)
    axes.fill_between(rounds, *band, color="tab:red", alpha=0.25, label="standard deviation over clients")
    axes.legend()
    return save_figure(figure, folder, "cosines")


def draw_spectra(folder: Path) -> Path | None:
    """Draw the singular values of the covariance of representations to ``figures/spectrum.png`` (FedU2, Fig. 3).

    Those of the global model and of every client, in the last round in which they were measured, as base-10 logarithms.

    Returns
    -------
    Path or None
        The picture; None if nothing was measured.
    """
    lines = read_lines(folder / "health.jsonl")
    if not lines:
        return None
    last = lines[-1]["round"]
    figure = new_figure(height=3.5)
    axes = figure.add_subplot(1, 1, 1, xlabel="index of the singular value", ylabel="log10 singular value")
    for line in (line for line in lines if line["round"] == last):
        values = np.log10(np.maximum(line["singular_values"], 1e-12))
        if line["client"] is None:
            axes.plot(values, color="black", linewidth=2, zorder=3, label=f"global model, round {last}")
        else:
            axes.plot(values, color="tab:blue", alpha=0.4, label="clients")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    return save_figure(figure, folder, "spectrum")


def new_figure(*, height: float) -> "Figure":
    """An empty figure, 7 inches wide."""
    # Not pyplot: it keeps figures and may look for a display. Imported here because it takes half a second.
    from matplotlib.figure import Figure

    return Figure(figsize=(7.0, height), layout="constrained")


def save_figure(figure: "Figure", folder: Path, name: str) -> Path:
    """Write the figure to ``figures/<name>.png`` of the run folder."""
    file = folder / "figures" / f"{name}.png"
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def _over_rounds(figure: "Figure", position: tuple[int, int, int], title: str) -> "Axes":
    """Axes over rounds, with whole numbers on the horizontal one."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(*position, xlabel="round", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes
