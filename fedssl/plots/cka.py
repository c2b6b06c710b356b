"""How alike the representations of models are: linear CKA (Kornblith et al., ICML 2019)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedssl.plots.style import SCREEN_FORMATS, new_figure, save_figure
from fedssl.runs.representations import read_representations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 1000  # at most: a model takes as many numbers squared
MAX_ANNOTATED = 12  # models or layers for which a matrix has its numbers written into it


def centered_gram(x: np.ndarray) -> np.ndarray:
    """Inner products of the deviations of representations ``(n, dim)`` from their mean, float64, ``(n, n)``."""
    deviations = x.astype(np.float64)  # a copy
    deviations -= deviations.mean(axis=0)
    gram: np.ndarray = deviations @ deviations.T
    return gram


def linear_cka(one: np.ndarray, other: np.ndarray) -> float:
    """Linear CKA of two representations of the same images, by their centred inner products.

    Parameters
    ----------
    one, other : ndarray
        As `centered_gram` gives them, ``(n, n)``: <K, L> / (||K|| ||L||), which is the paper's Eq. 2 and 3 with linear
        kernels.

    Returns
    -------
    float
        In [0, 1]: 1 if one is the other but for a rotation and a scale, 0 if they have nothing in common, or if one of
        them is the same for all images.
    """
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(np.sum(one * other) / lengths) if lengths > 0 else 0.0


def cka_matrix(rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Linear CKA of every pair of centred inner products, ``(rows, columns)``."""
    return np.array([[linear_cka(one, other) for other in columns] for one in rows])


def draw_cka(folder: Path, *, formats: Sequence[str] = SCREEN_FORMATS) -> Path | None:
    """Draw how alike the models of a round are to ``figures/cka.png``; None if the run kept no representations.

    Every representation has the length 1, as runs keep it; CKA of representations as they are has other numbers.
    """
    kept = read_representations(folder)
    if kept is None:
        return None
    round, representations = kept
    names = [str(name) for name in representations.names]
    grams = [centered_gram(h) for h in representations.h[:, :MAX_IMAGES]]
    found = cka_matrix(grams, grams)
    figure = new_figure(height=1.5 + 0.4 * min(len(names), 14), width=2.6 + 0.45 * min(len(names), 14))
    axes = figure.add_subplot(title=f"representations of the test images, round {round}")
    plot_matrix(figure, axes, found, names)
    rows = [["model", *names], *([name, *row] for name, row in zip(names, found.tolist(), strict=True))]
    return save_figure(figure, folder, "cka", rows=rows, formats=formats)


def plot_matrix(figure: "Figure", axes: "Axes", values: np.ndarray, names: Sequence[str]) -> None:
    """Draw values in [0, 1], ``(names, names)``, as colours, and of few also as numbers."""
    shown = axes.imshow(values, vmin=0, vmax=1, cmap="cividis")
    figure.colorbar(shown, ax=axes, label="linear CKA")
    places = np.arange(len(names))
    step = max(1, len(names) // 20)
    axes.set(xticks=places[::step], yticks=places[::step])
    axes.set_xticklabels(list(names)[::step], rotation=45, ha="right")
    axes.set_yticklabels(list(names)[::step])
    for row, column in np.ndindex(values.shape) if len(names) <= MAX_ANNOTATED else ():
        value = values[row, column]
        color = "black" if value > 0.5 else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize="x-small")
