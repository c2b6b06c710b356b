"""Forgetting by aggregation: accuracy of a client's model minus that of the global model after the round.

Both are evaluated by nearest neighbors (`fedssl.evaluation.knn`) on all test images and on a sample with the client's
label distribution (`fedssl.evaluation.label_matched`). Forgetting is the difference on the sample; a negative one is a
gain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedssl.datasets.base import load_federated, subsample_indices
from fedssl.errors import InputError
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.label_matched import sample_label_matched, subset
from fedssl.evaluation.protocol import EvaluationInput, LabeledImages, evaluation_problem, load_labeled
from fedssl.evaluation.scores import column_title, mean_and_std
from fedssl.partition import client_indices
from fedssl.plots.style import PlotData, axes_over_rounds, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.snapshots import SnapshotRound
from fedssl.seeding import torch_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    rounds: dict[int, list[float]] = {}
    for result in results:
        rounds.setdefault(result.round, []).append(result.forgetting)
    return {round: mean_and_std(values) for round, values in sorted(rounds.items())}


def measure_forgetting(run: LoadedRun) -> list[ClientForgetting]:
    """Evaluate all snapshots of a run; raise an `InputError` without labels or with images on devices."""
    data = run.settings.data
    problem = evaluation_problem(data)
    labels = None if data.federated is None or problem else load_federated(data).labels
    if problem or labels is None:
        reason = problem or "the images of the clients have no labels here"
        raise InputError(f"{run.folder}: forgetting needs labels; {reason}")
    train = _subsample(load_labeled(data, "train"), MAX_TRAIN_IMAGES)
    test = _subsample(load_labeled(data, "test"), MAX_TEST_IMAGES)

    def generator(client: int) -> torch.Generator:
        return torch_generator(run.settings.seed, "alike", client)

    parts = client_indices(run.settings.partition, load_federated(data))
    rows = {
        client: sample_label_matched(test.labels, labels[torch.from_numpy(part)], generator=generator(client))
        for client, part in enumerate(parts)
    }
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
            return _accuracy(all_images), [_accuracy(subset(all_images, rows[client])) for client in clients]

    known = [client for client in snapshot.clients if client in rows and len(rows[client])]  # with test images
    global_all, global_matched = accuracies(run.only_model(snapshot, figure="forgetting"), known)
    results = []
    for client, after in zip(known, global_matched, strict=True):
        local_all, (local_matched,) = accuracies(snapshot.clients[client], [client])
        results.append(
            ClientForgetting(
                round=snapshot.round,
                client=client,
                local_matched=local_matched,
                global_matched=after,
                local_all=local_all,
                global_all=global_all,
            )
        )
    return results


def _accuracy(evaluation_input: EvaluationInput) -> float:
    return KNN()(evaluation_input, seed=0)["knn"].value


def _subsample(data: LabeledImages | None, max_images: int) -> LabeledImages:
    assert data is not None  # see `evaluation_problem`
    rows = torch.from_numpy(subsample_indices(len(data.labels), max_images))
    return data.subset(rows)


def plot_forgetting(run: LoadedRun) -> PlotData:
    """Plot the results of `measure_forgetting`."""
    results = measure_forgetting(run)
    if not results:
        raise InputError(
            f"{run.folder} has no snapshot of a client that can be evaluated; run it again with snapshot_every=1"
        )
    rows = [[*astuple(result), result.forgetting] for result in results]
    header = [*(field.name for field in fields(ClientForgetting)), "forgetting"]
    return PlotData(forgetting_figure(results, color=strategy_color(run.folder)), [header, *rows])


def forgetting_figure(results: Sequence[ClientForgetting], *, color: str) -> "Figure":
    """Plot the local and the global accuracy of the last round's clients, and forgetting over rounds."""
    means = mean_forgetting(results)
    last = [result for result in results if result.round == max(means)]
    figure = new_figure(height=3.6, width=9.0)
    ylabel = column_title("kNN accuracy on the client's classes", "%")
    axes = figure.add_subplot(
        1, 2, 1, xlabel="client", ylabel=ylabel, title=f"before and after aggregation, round {max(means)}"
    )
    positions = np.arange(len(last))
    local, after = (100 * np.array([[result.local_matched, result.global_matched] for result in last])).T
    axes.vlines(positions, np.minimum(local, after), np.maximum(local, after), color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(positions, local, color="0.5", marker="s", label="its own model", zorder=2)
    axes.scatter(positions, after, color=color, marker="o", label="the global model after the round", zorder=2)
    step = max(1, len(last) // 20)
    axes.set_xticks(positions[::step], [str(result.client) for result in last][::step])
    axes.margins(x=0.1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")
    axes = axes_over_rounds(figure, (1, 2, 2), "forgetting (percentage points)")
    rounds = list(means)
    center, spread = 100 * np.array(list(means.values()), dtype=float).T
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.plot(rounds, center, color=color, marker=".", label="mean over clients")
    axes.fill_between(rounds, center - spread, center + spread, color=color, alpha=0.2, label="standard deviation")
    axes.set_title("the client's own model less the global one")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")
    return figure
