"""The table and the picture of who holds what."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

_LEGEND = 20  # classes that a legend can name; more get a colour scale


def write_table(
    path: Path, parts: Sequence[np.ndarray], labels: torch.Tensor | None, classes: Sequence[str] = ()
) -> None:
    """Write ``client,examples,<class>...`` with the number of pictures per class; without labels no class columns.

    Parameters
    ----------
    path : Path
        The CSV file.
    parts : sequence of ndarray
        Positions of each client's pictures.
    labels : Tensor or None
        ``(n,)``.
    classes : sequence of str
        Names of the classes; empty: their numbers.
    """
    counts, names = _counts(parts, labels, classes)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "examples", *names])
        for client, part in enumerate(parts):
            writer.writerow([client, len(part), *counts[client]])


def draw(path: Path, parts: Sequence[np.ndarray], labels: torch.Tensor | None, classes: Sequence[str] = ()) -> None:
    """Draw one bar per client, divided by class, into the PNG file ``path``; arguments as in `write_table`."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    counts, names = _counts(parts, labels, classes)
    if labels is None:
        counts = np.array([[len(part)] for part in parts])
    num_clients, num_classes = counts.shape
    colors = colormaps["tab10" if num_classes <= 10 else "tab20" if num_classes <= _LEGEND else "turbo"]
    shade = colors(np.arange(num_classes) if num_classes <= _LEGEND else np.linspace(0, 1, num_classes))
    figure = Figure(figsize=(8, min(2 + 0.3 * num_clients, 12)), layout="constrained")
    axes = figure.add_subplot()
    # One rectangle per client and class that it holds, all in one collection: 100 clients x 200 classes stay quick.
    client, label = np.nonzero(counts)
    right = counts.cumsum(axis=1)[client, label]
    left, half = right - counts[client, label], 0.5 if num_clients > 40 else 0.42
    corners = [(left, client - half), (right, client - half), (right, client + half), (left, client + half)]
    rectangles = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(list(rectangles), facecolors=shade[label], linewidths=0))
    axes.set(xlim=(0, right.max() * 1.02), ylim=(num_clients - 0.5, -0.5), xlabel="pictures", ylabel="client")
    axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if 0 < len(names) <= _LEGEND:
        handles = [Patch(color=color, label=name) for color, name in zip(shade, names, strict=True)]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    elif names:
        scale = ScalarMappable(Normalize(0, num_classes - 1), colors)
        figure.colorbar(scale, ax=axes, label="class", shrink=0.6)
    figure.savefig(path, dpi=120)


def _counts(
    parts: Sequence[np.ndarray], labels: torch.Tensor | None, classes: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Pictures of each client and class ``(clients, classes)`` and the names of the classes; 0 classes: no labels."""
    if labels is None:
        return np.zeros((len(parts), 0), dtype=np.int64), []
    column = labels.numpy()
    num_classes = max(len(classes), int(column.max()) + 1)
    counts = np.stack([np.bincount(column[part], minlength=num_classes) for part in parts])
    return counts, [*classes, *map(str, range(len(classes), num_classes))]
