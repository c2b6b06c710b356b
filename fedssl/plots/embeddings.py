"""Figures of representations: global against local models in two dimensions, and on the sphere (FedU2, Figs. 5 and 4).

Both show what the global model and the clients' models of one round make of the same images. FedU2 does not say how
its sphere comes about. Here points lie on it as they are where the projector's output has 3 dimensions
(``method.projector.out_dim=3``); else every model's representations are projected onto their 3 principal directions,
and
divided by their length. These directions are of the representations as they are, not of their deviations from the mean:
one point for all images would otherwise be drawn as the noise around it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl.plots.style import BLUE, PlotData, class_colors, new_figure
from fedssl.runs.representations import Representations, read_representations
from fedssl.seeding import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 1500  # of a t-SNE: six seconds on one core; with more models every model shows fewer images
SPHERES = 6  # models that are drawn
MARKERS = "os^DvP"  # of global models; where there are more of them, all have the first


def plot_tsne(folder: Path) -> PlotData | None:
    """Plot the t-SNE of a run's representations; None if it keeps no representations, or those of one image alone."""
    kept = read_representations(folder)
    if kept is None or kept[1].h[..., 0].size < 2:  # a point alone has no neighbours
        return None
    round, representations = kept
    points = tsne_points(representations)
    figure = tsne_figure(representations, points, round=round)
    return PlotData(figure, _rows(representations, points, "xy"))


def plot_sphere(folder: Path) -> PlotData | None:
    """Plot a run's representations on spheres; None if it keeps no representations."""
    kept = read_representations(folder)
    if kept is None:
        return None
    round, representations = kept
    spheres = [on_sphere(vectors) for vectors in _on_spheres(representations)]
    figure = sphere_figure(representations, spheres, round=round)
    points = np.stack([points for points, _ in spheres])
    return PlotData(figure, _rows(representations, points, "xyz"))


def _rows(representations: Representations, points: np.ndarray, axes: str) -> list[list[object]]:
    """Points ``(models, n, axes)`` with their models and classes, under a header."""
    labels = [""] * points.shape[1] if representations.labels is None else representations.labels.tolist()
    return [
        ["model", "image", "class", *axes],
        *(
            [str(name), number, labels[number], *place]
            for name, places in zip(representations.names, points.tolist(), strict=False)  # spheres are few
            for number, place in enumerate(places)
        ),
    ]


def tsne(h: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """t-SNE (van der Maaten and Hinton, 2008) of the representations of several models together.

    Parameters
    ----------
    h : ndarray
        ``(models, n, dim)``, at least 2 points.
    seed : int
        The same one gives the same bits on one machine, with any number of cores.

    Returns
    -------
    ndarray
        float32, ``(models, n, 2)``.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    points = h.reshape(-1, h.shape[-1]).astype(np.float32)
    reducer = TSNE(
        perplexity=min(30.0, (len(points) - 1) / 3),
        # Points that all coincide have no principal directions to begin with.
        init="pca" if np.ptp(points, axis=0).any() else "random",
        random_state=derive_seed(seed, "t-SNE") % 2**32,
    )
    with threadpool_limits(limits=1):  # sums of several threads depend on who is first
        flat: np.ndarray = reducer.fit_transform(points)
    return flat.reshape(*h.shape[:2], 2)


def on_sphere(h: np.ndarray) -> tuple[np.ndarray, float]:
    """Representations of one model on the unit sphere of 3 dimensions.

    Parameters
    ----------
    h : ndarray
        ``(n, dim)``, each of length 1 or 0; with 3 dimensions they stay where they are.

    Returns
    -------
    tuple of ndarray and float
        Points ``(n, 3)``, and how much of the squared lengths lies in these 3 directions, in [0, 1]. A point of which
        nothing lies in them is in the centre.
    """
    h = h.astype(np.float64)
    if h.shape[1] == 3:
        return h, 1.0
    _, _, directions = np.linalg.svd(h, full_matrices=False)
    points = h @ directions[:3].T
    points *= np.where(points.sum(axis=0) < 0, -1, 1)  # a direction has no sign of its own: most points in front
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))  # fewer images than directions
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    share = float(np.sum(lengths**2) / max(np.sum(h**2), 1e-12))
    return np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 1e-6), share


def tsne_points(representations: Representations, *, seed: int = 0) -> np.ndarray:
    """The t-SNE of all models together, of as many images as it can show, ``(models, images, 2)``."""
    models, n, _ = representations.h.shape
    return tsne(representations.h[:, : max(1, min(n, MAX_POINTS // models))], seed=seed)


def tsne_figure(representations: Representations, points: np.ndarray, *, round: int) -> "Figure":
    """Draw every image once for every model; colours are classes, or else models.

    Global models are full marks, one kind for each where they are few, and clients' models are crosses.
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
    axes.legend(
        handles=[
            Line2D([], [], marker=mark, color="grey", linewidth=0, label=label) for mark, label in dict.fromkeys(marks)
        ]
    )
    colors = "models" if labels is None else "classes"
    axes.set_xlabel(f"t-SNE of the representations of {used} images, round {round}; colours: {colors}")
    return figure


def _marks(representations: Representations) -> list[tuple[str, str]]:
    """Choose the mark of every model and what the legend says of it."""
    names = [str(name) for name in representations.names]
    first = names[: int(representations.globals)]
    if len(first) <= len(MARKERS):
        marks = list(zip(MARKERS, first, strict=False))
    else:
        marks = [(MARKERS[0], "global models")] * len(first)
    return marks + [("x", "clients' models")] * (len(names) - len(first))


def _on_spheres(representations: Representations) -> np.ndarray:
    """The vectors of the first models, global ones before clients'."""
    return (representations.h if representations.z is None else representations.z)[:SPHERES]


def sphere_figure(
    representations: Representations, spheres: Sequence[tuple[np.ndarray, float]], *, round: int
) -> "Figure":
    """Draw what `on_sphere` gives for each of the first models; much blank space is a collapse."""
    models = len(spheres)
    columns = min(3, models)
    rows = -(-models // columns)
    figure = new_figure(height=2.6 * rows + 0.5)
    shades = BLUE if representations.labels is None else _shades(representations.labels)
    shares = [share for _, share in spheres]
    for model, (points, _) in enumerate(spheres):
        # mpl_toolkits adds this projection by being imported, which add_subplot does.
        axes: Any = figure.add_subplot(
            rows, columns, model + 1, projection="3d", title=str(representations.names[model])
        )
        axes.plot_wireframe(*_globe(), color="lightgrey", linewidth=0.3)
        axes.scatter(*points.T, c=shades, s=4, linewidths=0)
        axes.view_init(elev=15, azim=15)  # the first direction comes forward
        axes.set_box_aspect((1, 1, 1), zoom=1.6)
        axes.set_axis_off()
    dim = _on_spheres(representations).shape[2]
    how = (
        f"{'representations' if representations.z is None else 'projections'} as they are"
        if dim == 3
        else f"representations of {dim} dimensions on their 3 principal directions\n"
        f"({min(shares):.0%} to {max(shares):.0%} of their squared length)"
    )
    colors = "" if representations.labels is None else "; colours: classes"
    figure.supxlabel(f"{how}, round {round}{colors}", fontsize="small")
    return figure


def _globe() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Circles of latitude and longitude on the unit sphere."""
    latitude, longitude = np.meshgrid(np.linspace(0, np.pi, 13), np.linspace(0, 2 * np.pi, 25))
    return np.sin(latitude) * np.cos(longitude), np.sin(latitude) * np.sin(longitude), np.cos(latitude)


def _shades(numbers: np.ndarray) -> np.ndarray:
    """Give each number a colour, ``(n, 4)``: distinct ones up to 10, a scale beyond."""
    return class_colors(numbers, classes=int(numbers.max()) + 1)
