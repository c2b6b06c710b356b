"""Linear CKA (Kornblith et al., ICML 2019) of representations: between models, between layers, and between clients."""

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.datasets.images import TensorImages
from fedssl.encoders.base import Encoder
from fedssl.evaluation.features import extract
from fedssl.plots.style import PlotData, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.representations import read_representations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 1000  # memory grows with the square
MAX_ANNOTATED = 12  # rows of a matrix with numbers in its cells
LAYER_IMAGES = 256
OUTPUT = "h"  # name of the representation among the layers


def centered_gram(x: np.ndarray) -> np.ndarray:
    """Return the inner products of centered representations ``(n, dim)``, float64, ``(n, n)``."""
    deviations = x.astype(np.float64)  # a copy
    deviations -= deviations.mean(axis=0)
    gram: np.ndarray = deviations @ deviations.T
    return gram


def linear_cka(gram1: np.ndarray, gram2: np.ndarray) -> float:
    """Compute the linear CKA of two representations of the same images from their `centered_gram` matrices ``(n, n)``.

    It is in [0, 1]: 1 if the representations differ by a rotation and a scale, 0 if they are unrelated or one of them
    is constant.
    """
    norms = np.linalg.norm(gram1) * np.linalg.norm(gram2)
    return float(np.sum(gram1 * gram2) / norms) if norms > 0 else 0.0  # Eqs. 2 and 3 with linear kernels


def cka_matrix(rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the linear CKA of every pair of centered Gram matrices, ``(rows, columns)``."""
    return np.array([[linear_cka(row, column) for column in columns] for row in rows])


def plot_cka(folder: Path) -> PlotData | None:
    """Plot the CKA of a round's models on normalized representations; None without ``representations.npz``."""
    saved = read_representations(folder)
    if saved is None:
        return None
    round, representations = saved
    names = [str(name) for name in representations.names]
    grams = [centered_gram(h) for h in representations.h[:, :MAX_IMAGES]]
    matrix = cka_matrix(grams, grams)
    figure = new_figure(height=1.5 + 0.4 * min(len(names), 14), width=2.6 + 0.45 * min(len(names), 14))
    axes = figure.add_subplot(title=f"representations of the test images, round {round}")
    plot_matrix(figure, axes, matrix, names)
    rows = [["model", *names], *([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))]
    return PlotData(figure, rows)


def plot_matrix(figure: "Figure", axes: "Axes", values: np.ndarray, names: Sequence[str]) -> None:
    """Plot values in [0, 1], ``(names, names)``, as colors, and few also as numbers."""
    image = axes.imshow(values, vmin=0, vmax=1, cmap="cividis")
    figure.colorbar(image, ax=axes, label="linear CKA")
    ticks = np.arange(len(names))
    step = max(1, len(names) // 20)
    axes.set(xticks=ticks[::step], yticks=ticks[::step])
    axes.set_xticklabels(list(names)[::step], rotation=45, ha="right")
    axes.set_yticklabels(list(names)[::step])
    for row, column in np.ndindex(values.shape) if len(names) <= MAX_ANNOTATED else ():
        value = values[row, column]
        color = "black" if value > 0.5 else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize="x-small")


def layer_outputs(encoder: Encoder, images: Tensor, *, run: LoadedRun) -> dict[str, np.ndarray]:
    """Return the flattened outputs ``(n, values)`` of an encoder's active stages, and `OUTPUT`."""
    collected: dict[str, list[Tensor]] = {name: [] for name in encoder.stage_names[: encoder.active_stages.depth]}
    handles = [encoder.get_submodule(name).register_forward_hook(_collect(out)) for name, out in collected.items()]
    data = run.settings.data
    try:
        h = extract(encoder, TensorImages(images), mean=data.mean, std=data.std, device=run.device)
    finally:
        for handle in handles:
            handle.remove()
    return {**{name: torch.cat(outputs).numpy() for name, outputs in collected.items()}, OUTPUT: h.numpy()}


def _collect(outputs: list[Tensor]) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output.flatten(1).float().cpu())

    return hook


def between_clients(grams: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Compute the linear CKA of each layer of every two clients, ``(pairs, layers)``, from their Gram matrices."""
    return np.array([list(map(linear_cka, *pair)) for pair in combinations(grams, 2)])


def plot_layer_cka(run: LoadedRun) -> PlotData:
    """Plot the CKA of layers in the last snapshot: within the global model, and of each layer between clients."""
    snapshot = run.snapshots[-1]
    images, _ = run.images(LAYER_IMAGES)
    files = {"global model": run.only_model(snapshot, figure="the layers' CKA")}
    files |= {f"client {client}": file for client, file in snapshot.clients.items()}
    grams: list[list[np.ndarray]] = []
    for file in files.values():
        with run.loaded(file, round=snapshot.round) as method:
            outputs = layer_outputs(method.encoder, images, run=run)
        grams.append(list(map(centered_gram, outputs.values())))
    names = list(outputs)
    layers, pairs = cka_matrix(grams[0], grams[0]), between_clients(grams[1:])
    figure = new_figure(height=3.6, width=9.0 if len(pairs) else 4.6)
    title = f"layers of the global model, round {snapshot.round}"
    plot_matrix(figure, figure.add_subplot(1, 2 if len(pairs) else 1, 1, title=title), layers, names)
    if len(pairs):
        figure.set_layout_engine("constrained", w_pad=0.12)  # between the bar and the next label
        title = f"clients' models, round {snapshot.round}"
        axes = figure.add_subplot(1, 2, 2, title=title, ylabel="linear CKA of two clients")
        ticks = np.arange(len(names))
        for number, pair in enumerate(pairs):
            axes.plot(ticks, pair, color="0.6", linewidth=0.8, label="_" if number else "a pair of clients")
        axes.plot(ticks, pairs.mean(axis=0), color=strategy_color(run.folder), marker="o", label="mean over pairs")
        axes.set(xticks=ticks, xlabel="layer", ylim=(min(0.0, pairs.min()), 1.02))
        axes.set_xticklabels(names, rotation=30, ha="right")
        axes.legend()
    rows: list[list[object]] = [["model", "other model", "layer", "other layer", "cka"]]
    for row, column in np.ndindex(layers.shape):
        rows.append(["global model", "global model", names[row], names[column], layers[row, column]])
    for clients, values in zip(combinations(list(files)[1:], 2), pairs, strict=True):
        rows += [[*clients, name, name, value] for name, value in zip(names, values, strict=True)]
    return PlotData(figure, rows)
