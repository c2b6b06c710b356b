"""The loss around the trajectory of the global model, as in L-DAWA's Figure 2 (Rehman et al., arXiv 2307.07393).

The plane is that of Li et al. (NeurIPS 2018, section 7.2): the two principal directions of the deviations of the global
models of all rounds from the last one. L-DAWA does not define its plane. Points of the plane differ in their weights;
batch normalization uses the statistics of the batch, as in training. A target network that clients keep is a copy of
the online one. The regularizer depends on the client and is omitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedssl.arrays import Layers, is_weight
from fedssl.errors import InputError
from fedssl.model_arrays import exchanged_names, load_layers
from fedssl.plots.style import PlotData, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.run import strategy_of
from fedssl.schedule.phases import phase_at
from fedssl.schedule.stages import frozen_names, set_active_stages
from fedssl.seeding import torch_generator
from fedssl.training import index_rows, method_inputs

_BLOCK = 2**20  # weights at a time
MAX_ROUNDS = 25  # models of a trajectory, of which three copies are in memory
MAX_IMAGES = 256  # for the loss
GRID_POINTS = 15  # of the grid in each direction
MARGIN = 0.25  # of the grid around the models, relative to their extent

Loss = Callable[[np.ndarray], float]


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane in the space of weights."""

    origin: np.ndarray  # (weights,)
    directions: np.ndarray  # (2, weights), orthonormal
    shares: tuple[float, float]  # of the squared deviations along the directions, in [0, 1]

    def coordinates(self, weights: np.ndarray) -> np.ndarray:
        """Project models ``(n, weights)`` to coordinates ``(n, 2)``."""
        coordinates: np.ndarray = (weights - self.origin) @ self.directions.T
        return coordinates

    def weights(self, x: float, y: float) -> np.ndarray:
        """Return the model at a point of the plane, ``(weights,)``."""
        weights: np.ndarray = self.origin + x * self.directions[0] + y * self.directions[1]
        return weights


def principal_plane(models: np.ndarray) -> Plane:
    """Return the plane through the last of the models ``(n, weights)`` along the principal directions from it.

    The model with the largest coordinate has a positive one. Raise an `InputError` if the models lie on a line.
    """
    deviations = models - models[-1]
    squares, mixes = np.linalg.eigh(_products(deviations))  # n x n, however many weights
    squares, mixes = squares[::-1][:2], mixes[:, ::-1][:, :2]
    if len(squares) < 2 or squares[1] <= 1e-9 * squares[0]:
        raise InputError(
            "the models lie on a line, which is no plane: some rounds changed nothing; choose another figure, or run "
            "more rounds with snapshot_every=1"
        )
    mixes = mixes * np.sign(mixes[np.abs(mixes).argmax(axis=0), [0, 1]])
    directions = (mixes / np.sqrt(squares)).T.astype(models.dtype) @ deviations
    total = float(np.sum(np.square(deviations, dtype=np.float64)))
    return Plane(models[-1], directions, (float(squares[0]) / total, float(squares[1]) / total))


def _products(deviations: np.ndarray) -> np.ndarray:
    """Return the inner products ``(n, n)`` in float64; rounding in float32 would turn a line into a plane."""
    products: np.ndarray = np.zeros((len(deviations),) * 2)
    for start in range(0, deviations.shape[1], _BLOCK):  # no float64 copy of all weights
        block = deviations[:, start : start + _BLOCK].astype(np.float64)
        products += block @ block.T
    return products


def axes_around(coordinates: np.ndarray, *, points: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Return grid coordinates ``(points,)`` in each direction, with a relative margin around ``(n, 2)`` coordinates."""
    low, high = coordinates.min(axis=0), coordinates.max(axis=0)
    pad = margin * (high - low)
    x, y = (np.linspace(*ends, points) for ends in zip(low - pad, high + pad, strict=True))
    return x, y


@dataclass(frozen=True, eq=False)
class Landscape:
    """The loss on a plane, and the models of some rounds on it."""

    plane: Plane
    x: np.ndarray  # coordinates of the grid, (points,)
    y: np.ndarray
    grid: np.ndarray  # loss, (y, x)
    rounds: list[int]  # 0 is the untrained model
    trajectory: np.ndarray  # coordinates of the global models, (rounds, 2)
    losses: list[float]  # of the global models, which may not lie on the plane
    clients: dict[int, np.ndarray]  # coordinates of the clients' models in the last round, (2,)

    def rows(self) -> list[list[object]]:
        """Return all numbers with a header."""
        trajectory = zip(self.rounds, self.trajectory.tolist(), self.losses, strict=True)
        rows: list[list[object]] = [["kind", "round", "client", "x", "y", "loss"]]
        rows += [["model", round, "", *coordinate, loss] for round, coordinate, loss in trajectory]
        rows += [["client", self.rounds[-1], client, *place.tolist(), ""] for client, place in self.clients.items()]
        for y, losses in zip(self.y.tolist(), self.grid.tolist(), strict=True):
            rows += [["grid", "", "", x, y, loss] for x, loss in zip(self.x.tolist(), losses, strict=True)]
        return rows


def compute_landscape(run: LoadedRun) -> Landscape:
    """Compute the landscape of a run with snapshots of at least three rounds, or of two and the untrained model."""
    method = run.method
    if method.uploaded_parts or method.broadcast_parts:
        raise InputError(
            f"{run.folder}: the loss of {type(method).__name__} depends on server state, which snapshots do not "
            "have; choose another figure, or a run of another method"
        )
    phase = phase_at(run.phases, run.snapshots[-1].round)
    snapshots = [snapshot for snapshot in run.snapshots if snapshot.round >= phase.first]
    evenly = np.linspace(0, len(snapshots) - 1, min(len(snapshots), MAX_ROUNDS)).round().astype(int)
    snapshots = [snapshots[index] for index in evenly]  # with the first and the last
    first = phase.number == 1
    if len(snapshots) + first < 3:
        raise InputError(
            f"{run.folder} has snapshots of {len(snapshots)} round(s) in which the same stages are trained, and a "
            f"plane needs {3 - first}; run it again with a smaller snapshot_every, e.g. snapshot_every=1"
        )
    with set_active_stages(method, depth=phase.depth, frozen=phase.frozen):
        files = {snapshot.round: run.only_model(snapshot, figure="the landscape") for snapshot in snapshots}
        last, frozen = run.layers(files[snapshots[-1].round]), set(frozen_names(method))
        # The plane has the trained and exchanged layers.
        names = [name for name in exchanged_names(method) if name not in frozen and is_weight(name, last[name])]
        weights = {0: concat_weights(run.untrained(), names)} if first else {}
        weights |= {round: concat_weights(run.layers(file), names) for round, file in files.items()}
        models = np.stack(list(weights.values()))
        sent = {client: run.layers(file) for client, file in snapshots[-1].clients.items()}
        plane = principal_plane(models)
        clients = {
            client: plane.coordinates(concat_weights(layers, names)[None])[0]
            for client, layers in sent.items()
            if layers.keys() >= set(names)
        }
        trajectory, loss = plane.coordinates(models), loss_of(run, last, names)
        x, y = axes_around(np.stack([*trajectory, *clients.values()]), points=GRID_POINTS, margin=MARGIN)
        grid = np.array([[loss(plane.weights(across, up)) for across in x] for up in y])
        return Landscape(plane, x, y, grid, list(weights), trajectory, [loss(model) for model in models], clients)


def concat_weights(layers: Layers, names: Sequence[str]) -> np.ndarray:
    """Concatenate the named layers to one float32 vector."""
    return np.concatenate([layers[name].ravel() for name in names]).astype(np.float32, copy=False)


def loss_of(run: LoadedRun, last: Layers, names: Sequence[str]) -> Loss:
    """Return the method's loss as a function of the named weights, on fixed views of fixed images."""
    method, settings = run.method, run.settings
    images, labels = run.images(MAX_IMAGES)
    generator = torch_generator(settings.seed, "landscape views")
    augment = settings.training.augmentation.instantiate()
    size = min(settings.training.batch_size, len(images))
    rows = torch.arange(len(images)).split(size)
    rows = rows[: len(images) // size]  # full batches, because a contrastive loss depends on their size
    views = [augment(images[batch].to(run.device), generator) for batch in rows]
    known = [None if labels is None else index_rows(labels, batch, run.device) for batch in rows]
    sizes = {name: last[name].shape for name in names}

    def loss(weights: np.ndarray) -> float:
        parts = np.split(weights, np.cumsum([last[name].size for name in names])[:-1])
        replaced = {name: part.reshape(sizes[name]) for name, part in zip(names, parts, strict=True)}
        load_layers(method, {**last, **replaced})
        method.start_round(first=True)
        method.train()
        with torch.no_grad():
            inputs = (method_inputs(method, *batch, generator) for batch in zip(views, known, strict=True))
            return sum(float(method.loss(batch)) for batch in inputs) / len(views)

    return loss


def plot_landscape(run: LoadedRun) -> PlotData:
    """Plot the loss as contours, the global model's trajectory from a circle to a star, and clients as crosses."""
    from matplotlib.ticker import MaxNLocator

    landscape = compute_landscape(run)
    rounds = landscape.rounds
    figure = new_figure(height=5.2, width=6.0)
    names = [
        f"direction {number} ({share:.0%} of the squared distances)"
        for number, share in enumerate(landscape.plane.shares, start=1)
    ]
    title = f"{strategy_of(run.folder)}, {type(run.method).__name__}"
    axes = figure.add_subplot(xlabel=names[0], ylabel=names[1], title=title)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    filled = axes.contourf(landscape.x, landscape.y, landscape.grid, levels=24, cmap="cividis")
    axes.contour(landscape.x, landscape.y, landscape.grid, levels=12, colors="white", linewidths=0.4, alpha=0.6)
    figure.colorbar(filled, ax=axes, label="loss")
    axes.plot(
        *landscape.trajectory.T, marker="o", markersize=3, linewidth=1.5, color="white", zorder=3, label="global model"
    )
    for mark, size, number in (("o", 50, 0), ("*", 140, -1)):
        name = "untrained" if rounds[number] == 0 else f"round {rounds[number]}"
        x, y = landscape.trajectory[number]
        color = strategy_color(run.folder)
        axes.scatter(x, y, marker=mark, s=size, color=color, edgecolor="white", zorder=4, label=name)
    if landscape.clients:
        x, y = np.stack(list(landscape.clients.values())).T
        label = f"clients' models, round {rounds[-1]}"
        axes.scatter(x, y, marker="X", s=50, color="0.85", edgecolor="black", linewidths=0.6, zorder=4, label=label)
    figure.legend(loc="outside lower center", ncols=4, facecolor="lightgrey", fontsize="small")
    return PlotData(figure, landscape.rows())
