"""Effect of aggregation on the norms of layers: tables and a figure from runs that kept all checkpoints.

    uv run python benchmarks/layer_norms.py RUNS... --figure docs/figures/layer_norms.png

There are three kinds of layers. Layers before batch normalization (convolutions, and linear layers inside a head) can
be scaled without changing the network's output; with a smaller norm, the same optimizer step changes their direction
more. For scales of batch normalization and the last layer of a head, a smaller norm means a smaller output. Shifts
(biases) start at or near 0 and are learned slowly. docs/strategies.md discusses the results.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, pstdev, stdev

import numpy as np
import torch
from torch import nn

from benchmarks.common import make_parser
from fedssl.arrays import Layers
from fedssl.command_line import run_command
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod, build_method
from fedssl.model_arrays import exchanged_layers
from fedssl.plots.style import new_figure, write_png
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import Run, find_runs
from fedssl.text_table import markdown

Columns = dict[str, Callable[..., tuple[float, int]]]  # title to value and number of digits
FREE, SCALES, SHIFTS = KINDS = "before batch norm", "scales and last layer", "shifts"


def kinds(method: SSLMethod) -> dict[str, str]:
    """Return the kind of every trained layer."""
    result = {}
    modules = [(name, module) for name, module in method.named_modules() if not list(module.children())]
    followers = [*(module for _, module in modules[1:]), None]
    for (name, module), follower in zip(modules, followers, strict=True):
        before_norm = isinstance(follower, nn.BatchNorm1d | nn.BatchNorm2d) and not isinstance(
            module, nn.BatchNorm1d | nn.BatchNorm2d
        )
        for parameter, _ in module.named_parameters():
            result[f"{name}.{parameter}"] = FREE if before_norm else SHIFTS if parameter == "bias" else SCALES
    return result


def norms(layers: Layers, kind: dict[str, str]) -> dict[str, float]:
    """Return the norm of each kind of layers as one vector."""
    squares: dict[str, float] = defaultdict(float)
    for name, array in layers.items():
        if name in kind:
            squares[kind[name]] += float(np.square(array, dtype=np.float64).sum())
    return {name: square**0.5 for name, square in squares.items()}


class RunNorms:
    """Norms of a run's layers at its checkpoints.

    ``norms``: by kind, of the untrained model and at every checkpoint, whose ``rounds`` begin with 0. ``ends``: by
    layer, of the untrained and of the last model. ``kind``: of every layer. Of several models, they are means.
    """

    def __init__(self, run: Run) -> None:
        overrides = [f"{key}={value}" for key, value in run.overrides.items() if key != "output_dir"]
        method = build_method(compose(overrides).model)
        self.kind = kinds(method)
        untrained = exchanged_layers(method)
        saved = dict(_checkpoints(run.folder / "checkpoints"))
        self.rounds = [0, *saved]
        history = [[norms(layers, self.kind) for layers in models] for models in ([untrained], *saved.values())]
        self.norms = {name: [mean(one[name] for one in each) for each in history] for name in KINDS}
        last = list(saved.values())[-1] if saved else [untrained]
        self.ends = {
            name: [mean(float(np.linalg.norm(layers[name])) for layers in models) for models in ([untrained], last)]
            for name in self.kind
        }


class RunHistory(RunNorms):
    """Statistics of a run with a checkpoint for every round.

    ``knn``: rounds and accuracies in %. ``cosines``: by
    kind, means over clients and layers in the last round. ``spread``: by kind, standard deviation of the clients'
    cosines in % of their mean, averaged over layers, in the last round. ``results``: of the last evaluation, in %.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        kind = self.kind
        lines = read_jsonl(run.folder / "metrics.jsonl")
        self.knn = [
            (line["round"], 100 * line["evaluation"]["knn"]) for line in lines if "knn" in line.get("evaluation", {})
        ]
        rows = [row for row in read_jsonl(run.folder / "clients.jsonl") if row["round"] == lines[-1]["round"]]
        by_layer = {name: [row["cosine"][name] for row in rows] for name in rows[0]["cosine"]}
        self.cosines = {
            name: mean(mean(by_layer[layer]) for layer in by_layer if kind[layer] == name) for name in KINDS
        }
        self.spread = {
            name: mean(100 * pstdev(each) / abs(mean(each)) for layer, each in by_layer.items() if kind[layer] == name)
            for name in KINDS
        }
        if not self.knn:
            raise InputError(f"{run.folder} has no kNN accuracy per round; repeat it with evaluation=knn")
        self.results = {name: 100 * score.value for name, score in run.results.items() if name in ("knn", "linear")}


def rule(run: Run) -> str:
    """Return the name of a run's rule in the tables."""
    return run.value("strategy") + (" normalize" if run.value("strategy.normalize").lower() == "true" else "")


def tables(groups: dict[tuple[str, str], list[RunHistory]]) -> str:
    """Return two Markdown tables of means and standard deviations over seeds: accuracies, and statistics of layers."""
    accuracies: Columns = {
        "kNN": lambda run: (run.results["knn"], 1),
        "linear": lambda run: (run.results["linear"], 1),
    }
    columns: Columns = {f"norm, {kind}": lambda run, kind=kind: (run.norms[kind][-1], 2) for kind in KINDS}
    columns |= {f"cosine, {kind}": lambda run, kind=kind: (run.cosines[kind], 3) for kind in KINDS}
    columns |= {f"clients' deviation in %, {kind}": lambda run, kind=kind: (run.spread[kind], 1) for kind in KINDS}
    return "\n".join([_table(groups, accuracies, seeds=True), _table(groups, columns, seeds=False)])


def _table(groups: dict[tuple[str, str], list[RunHistory]], columns: Columns, *, seeds: bool) -> str:
    lines = [["epochs x rounds", "rule", *columns, *(["seeds"] if seeds else [])]]
    for (epochs, name), runs in groups.items():
        cells = [_mean_and_std([column(run) for run in runs]) for column in columns.values()]
        rounds = len(runs[0].norms[FREE]) - 1
        lines.append([f"{epochs} x {rounds}", name, *cells, *([str(len(runs))] if seeds else [])])
    return markdown(lines, left=2)


def draw(groups: dict[tuple[str, str], list[RunHistory]], file: Path) -> None:
    """Plot norms and accuracy over rounds, averaged over seeds, with a row for each number of local epochs."""
    all_epochs, names = (list(dict.fromkeys(key[index] for key in groups)) for index in (0, 1))
    figure = new_figure(height=2.6 * len(all_epochs), width=12)
    axes = figure.subplots(len(all_epochs), 4, squeeze=False)
    colors = dict(zip(names, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False))  # for color-blind readers
    for (epochs, name), runs in groups.items():
        row = axes[all_epochs.index(epochs)]
        for column, kind in enumerate(KINDS):
            row[column].plot(np.mean([each.norms[kind] for each in runs], axis=0), label=name, color=colors[name])
            row[column].set_title(f"{epochs} local epochs: norm of\n{kind}", fontsize=9)
        rounds = [point[0] for point in runs[0].knn]
        accuracies = np.mean([[point[1] for point in each.knn] for each in runs], axis=0)
        row[3].plot(rounds, accuracies, color=colors[name])
        row[3].set_title(f"{epochs} local epochs: \nkNN accuracy in %", fontsize=9)
    for each in axes.flat:
        each.set_xlabel("round")
    axes[0][0].legend(fontsize=8)
    write_png(figure, file, dpi=110)


def _checkpoints(folder: Path) -> Iterable[tuple[int, list[Layers]]]:
    """Yield each saved round with the layers of each model after it."""
    for file in sorted(folder.glob("round-*.pt")):
        models = torch.load(file, weights_only=True)["models"].values()
        layers = [{name: tensor.numpy() for name, tensor in model["layers"].items()} for model in models]
        yield int(file.stem.partition("-")[2]), layers


def _mean_and_std(values: list[tuple[float, int]]) -> str:
    numbers, (digits, *_) = zip(*values, strict=True)
    std = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{std}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    groups: dict[tuple[str, str], list[RunHistory]] = defaultdict(list)
    for run in find_runs(arguments.runs):
        if run.finished:
            groups[run.value("local_epochs"), rule(run)].append(RunHistory(run))
    groups = dict(sorted(groups.items(), key=lambda item: int(item[0][0])))
    print(tables(groups))
    if arguments.figure:
        draw(groups, arguments.figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_command("layer_norms", main))
