"""Plots of representations of the same images by global and clients' models: t-SNE and sphere (FedU2, Figs. 5 and 4).

FedU2 does not define its sphere. Here projections are plotted unchanged if the projector's output has 3 dimensions
(``method.projector.out_dim=3``); otherwise each model's representations are projected onto their 3 principal directions
and normalized. The directions are of uncentered representations: centered ones would display noise for a collapsed
model.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.plots.style import BLUE, PlotData, class_colors, new_figure
from fedssl.plots.tsne import tsne
from fedssl.runs.representations import Representations, read_representations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 1500  # of a t-SNE, over all models: six seconds on one core
SPHERES = 6  # maximum number of models
MARKERS = "os^DvP"  # of global models; if there are more models, all have the first


def plot_tsne(folder: Path) -> PlotData | None:
    """Plot the t-SNE of a run's representations; None if there are fewer than two."""
    saved = read_representations(folder)
    if saved is None or saved[1].h[..., 0].size < 2:
        return None
    round, representations = saved
    points = tsne_points(representations)
    return PlotData(tsne_figure(representations, points, round=round), _rows(representations, points, "xy"))


def plot_sphere(folder: Path) -> PlotData | None:
    """Plot a run's representations on spheres, for the first models; None if there are none.

    A mostly empty sphere is a collapse.
    """
    saved = read_representations(folder)
    if saved is None:
        return None
    round, representations = saved
    vectors = (representations.h if representations.z is None else representations.z)[:SPHERES]
    spheres = [on_sphere(of_model) for of_model in vectors]
    columns = min(3, len(spheres))
    num_rows = -(-len(spheres) // columns)
    figure = new_figure(height=2.6 * num_rows + 0.5)
    shades = BLUE if representations.labels is None else _shades(representations.labels)
    latitude, longitude = np.meshgrid(np.linspace(0, np.pi, 13), np.linspace(0, 2 * np.pi, 25))
    globe = np.sin(latitude) * np.cos(longitude), np.sin(latitude) * np.sin(longitude), np.cos(latitude)
    for number, (points, _) in enumerate(spheres):
        # add_subplot imports mpl_toolkits, which adds this projection.
        title = str(representations.names[number])
        axes: Any = figure.add_subplot(num_rows, columns, number + 1, projection="3d", title=title)
        axes.plot_wireframe(*globe, color="lightgrey", linewidth=0.3)
        axes.scatter(*points.T, c=shades, s=4, linewidths=0)
        axes.view_init(elev=15, azim=15)  # the first direction comes forward
        axes.set_box_aspect((1, 1, 1), zoom=1.6)
        axes.set_axis_off()
    dim, shares = vectors.shape[2], [share for _, share in spheres]
    how = f"{'representations' if representations.z is None else 'projections'} as they are"
    if dim != 3:
        how = (
            f"representations of {dim} dimensions on their 3 principal directions\n"
            f"({min(shares):.0%} to {max(shares):.0%} of their squared length)"
        )
    colors = "" if representations.labels is None else "; colors: classes"
    figure.supxlabel(f"{how}, round {round}{colors}", fontsize="small")
    return PlotData(figure, _rows(representations, np.stack([points for points, _ in spheres]), "xyz"))


def _rows(representations: Representations, points: np.ndarray, axes: str) -> list[list[object]]:
    """Return points ``(models, n, axes)`` with their models and classes, and a header."""
    labels = [""] * points.shape[1] if representations.labels is None else representations.labels.tolist()
    return [
        ["model", "image", "class", *axes],
        *(
            [str(name), index, labels[index], *point]
            for name, of_model in zip(representations.names, points.tolist(), strict=False)  # at most SPHERES
            for index, point in enumerate(of_model)
        ),
    ]


def on_sphere(h: np.ndarray) -> tuple[np.ndarray, float]:
    """Project representations ``(n, dim)`` of length 1 or 0 to the unit sphere; 3 dimensions are unchanged.

    Return points ``(n, 3)``, and the share of the squared lengths in these 3 directions, in [0, 1]. Points without a
    component in them are 0.
    """
    h = h.astype(np.float64)
    if h.shape[1] == 3:
        return h, 1.0
    _, _, directions = np.linalg.svd(h, full_matrices=False)
    points = h @ directions[:3].T
    points *= np.where(points.sum(axis=0) < 0, -1, 1)  # the sign is arbitrary: most points in front
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))  # fewer images than directions
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    share = float(np.sum(lengths**2) / max(np.sum(h**2), 1e-12))
    return np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 1e-6), share


def tsne_points(representations: Representations) -> np.ndarray:
    """Compute the t-SNE of all models for at most `MAX_POINTS` points, ``(models, images, 2)``."""
    models, n, dim = representations.h.shape
    used = representations.h[:, : max(1, min(n, MAX_POINTS // models))]
    return tsne(used.reshape(-1, dim).astype(np.float32)).reshape(models, -1, 2)


def tsne_figure(representations: Representations, points: np.ndarray, *, round: int) -> "Figure":
    """Plot each image for each model; colors are classes if known, else models.

    Global models have filled markers, different ones if there are few, and clients' models have crosses.
    """
    from matplotlib.lines import Line2D

    models, used = points.shape[:2]
    labels = representations.labels
    figure = new_figure(height=6.0)
    axes = figure.add_subplot(1, 1, 1, xticks=[], yticks=[])
    shades = _shades(np.arange(models)) if labels is None else _shades(labels)[:used]
    marks = _marks(representations)
    for model in reversed(range(models)):  # the global models on top
        mark, _ = marks[model]
        color = np.tile(shades[model], (used, 1)) if labels is None else shades
        size, edge = (14, 0.6) if mark == "x" else (22, 0.0)
        x, y = points[model].T
        axes.scatter(x, y, c=color, marker=mark, s=size, linewidths=edge)
    entries = dict.fromkeys(marks)
    axes.legend(handles=[Line2D([], [], marker=mark, color="gray", linewidth=0, label=name) for mark, name in entries])
    colors = "models" if labels is None else "classes"
    axes.set_xlabel(f"t-SNE of the representations of {used} images, round {round}; colors: {colors}")
    return figure


def _marks(representations: Representations) -> list[tuple[str, str]]:
    names = [str(name) for name in representations.names]
    first = names[: int(representations.globals)]
    if len(first) <= len(MARKERS):
        marks = list(zip(MARKERS, first, strict=False))
    else:
        marks = [(MARKERS[0], "global models")] * len(first)
    return marks + [("x", "clients' models")] * (len(names) - len(first))


def _shades(numbers: np.ndarray) -> np.ndarray:
    return class_colors(numbers, classes=int(numbers.max()) + 1)
