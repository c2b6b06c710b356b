"""Forgetting by aggregation: accuracy of a client's model minus that of the global model after the round.

Both are evaluated by nearest neighbors (`fedssl.evaluation.knn`) on all test images and on a sample with the client's
label distribution (`fedssl.evaluation.sampling`). Forgetting is the difference on the sample; a negative one is a
gain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from fedssl.config.settings import DataSettings
from fedssl.datasets.base import Split, load_federated, subsample_indices
from fedssl.errors import InputError
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.labeled_images import LabeledImages
from fedssl.evaluation.protocol import EvaluationInput, evaluation_problem, load_labeled
from fedssl.evaluation.sampling import sample_label_matched
from fedssl.evaluation.scores import column_title, mean_and_std
from fedssl.partition import client_indices
from fedssl.plots.style import PlotData, axes_over_rounds, by_round, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.snapshots import SnapshotRound
from fedssl.seeding import torch_generator

MAX_TRAIN_IMAGES, MAX_TEST_IMAGES = 5000, 2000


@dataclass(frozen=True)
class ClientForgetting:
    """Accuracies of a client's model and of the global one after the round, in [0, 1]."""

    round: int
    client: int
    local_matched: float  # on test images with the client's label distribution
    global_matched: float
    local_all: float
    global_all: float

    @property
    def forgetting(self) -> float:
        """Return the difference on the client's label distribution."""
        return self.local_matched - self.global_matched


def mean_forgetting(results: Sequence[ClientForgetting]) -> dict[int, tuple[float, float | None]]:
    """Return mean and standard deviation of forgetting over the clients of each round."""
    values = by_round([{"round": result.round, "forgetting": result.forgetting} for result in results], "forgetting")
    return {round: mean_and_std(of_clients) for round, of_clients in values.items()}


def measure_forgetting(run: LoadedRun) -> list[ClientForgetting]:
    """Evaluate all snapshots of a run; raise an `InputError` without labels or with images on devices."""
    data = run.settings.data
    problem = evaluation_problem(data)
    labels = None if data.federated is None or problem else load_federated(data).labels
    if problem or labels is None:
        reason = problem or "the images of the clients have no labels here"
        raise InputError(f"{run.folder}: forgetting needs labels; {reason}")
    train, test = _load_some(data, "train", MAX_TRAIN_IMAGES), _load_some(data, "test", MAX_TEST_IMAGES)
    rows = {}
    for client, part in enumerate(client_indices(run.settings.partition, load_federated(data))):
        generator = torch_generator(run.settings.seed, "alike", client)
        rows[client] = sample_label_matched(test.labels, labels[torch.from_numpy(part)], generator=generator)
    return [result for snapshot in run.snapshots for result in _measure_round(run, snapshot, train, test, rows)]


def _measure_round(
    run: LoadedRun, snapshot: SnapshotRound, train: LabeledImages, test: LabeledImages, rows: Mapping[int, torch.Tensor]
) -> list[ClientForgetting]:
    data = run.settings.data

    def accuracies(file: Path, clients: Sequence[int]) -> tuple[float, list[float]]:
        with run.loaded(file, round=snapshot.round) as method:
            all_images = EvaluationInput(
                encoder=method.encoder, train=train, test=test, mean=data.mean, std=data.std, device=run.device
            )
            return _accuracy(all_images), [_accuracy(all_images.subset(rows[client])) for client in clients]

    known = [client for client in snapshot.clients if client in rows and len(rows[client])]  # with test images
    global_all, global_matched = accuracies(run.only_model(snapshot, figure="forgetting"), known)
    results = []
    for client, after in zip(known, global_matched, strict=True):
        local_all, (local_matched,) = accuracies(snapshot.clients[client], [client])
        accuracies_of = (local_matched, after, local_all, global_all)
        results.append(ClientForgetting(snapshot.round, client, *accuracies_of))
    return results


def _accuracy(evaluation_input: EvaluationInput) -> float:
    return KNN()(evaluation_input, seed=0)["knn"].value


def _load_some(data: DataSettings, split: Split, max_images: int) -> LabeledImages:
    labeled = load_labeled(data, split)
    assert labeled is not None  # see `evaluation_problem`
    return labeled.subset(torch.from_numpy(subsample_indices(len(labeled.labels), max_images)))


def plot_forgetting(run: LoadedRun) -> PlotData:
    """Plot the local and the global accuracy of the last round's clients, and forgetting over rounds."""
    results = measure_forgetting(run)
    if not results:
        raise InputError(
            f"{run.folder} has no snapshot of a client that can be evaluated; run it again with snapshot_every=1"
        )
    means, color = mean_forgetting(results), strategy_color(run.folder)
    last = [result for result in results if result.round == max(means)]
    figure = new_figure(height=3.6, width=9.0)
    ylabel, title = column_title("kNN accuracy on the client's classes", "%"), "before and after aggregation, round"
    axes = figure.add_subplot(1, 2, 1, xlabel="client", ylabel=ylabel, title=f"{title} {max(means)}")
    positions = np.arange(len(last))
    local, after = (100 * np.array([[result.local_matched, result.global_matched] for result in last])).T
    axes.vlines(positions, np.minimum(local, after), np.maximum(local, after), color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(positions, local, color="0.5", marker="s", label="its own model", zorder=2)
    axes.scatter(positions, after, color=color, marker="o", label="the global model after the round", zorder=2)
    step = max(1, len(last) // 20)
    axes.set_xticks(positions[::step], [str(result.client) for result in last][::step])
    axes.margins(x=0.1)
    axes = axes_over_rounds(figure, (1, 2, 2), "forgetting (percentage points)")
    center, spread = 100 * np.array(list(means.values()), dtype=float).T
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.plot(list(means), center, color=color, marker=".", label="mean over clients")
    axes.fill_between(list(means), center - spread, center + spread, color=color, alpha=0.2, label="standard deviation")
    axes.set_title("the client's own model less the global one")
    for axes in figure.axes:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")
    header = [*(field.name for field in fields(ClientForgetting)), "forgetting"]
    return PlotData(figure, [header, *([*astuple(result), result.forgetting] for result in results)])
