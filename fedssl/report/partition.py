"""The table and the figure of who holds what."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedssl.files import write_text
from fedssl.report.figures import new_figure, write_png
from fedssl.report.tables import to_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND = 20  # classes that a legend can name; more get a colour scale


def write_table(path: Path, parts: Sequence[np.ndarray], *columns: tuple[torch.Tensor | None, Sequence[str]]) -> None:
    """Write ``client,examples,<class>...`` with the number of pictures per class; without labels no class columns.

    Parameters
    ----------
    path : Path
        The CSV file.
    parts : sequence of ndarray
        Positions of each client's pictures.
    columns : tuple of Tensor or None, and sequence of str
        Labels ``(n,)``, and the names of the classes; empty: their numbers. Further ones of other groups, such as
        clusters.
    """
    found = [_counts(parts, labels, classes) for labels, classes in columns]
    counts = np.concatenate([counts for counts, _ in found], axis=1)
    rows = ([client, len(part), *counts[client]] for client, part in enumerate(parts))
    write_text(path, to_csv([["client", "examples", *(name for _, names in found for name in names)], *rows]))


def draw(
    path: Path,
    parts: Sequence[np.ndarray],
    labels: torch.Tensor | None,
    classes: Sequence[str] = (),
    *,
    kind: str = "class",
) -> None:
    """Draw one bar per client, divided by class, into the PNG file ``path``.

    ``kind`` is what a class is called; the others are as in `write_table`.
    """
    from matplotlib import colormaps

    counts, names = _counts(parts, labels, classes)
    if labels is None:
        counts = np.array([[len(part)] for part in parts])
    num_clients, num_classes = counts.shape
    colors = colormaps["tab10" if num_classes <= 10 else "tab20" if num_classes <= _LEGEND else "turbo"]
    shades = colors(np.arange(num_classes) if num_classes <= _LEGEND else np.linspace(0, 1, num_classes))
    figure = new_figure(width=8, height=min(2 + 0.3 * num_clients, 12))
    axes = figure.add_subplot()
    _draw_bars(axes, counts, shades)
    if 0 < len(names) <= _LEGEND:
        _add_legend(figure, names, shades)
    elif names:
        _add_scale(figure, axes, num_classes, colors, kind)
    write_png(figure, path, dpi=120)


def _draw_bars(axes: "Axes", counts: np.ndarray, shades: np.ndarray) -> None:
    """Draw ``counts``, ``(clients, classes)``, in the classes' colours ``(classes, 4)``."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    num_clients = len(counts)
    # One rectangle per client and class that it holds, all in one collection: 100 clients x 200 classes stay quick.
    client, label = np.nonzero(counts)
    right = counts.cumsum(axis=1)[client, label]
    left, half = right - counts[client, label], 0.5 if num_clients > 40 else 0.42
    corners = [(left, client - half), (right, client - half), (right, client + half), (left, client + half)]
    rectangles = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(list(rectangles), facecolors=shades[label], linewidths=0))
    axes.set(xlim=(0, right.max() * 1.02), ylim=(num_clients - 0.5, -0.5), xlabel="pictures", ylabel="client")
    axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: "Figure", names: Sequence[str], shades: np.ndarray) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for color, name in zip(shades, names, strict=True)]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)


def _add_scale(figure: "Figure", axes: "Axes", num_classes: int, colors: Any, kind: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(0, num_classes - 1), colors)
    figure.colorbar(scale, ax=axes, label=kind, shrink=0.6)


def _counts(
    parts: Sequence[np.ndarray], labels: torch.Tensor | None, classes: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Count pictures of each client and class ``(clients, classes)``, with the classes' names; 0 classes: no labels."""
    if labels is None:
        return np.zeros((len(parts), 0), dtype=np.int64), []
    column = labels.numpy()
    num_classes = max(len(classes), int(column.max()) + 1)
    counts = np.stack([np.bincount(column[part], minlength=num_classes) for part in parts])
    return counts, [*classes, *map(str, range(len(classes), num_classes))]
