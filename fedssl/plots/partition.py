"""Table and plot of the images of each client."""

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedssl.plots.style import PlotData, class_colors, new_figure, write_png
from fedssl.safe_io import MAX_LINES_BYTES, corrupt_file_error, read_text
from fedssl.text_table import to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEGEND = 10  # classes in a legend; more get a color scale
_LABEL_WIDTH = 24  # characters of a line in the legend, which takes its room from the bars
MAX_NOTES = 40  # more have no room
MAX_BARS = 1000  # of more clients, a figure shows this many at equal distances


def partition_table(parts: Sequence[np.ndarray], *columns: tuple[torch.Tensor | None, Sequence[str]]) -> str:
    """Return CSV text ``client,examples,<class>...`` with the number of images per class; no classes without labels.

    ``columns`` are labels ``(n,)``, and names of the classes, by default their numbers. Further tuples are for other
    groups, such as clusters.
    """
    tables = [_counts(parts, labels, classes) for labels, classes in columns]
    counts = np.concatenate([counts for counts, _ in tables], axis=1)
    rows = ([client, len(part), *counts[client]] for client, part in enumerate(parts))
    return to_csv([["client", "examples", *(name for _, names in tables for name in names)], *rows])


def save_partition_plot(
    path: Path,
    parts: Sequence[np.ndarray],
    labels: torch.Tensor | None,
    classes: Sequence[str] = (),
    *,
    kind: str = "class",
    notes: Sequence[str] = (),
) -> None:
    """Write a PNG file with one bar per client, divided by class; parameters as in `partition_table`.

    ``notes`` about each client stand beside its bar, if there are few clients.
    """
    counts, names = _counts(parts, labels, classes)
    if labels is None:
        counts = np.array([[len(part)] for part in parts])
    figure = _figure(counts, names, kind)
    if 0 < len(notes) <= MAX_NOTES:
        axes, sizes = figure.axes[0], counts.sum(axis=1)
        for client, note in enumerate(notes):
            axes.annotate(note, (sizes[client], client), (4, 0), textcoords="offset points", va="center", fontsize=6)
    write_png(figure, path, dpi=120)


def plot_partition(folder: Path) -> PlotData | None:
    """Plot ``partition.csv`` of a run folder; None if it does not exist, because the images are on devices."""
    table = read_partition_table(folder / "partition.csv")
    if table is None:
        return None
    counts, names = table
    rows = [["client", *(names or ["examples"])], *([client, *row] for client, row in enumerate(counts.tolist()))]
    return PlotData(_figure(counts, names, "class"), rows)


def read_partition_table(path: Path) -> tuple[np.ndarray, list[str]] | None:
    """Read images of each client and class ``(clients, classes)``, and the classes' names, of `partition_table`.

    Columns of other groups are left out, and so are last classes that nobody holds. Without labels there is one column,
    and no names. None: there is no file.
    """
    text = read_text(path, max_bytes=MAX_LINES_BYTES)
    if text is None:
        return None
    header, *lines = list(csv.reader(text.splitlines())) or [[]]
    try:
        table = np.array([[int(cell) for cell in line] for line in lines], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise corrupt_file_error(path, "it does not hold numbers of images") from error
    if header[:2] != ["client", "examples"] or table.ndim != 2 or table.shape[1] != len(header) or table.min() < 0:
        raise corrupt_file_error(path, "it is no table of clients and images")
    examples, counts = table[:, 1], table[:, 2:]
    if not counts.size:
        return table[:, 1:2], []
    # Classes come first, and together they have every image once.
    whole = np.flatnonzero((counts.cumsum(axis=1) == examples[:, None]).all(axis=0))
    if not len(whole):
        raise corrupt_file_error(path, "its columns do not add up")
    used = int(whole[0]) + 1
    return counts[:, :used], header[2 : 2 + used]


def _figure(counts: np.ndarray, names: Sequence[str], kind: str) -> "Figure":
    """Plot ``counts``, ``(clients, classes)``, as bars, with the classes as a legend or a color scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    shades = class_colors(np.arange(num_classes), classes=num_classes)
    figure = new_figure(width=8, height=min(2 + 0.3 * num_clients, 12))
    axes = figure.add_subplot()
    step = -(-num_clients // MAX_BARS)
    counts = counts[::step]
    # All rectangles in one collection, which is fast for 100 clients x 200 classes.
    row, label = np.nonzero(counts)
    right = counts.cumsum(axis=1)[row, label]
    left, half = right - counts[row, label], 0.5 * step if num_clients > 40 else 0.42
    client = row * step
    corners = [(left, client - half), (right, client - half), (right, client + half), (left, client + half)]
    rectangles = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(list(rectangles), facecolors=shades[label], linewidths=0))
    axes.set(xlim=(0, right.max(initial=1) * 1.02), ylim=(num_clients - 0.5, -0.5), xlabel="images")
    axes.set_ylabel("client" if step == 1 else f"client (one of {step})")
    axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if 0 < len(names) <= _LEGEND:
        labels = ["\n".join(textwrap.wrap(name, _LABEL_WIDTH, max_lines=2, placeholder="…")) for name in names]
        handles = [Patch(color=color, label=label) for color, label in zip(shades, labels, strict=True)]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    elif names:
        scale = ScalarMappable(Normalize(0, num_classes - 1), "viridis")
        figure.colorbar(scale, ax=axes, label=kind, shrink=0.6)
    return figure


def _counts(
    parts: Sequence[np.ndarray], labels: torch.Tensor | None, classes: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Count images of each client and class ``(clients, classes)``, with the classes' names; 0 classes: no labels."""
    if labels is None:
        return np.zeros((len(parts), 0), dtype=np.int64), []
    column = labels.numpy()
    num_classes = max(len(classes), int(column.max()) + 1)
    names = [*classes, *map(str, range(len(classes), num_classes))]
    held = column[np.concatenate(parts)]
    if (held < 0).any():
        held, names = np.where(held < 0, num_classes, held), [*names, "no label"]
    num_classes = len(names)
    clients = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = clients * num_classes + held
    counts = np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)
    return counts, names
