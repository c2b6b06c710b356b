"""What clients lose when their models are averaged: accuracy of their own model, and of the global one after the round.

Both are judged by nearest neighbours (`fedssl.evaluation.knn`) on all test images, and on those in which classes are
as frequent as among the client's own (`fedssl.evaluation.label_matched`). Forgetting is what the client's own model has
more on the latter; negative, the client gains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedssl.datasets.base import load_federated, subsample_indices
from fedssl.errors import InputError
from fedssl.evaluation.knn import KNN
from fedssl.evaluation.label_matched import sample_label_matched, subset
from fedssl.evaluation.protocol import EvaluationInput, LabeledImages, load_labeled, why_not_evaluable
from fedssl.evaluation.scores import column_title
from fedssl.partition import client_indices
from fedssl.plots.style import PlotData, axes_over_rounds, new_figure, strategy_color
from fedssl.runs.loaded_run import LoadedRun
from fedssl.runs.snapshots import KeptRound
from fedssl.seeding import torch_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TRAIN_IMAGES, MAX_TEST_IMAGES = 5000, 2000  # most images that vote, and that are judged


@dataclass(frozen=True)
class ClientForgetting:
    """Accuracies of a client's model and of the global one after the round, in [0, 1].

    Attributes
    ----------
    round, client : int
    local_matched, global_matched : float
        On test images like the client's.
    local_all, global_all : float
        On all test images.
    """

    round: int
    client: int
    local_matched: float
    global_matched: float
    local_all: float
    global_all: float

    @property
    def forgetting(self) -> float:
        """What the client's model has more on images like its own."""
        return self.local_matched - self.global_matched


def mean_forgetting(found: Sequence[ClientForgetting]) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation (divisor n) of forgetting over the clients of each round."""
    rounds: dict[int, list[float]] = {}
    for one in found:
        rounds.setdefault(one.round, []).append(one.forgetting)
    return {round: (float(np.mean(values)), float(np.std(values))) for round, values in sorted(rounds.items())}


def measure_forgetting(run: LoadedRun) -> list[ClientForgetting]:
    """Judge the models of all rounds that a run keeps.

    Raises
    ------
    InputError
        There are no labels, or the clients' images are on devices.
    """
    data = run.settings.data
    problem = why_not_evaluable(data)
    labels = None if data.federated is None or problem else load_federated(data).labels
    if problem or labels is None:
        reason = problem or "the images of the clients have no labels here"
        raise InputError(f"{run.folder}: forgetting needs labels; {reason}")
    train, test = (
        _some(load_labeled(data, "train"), MAX_TRAIN_IMAGES),
        _some(load_labeled(data, "test"), MAX_TEST_IMAGES),
    )
    parts = client_indices(run.settings.partition, load_federated(data))
    rows = {
        client: sample_label_matched(test.labels, labels[torch.from_numpy(part)], generator=_generator(run, client))
        for client, part in enumerate(parts)
    }
    return [one for kept in run.kept for one in _measure_round(run, kept, train, test, rows)]


def _measure_round(
    run: LoadedRun, kept: KeptRound, train: LabeledImages, test: LabeledImages, rows: Mapping[int, torch.Tensor]
) -> list[ClientForgetting]:
    data = run.settings.data

    def accuracies(file: Path, clients: Sequence[int]) -> tuple[float, list[float]]:
        """Of one model, on all test images and on those of every client."""
        with run.loaded(file, round=kept.round) as method:
            whole = EvaluationInput(
                encoder=method.encoder, train=train, test=test, mean=data.mean, std=data.std, device=run.device
            )
            return _accuracy(whole), [_accuracy(subset(whole, rows[client])) for client in clients]

    known = [client for client in kept.clients if client in rows and len(rows[client])]  # the test has their classes
    global_all, global_matched = accuracies(run.only_model(kept, figure="forgetting"), known)
    found = []
    for client, after in zip(known, global_matched, strict=True):
        local_all, (local_matched,) = accuracies(kept.clients[client], [client])
        found.append(
            ClientForgetting(
                round=kept.round,
                client=client,
                local_matched=local_matched,
                global_matched=after,
                local_all=local_all,
                global_all=global_all,
            )
        )
    return found


def _accuracy(subject: EvaluationInput) -> float:
    return KNN()(subject, seed=0)["knn"].value


def _some(labelled: LabeledImages | None, max_images: int) -> LabeledImages:
    assert labelled is not None  # `lacking` says so
    rows = torch.from_numpy(subsample_indices(len(labelled.labels), max_images))
    return LabeledImages(labelled.images[rows], labelled.labels[rows])


def _generator(run: LoadedRun, client: int) -> torch.Generator:
    return torch_generator(run.settings.seed, "alike", client)


def plot_forgetting(run: LoadedRun) -> PlotData:
    """Plot what `measure_forgetting` returns."""
    found = measure_forgetting(run)
    if not found:
        raise InputError(
            f"{run.folder} keeps no client's model that could be judged; run it again with snapshot_every=1"
        )
    header = ["round", "client", "local_matched", "global_matched", "local_all", "global_all", "forgetting"]
    rows = [
        [one.round, one.client, one.local_matched, one.global_matched, one.local_all, one.global_all, one.forgetting]
        for one in found
    ]
    return PlotData(forgetting_figure(found, color=strategy_color(run.folder)), [header, *rows])


def forgetting_figure(found: Sequence[ClientForgetting], *, color: str) -> "Figure":
    """Draw every client of the last round, from its own model to the global one, and forgetting over the rounds."""
    means = mean_forgetting(found)
    last = [one for one in found if one.round == max(means)]
    figure = new_figure(height=3.6, width=9.0)
    ylabel = column_title("kNN accuracy on the client's classes", "%")
    axes = figure.add_subplot(
        1, 2, 1, xlabel="client", ylabel=ylabel, title=f"before and after aggregation, round {max(means)}"
    )
    places = np.arange(len(last))
    local, after = (
        100 * np.array([getattr(one, name) for one in last]) for name in ("local_matched", "global_matched")
    )
    axes.vlines(places, np.minimum(local, after), np.maximum(local, after), color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(places, local, color="0.5", marker="s", label="its own model", zorder=2)
    axes.scatter(places, after, color=color, marker="o", label="the global model after the round", zorder=2)
    step = max(1, len(last) // 20)
    axes.set_xticks(places[::step], [str(one.client) for one in last][::step])
    axes.margins(x=0.1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")
    axes = axes_over_rounds(figure, (1, 2, 2), "forgetting (percentage points)")
    rounds = list(means)
    center, spread = 100 * np.array(list(means.values())).T
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.plot(rounds, center, color=color, marker=".", label="mean over clients")
    axes.fill_between(rounds, center - spread, center + spread, color=color, alpha=0.2, label="standard deviation")
    axes.set_title("the client's own model less the global one")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")
    return figure
