"""Linear CKA (Kornblith et al., ICML 2019) of representations: between models, between layers, and between clients."""

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.encoders.base import Encoder
from fedssl.evaluation.features import extract
from fedssl.plots.style import PlotData, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.representations import read_representations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 1000  # at most: a model takes as many numbers squared
MAX_ANNOTATED = 12  # models or layers for which a matrix has its numbers written into it
LAYER_IMAGES = 256
OUTPUT = "h"  # what a representation is called among the layers


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


def plot_cka(folder: Path) -> PlotData | None:
    """Plot how alike the models of a round are; None if the run kept no representations.

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
    return PlotData(figure, rows)


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


def layer_outputs(encoder: Encoder, images: Tensor, *, run: LoadedRun) -> dict[str, np.ndarray]:
    """What the running stages of an encoder make of images, and its representations as `OUTPUT`.

    Returns
    -------
    dict of str to ndarray
        By the name of the stage, ``(n, numbers)``; every channel of every place is a number of its own.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in encoder.stage_names[: encoder.active_stages.depth]}
    handles = [encoder.get_submodule(name).register_forward_hook(_collect(outputs)) for name, outputs in found.items()]
    data = run.settings.data
    try:
        h = extract(encoder, images, mean=data.mean, std=data.std, device=run.device)
    finally:
        for handle in handles:
            handle.remove()
    return {**{name: torch.cat(outputs).numpy() for name, outputs in found.items()}, OUTPUT: h.numpy()}


def _collect(outputs: list[Tensor]) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output.flatten(1).float().cpu())

    return hook


def between_clients(grams: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Linear CKA of every layer between every two clients.

    Parameters
    ----------
    grams : sequence of sequence of ndarray
        Centred inner products of every client's layers, at least two clients.

    Returns
    -------
    ndarray
        ``(pairs, layers)``, pairs in the order of `itertools.combinations`.
    """
    return np.array([list(map(linear_cka, one, other)) for one, other in combinations(grams, 2)])


def plot_layer_cka(run: LoadedRun) -> PlotData:
    """Plot how alike the layers of the last kept round's models are.

    On the left the layers of the global model among each other, on the right every layer between the clients' models:
    where it falls, clients part.
    """
    kept = run.kept[-1]
    images, _ = run.images(LAYER_IMAGES)
    grams: dict[str, list[np.ndarray]] = {}
    files = {"global model": run.only_model(kept, figure="the layers' CKA")}
    files |= {f"client {client}": file for client, file in kept.clients.items()}
    names: list[str] = []
    for name, file in files.items():
        with run.loaded(file, round=kept.round) as method:
            outputs = layer_outputs(method.encoder, images, run=run)
        names, grams[name] = list(outputs), [centered_gram(output) for output in outputs.values()]
    model, *clients = grams.values()
    layers, pairs = cka_matrix(model, model), between_clients(clients)
    figure = layers_figure(layers, pairs, names, round=kept.round, color=strategy_color(run.folder))
    told = list(combinations(list(files)[1:], 2))
    rows: list[list[object]] = [["model", "other model", "layer", "other layer", "cka"]]
    for one, other in np.ndindex(layers.shape):
        rows.append(["global model", "global model", names[one], names[other], layers[one, other]])
    for pair, layer in np.ndindex(pairs.shape):
        rows.append([*told[pair], names[layer], names[layer], pairs[pair, layer]])
    return PlotData(figure, rows)


def layers_figure(layers: np.ndarray, pairs: np.ndarray, names: Sequence[str], *, round: int, color: str) -> "Figure":
    """Draw CKA ``(layers, layers)`` of one model, and ``(pairs, layers)`` between clients, if there are two."""
    figure = new_figure(height=3.6, width=9.0 if len(pairs) else 4.6)
    axes = figure.add_subplot(1, 2 if len(pairs) else 1, 1, title=f"layers of the global model, round {round}")
    plot_matrix(figure, axes, layers, names)
    if len(pairs):
        figure.set_layout_engine("constrained", w_pad=0.12)  # between the bar and the next label
        axes = figure.add_subplot(1, 2, 2, title=f"clients' models, round {round}", ylabel="linear CKA of two clients")
        places = np.arange(len(names))
        for number, pair in enumerate(pairs):
            axes.plot(places, pair, color="0.6", linewidth=0.8, label="_" if number else "a pair of clients")
        axes.plot(places, pairs.mean(axis=0), color=color, marker="o", label="mean over pairs")
        axes.set(xticks=places, xlabel="layer", ylim=(min(0.0, pairs.min()), 1.02))
        axes.set_xticklabels(list(names), rotation=30, ha="right")
        axes.legend()
    return figure
