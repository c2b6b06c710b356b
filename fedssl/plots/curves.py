"""Curves from the lines of a run folder: loss and accuracy, cosines (L-DAWA, Fig. 4), spectra (FedU2, Fig. 3).

A run plots them at its end; ``fedssl-report --figures`` also while it is running.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.evaluation.collapse_metrics import TOP, gaussian_spectrum
from fedssl.evaluation.scores import as_scores, mean_and_std
from fedssl.plots.style import MARKERS, PlotData, axes_over_rounds, by_round, new_figure, strategy_color
from fedssl.runs.jsonl import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]

NAMED = 6  # global models with names and colors of their own; more are alike, and share an entry of the legend


def plot_metrics(folder: Path) -> PlotData | None:
    """Plot the loss and the evaluation results, means over models, with a panel for each unit; None without any."""
    lines = read_jsonl(folder / "metrics.jsonl", required=("loss",))
    losses = [(line["round"], line["loss"]) for line in lines if line["loss"] is not None]
    panels: dict[str, dict[str, Points]] = {"mean loss of the clients": {"loss": losses}} if losses else {}
    for line in lines:
        for name, score in as_scores(line.get("evaluation", {}), line.get("units")).items():
            panels.setdefault(score.unit or name, {}).setdefault(name, []).append((line["round"], score.value))
    if not panels:
        return None
    figure, color = new_figure(height=3.0 * len(panels)), strategy_color(folder)
    for position, (title, series) in enumerate(panels.items(), start=1):
        axes = axes_over_rounds(figure, (len(panels), 1, position), title)
        for number, (name, points) in enumerate(series.items()):
            mark = MARKERS[number % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), marker=mark, markersize=4, color=color, label=name)
        axes.legend()
    named = {name: points for series in panels.values() for name, points in series.items()}
    rows = [[name, *point] for name, points in named.items() for point in points]
    return PlotData(figure, [["name", "round", "value"], *rows])


def plot_cosines(folder: Path) -> PlotData | None:
    """Plot the cosines of clients' models with the global one; None if the run has no cosines.

    At the top L-DAWA's Fig. 4: the cosine of all weights as one vector, mean and standard deviation over clients. At
    the bottom the cosines of layers: thin lines are means over clients, the thick one is the mean weighted by size.
    """
    lines = read_jsonl(folder / "clients.jsonl", required=("client", "cosine", "model_cosine", "layer_cosine"))
    lines = [line for line in lines if line["model_cosine"] is not None and line["cosine"]]
    if not lines:
        return None
    several = len({line.get("model") for line in lines}) > 1
    reference = "the client's global model" if several else "the global model"
    figure, color = new_figure(height=6.5), strategy_color(folder)
    axes = axes_over_rounds(figure, (2, 1, 1), f"cosine with {reference}")
    clients = by_round(lines, "model_cosine")
    center, spread = np.array(list(map(mean_and_std, clients.values())), dtype=float).T
    axes.plot(list(clients), center, marker=".", color=color, label="all weights as one vector, mean over clients")
    band = (center - spread, center + spread)
    axes.fill_between(list(clients), *band, color=color, alpha=0.25, label="standard deviation over clients")
    _plot_layers(axes_over_rounds(figure, (2, 1, 2), "cosines of its layers"), lines, color)
    for axes in figure.axes:
        axes.ticklabel_format(axis="y", useOffset=False)  # cosines are near 1
        axes.legend()
    whole = (
        (line["round"], line["client"], key, line[key]) for line in lines for key in ("model_cosine", "layer_cosine")
    )
    layers = ((line["round"], line["client"], *pair) for line in lines for pair in line["cosine"].items())
    return PlotData(figure, chain([("round", "client", "of", "cosine")], whole, layers))


def _plot_layers(axes: "Axes", lines: Sequence[Mapping[str, Any]], color: str) -> None:
    from matplotlib import colormaps

    layers: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        for name, cosine in line["cosine"].items():
            layers.setdefault(name, {}).setdefault(line["round"], []).append(cosine)
    shades = colormaps["viridis"](np.linspace(0, 1, len(layers)))
    for shade, (name, cosines) in zip(shades, layers.items(), strict=True):
        means = list(map(np.mean, cosines.values()))
        axes.plot(list(cosines), means, color=shade, linewidth=0.5, label=f"_{name}")  # _: not in the legend
    axes.plot([], [], color=shades[len(shades) // 2], linewidth=0.5, label="layers, the first dark, the last bright")
    clients = by_round(lines, "layer_cosine")
    means = list(map(np.mean, clients.values()))
    axes.plot(list(clients), means, color=color, linewidth=2, label="mean over layers by size")


def plot_spectra(folder: Path) -> PlotData | None:
    """Plot the singular values of the covariance of representations (FedU2, Fig. 3); None if there are none.

    They are of all models in the last measured round, and of as many Gaussian vectors as a reference, as base-10
    logarithms. All vectors are normalized.
    """
    from matplotlib import colormaps

    lines = [line for line in read_jsonl(folder / "health.jsonl", required=("client",)) if "spectrum" in line]
    if not lines:
        return None
    round, last = lines[-1]["round"], lines[-1]["spectrum"]
    lines = [line for line in lines if line["round"] == round]
    models = [line for line in lines if line["client"] is None]
    figure = new_figure(height=3.5)
    axes = figure.add_subplot(1, 1, 1, xlabel="index of the singular value", ylabel="log10 singular value")
    kind = "test images" if last["split"] == "test" else "images of the clients (there are none for the test)"
    few = ", fewer than two for each" if last["images"] < 2 * last["dim"] else ""
    axes.set_title(f"{last['images']} {kind} in {last['dim']} dimensions{few}", fontsize="medium")
    for line in lines:
        if line["client"] is not None:
            axes.plot(_logarithms(line["spectrum"]["singular_values"]), color="0.7", alpha=0.6, label="clients")
    color: Any = strategy_color(folder)
    for position, line in enumerate(models):
        label = f"global model, round {round}" if len(models) == 1 else f"global models, round {round}"
        if 1 < len(models) <= NAMED:
            color = colormaps["inferno"](0.8 * position / (len(models) - 1))
            label = f"model {line.get('model')}, round {round}"
        values = _logarithms(line["spectrum"]["singular_values"])
        axes.plot(values, color=color, linewidth=2 if len(models) <= NAMED else 1, zorder=3, label=label)
    reference = gaussian_spectrum(last["images"], last["dim"])[:TOP].tolist()
    axes.plot(_logarithms(reference), color="0.3", linestyle="--", label="Gaussian vectors")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    names = [line["client"] if line["client"] is not None else line.get("model", "") for line in lines]
    spectra = [*zip(names, (line["spectrum"]["singular_values"] for line in lines), strict=True)]
    spectra.append(("Gaussian", reference))
    rows = [[name, index, value] for name, values in spectra for index, value in enumerate(values)]
    return PlotData(figure, [["client or model", "index", "singular value"], *rows])


def _logarithms(singular_values: Sequence[float]) -> np.ndarray:
    values: np.ndarray = np.log10(np.maximum(singular_values, 1e-12))
    return values
