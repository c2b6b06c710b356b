"""The gap between FedAvg and centralized training, one factor at a time, as a table and a waterfall.

    uv run python -m benchmarks.gap --seeds 0 1 2 --figure docs/figures/gap.png
    uv run python -m benchmarks.gap --data cifar10 dataset=cifar10 'dataset.path=/my/cifar10/*' dataset.limit=5000

All cases of a seed have the same images, initial weights and number of passes, ten epochs of four rounds with the
settings of FedSSL-Bench. Neighbors in `CHAIN` differ in one factor, so that the bars add up:

- steps: a step of the optimizer has the mean gradient of ten batches instead of one batch.
- composition: all images of a batch, which are each other's negatives, belong to one client (Dirichlet, alpha 0.1).
- batch norm: its statistics are those of a client's batch instead of the ten batches of the step.
- drift: clients train four epochs, with an optimizer that starts anew, before their weights are averaged. Up to here
  every client makes one step per round, and the server has the optimizer's state.
- averaging: the last round has the best convex combination that a search finds for the accuracy of nearest neighbors on
  the training images, instead of FedAvg's weights.

Cases beside the chain: batches of one client each one after the other, FedAvg on an IID split of equal sizes, with one
epoch per round, and both ends with group norm. Repeat the command to continue; rows are in fedssl_bench/gap.jsonl.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import make_parser
from benchmarks.fedssl_bench.results import machine
from fedssl.arrays import Layers
from fedssl.atomic_files import append_text
from fedssl.config.load import compose
from fedssl.config.settings import Settings
from fedssl.datasets.base import load_federated
from fedssl.evaluation.features import Features, extract
from fedssl.evaluation.knn import knn_predict
from fedssl.evaluation.protocol import make_evaluation_input
from fedssl.losses import nt_xent
from fedssl.methods.base import build_method
from fedssl.methods.simclr import SimCLR
from fedssl.model_arrays import exchanged_layers, load_layers
from fedssl.partition import make_partition
from fedssl.plots.style import BLACK, BLUE, VERMILLION, new_figure, write_png
from fedssl.seeding import seed_generators, torch_generator
from fedssl.text_table import markdown
from fedssl.training import LocalTrainer, batches, train
from fedssl.views import Views
from fedssl.wire.device import code_fingerprint
from fedssl.wire.messages import ClientUpdate
from strategies.fedavg import fedavg

ROWS = Path(__file__).parent / "fedssl_bench" / "gap.jsonl"
SETTINGS = ("experiment=bench_cpu", "method.temperature=0.2", "threads=1", "device=cpu")
CPU = torch.device("cpu")
SKEWED = ("partition.alpha=0.1",)
CANDIDATES = 60  # convex combinations that the search tries


@dataclass(frozen=True)
class Case:
    """How the same epochs are trained: by clients, or by one model (``pooled``) on grouped batches."""

    overrides: tuple[str, ...] = SKEWED
    pooled: bool = True
    mixed: bool = False  # batches of all images instead of one client's
    grouped: bool = False  # mean gradient of as many batches as there are clients
    joint_norm: bool = False  # batch-norm statistics of all batches of a step


CASES = {
    "centralized": Case(mixed=True),
    "ten batches per step": Case(mixed=True, grouped=True),
    "one client per batch, joint batch norm": Case(grouped=True, joint_norm=True),
    "one client per batch, one local step": Case(grouped=True),
    "fedavg": Case(pooled=False),  # with SEARCHED
    "one client per batch, in turn": Case(),
    "fedavg, IID split": Case(("partition=iid",), pooled=False),
    "fedavg, one epoch per round": Case((*SKEWED, "local_epochs=1", "rounds=40"), pooled=False),
    "centralized, group norm": Case((*SKEWED, "encoder.norm=group"), mixed=True),
    "fedavg, group norm": Case((*SKEWED, "encoder.norm=group"), pooled=False),
}
SEARCHED = "fedavg, best combination"
CHAIN = {  # from case to case, by the factor
    "steps": "ten batches per step",
    "composition": "one client per batch, joint batch norm",
    "batch norm": "one client per batch, one local step",
    "drift": "fedavg",
    "averaging": SEARCHED,
}


class Training:
    """Images, clients and model of a seed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        data = load_federated(settings.data)
        assert data.labels is not None
        self.images, self.labels = data.images.place(CPU), data.labels
        self.parts = make_partition(settings.partition, data).client_indices
        method = build_method(settings.model)
        assert isinstance(method, SimCLR)
        self.method = method
        self.trainer = LocalTrainer.build(settings.training, method)
        self.generator = torch_generator(settings.seed, "gap")
        seed_generators(settings.seed, CPU)

    def pool(self, case: Case) -> None:
        """Train one model for all epochs, on batches of all images or of one client each."""
        self.method.train()
        for _ in range(self.settings.rounds * self.trainer.epochs):
            sources = [torch.arange(len(self.images))] if case.mixed else [torch.as_tensor(part) for part in self.parts]
            epoch = [each for rows in sources for each in self._batches(rows)]
            order = torch.randperm(len(epoch), generator=self.generator).tolist()
            size = len(self.parts) if case.grouped else 1
            for start in range(0, len(order), size):
                self._step([epoch[index] for index in order[start : start + size]], joint=case.joint_norm)

    def federate(self) -> list[ClientUpdate]:
        """Train by FedAvg, and return the updates of the last round."""
        layers, updates = exchanged_layers(self.method), list[ClientUpdate]()
        for _ in range(self.settings.rounds):
            updates = []
            for client, part in enumerate(self.parts):
                load_layers(self.method, layers)
                self.trainer.reset_optimizer(lr_factor=1.0)
                rows = torch.as_tensor(part)
                train(self.method, self.images, rows, training=self.trainer, generator=self.generator)
                own = exchanged_layers(self.method)
                updates.append(ClientUpdate(layers=own, partition_id=client, num_examples=len(part)))
            layers = fedavg(layers, updates)
        load_layers(self.method, layers)
        return updates

    def results(self) -> dict[str, float]:
        """Return the accuracies of the final protocol."""
        subject = make_evaluation_input(self.method.encoder.eval(), self.settings.data, device=CPU)
        assert subject is not None
        scores = self.settings.evaluation.final_protocol.instantiate()(subject, seed=self.settings.seed)
        return {name: score.value for name, score in scores.items()}

    def _batches(self, rows: Tensor) -> Iterator[Tensor]:
        return batches(rows, self.trainer.batch_size, generator=self.generator)

    def _views(self, group: Sequence[Tensor]) -> list[Views]:
        augment, shape = self.trainer.augment, self.images.shape[1:]
        sizes = [len(rows) for rows in group]
        params = augment.sample_params(sizes, image_shape=shape, device=CPU, generator=self.generator)
        read = self.images.prefetch(iter(group))
        layout = torch.channels_last
        return [augment.apply(batch, each, layout=layout) for batch, each in zip(read, params, strict=True)]

    def _step(self, group: Sequence[Tensor], *, joint: bool) -> None:
        """Make one step with the mean of the batches' losses, weighted by their images."""
        self.trainer.optimizer.zero_grad(set_to_none=True)
        views, total = self._views(group), sum(map(len, group))
        if joint:
            both = [torch.cat([each.images[side] for each in views]) for side in (0, 1)]
            z1, z2 = self.method.projector(self.method.encoder(torch.cat(both))).chunk(2)
            sizes = [len(rows) for rows in group]
            pairs = zip(z1.split(sizes), z2.split(sizes), strict=True)
            losses = [nt_xent(*pair, temperature=self.method.temperature) for pair in pairs]
            weighted = [loss * (size / total) for loss, size in zip(losses, sizes, strict=True)]
            torch.stack(weighted).sum().backward()
        else:
            for each, rows in zip(views, group, strict=True):
                (self.method.loss(self.method.inputs(each)) * (len(rows) / total)).backward()
        self.trainer.optimizer.step()

    def search(self, updates: Sequence[ClientUpdate]) -> None:
        """Load the best convex combination: of FedAvg's weights, random ones, and random changes of the best."""
        draws = np.random.default_rng(self.settings.seed)
        weights = np.array([len(part) for part in self.parts], dtype=float)
        best, best_score = updates[0].layers, -1.0
        for number in range(CANDIDATES):
            tried = weights
            if number >= CANDIDATES // 2:
                tried = weights * np.exp(0.5 * draws.standard_normal(len(weights)))
            elif number:
                tried = draws.dirichlet(np.ones(len(weights)))
            shares = np.maximum(1, np.round(1e6 * tried / tried.sum())).astype(int).tolist()
            weighted = [replace(each, num_examples=share) for each, share in zip(updates, shares, strict=True)]
            combined = fedavg(updates[0].layers, weighted)
            score = self._neighbors(combined)
            if score > best_score:
                best, best_score, weights = combined, score, tried
        load_layers(self.method, best)

    def _neighbors(self, layers: Layers) -> float:
        """Return the accuracy of nearest neighbors from the even to the odd training images."""
        load_layers(self.method, layers)
        data = self.settings.data
        h = extract(self.method.encoder.eval(), self.images, mean=data.mean, std=data.std, device=CPU)
        labels = self.labels
        halves = Features(h[::2], labels[::2], h[1::2], labels[1::2], num_classes=int(labels.max()) + 1)
        return float((knn_predict(halves, k=20, temperature=0.1) == labels[1::2]).float().mean())


def run(name: str, seed: int, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Train a case and return its results, and those of `SEARCHED` for FedAvg."""
    case = CASES[name]
    training = Training(compose([*SETTINGS, *overrides, *case.overrides, f"seed={seed}"]))
    if case.pooled:
        training.pool(case)
        return {name: training.results()}
    updates = training.federate()
    found = {name: training.results()}
    if name == "fedavg":
        training.search(updates)
        found[SEARCHED] = training.results()
    return found


@dataclass(frozen=True)
class Row:
    """The results of a case and seed, in [0, 1]."""

    data: str
    case: str
    seed: int
    results: dict[str, float]
    code: str  # digest of the source files
    date: str
    machine: str


def read(data: str) -> dict[str, dict[int, Row]]:
    """Return the stored rows by case and seed."""
    found: dict[str, dict[int, Row]] = defaultdict(dict)
    for line in ROWS.read_text().splitlines() if ROWS.exists() else []:
        row = Row(**json.loads(line))
        if row.data == data:
            found[row.case][row.seed] = row
    return found


def table(rows: dict[str, dict[int, Row]]) -> str:
    """Return accuracies, and paired differences from centralized training, as mean and standard deviation."""
    first = next(iter(rows["centralized"].values()))
    names = list(first.results)
    lines = [["case", "seeds", *(f"{name}, %" for name in names), *(f"{name}, difference" for name in names)]]
    for case in (case for case in (*CASES, SEARCHED) if case in rows):
        of_case = rows[case]
        cells = [_text([100 * row.results[name] for row in of_case.values()]) for name in names]
        cells += ["" if case == "centralized" else _text(gaps(rows, "centralized", case, name), "+") for name in names]
        lines.append([case, str(len(of_case)), *cells])
    codes = {row.code for of_case in rows.values() for row in of_case.values()}
    return markdown(lines, left=1) + (f"\nrows of several versions of the code: {', '.join(codes)}" * (len(codes) > 1))


def gaps(rows: dict[str, dict[int, Row]], one: str, other: str, name: str) -> list[float]:
    """Return the differences of a result in points, by seed."""
    seeds = sorted(rows[one].keys() & rows[other].keys())
    return [100 * (rows[other][seed].results[name] - rows[one][seed].results[name]) for seed in seeds]


def _text(values: Sequence[float], sign: str = "") -> str:
    return f"{mean(values):{sign}.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def draw(rows: dict[str, dict[int, Row]], name: str, file: Path) -> None:
    """Draw the waterfall of a result: bars of mean differences with the standard deviation over seeds."""
    levels = {case: 100 * mean(row.results[name] for row in rows[case].values()) for case in ("centralized", "fedavg")}
    bars: list[tuple[str, float, float, str, str]] = []  # label, bottom, height, color, text
    before, level = "centralized", levels["centralized"]
    for factor, case in CHAIN.items():
        change = gaps(rows, before, case, name)
        color = BLUE if mean(change) > 0 else VERMILLION
        bars.append((factor, level, mean(change), color, _text(change, "+")))
        before, level = case, level + mean(change)
    for place, case in ((0, "centralized"), (len(bars), "fedavg")):
        bars.insert(place, (case, 0.0, levels[case], BLACK, f"{levels[case]:.1f}"))
    figure = new_figure(height=3.6, width=8)
    axis = figure.subplots()
    for number, (_, bottom, height, color, text) in enumerate(bars):
        axis.bar(number, height, bottom=bottom, color=color, width=0.6)
        axis.text(number, max(bottom, bottom + height), text, ha="center", va="bottom", fontsize=8)
    tops = [bottom + height for _, bottom, height, _, _ in bars]
    axis.set_xticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8)
    axis.set_ylim(min(tops) - 3, max(tops) + 3)
    axis.set_ylabel(f"{name} accuracy in %")
    write_png(figure, file, dpi=110)


def check_names(data: str, overrides: Sequence[str]) -> None:
    """Exit if rows of some images would have the name of others."""
    if (data == "digits") == bool(overrides):
        found = f"the overrides {' '.join(overrides)}" if overrides else "no overrides, which are the digits"
        sys.exit(f"gap: --data {data} with {found}; give --data NAME and overrides, or neither, for the digits")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("overrides", nargs="*", help="of the images, e.g. dataset=cifar10 dataset.path=... (digits)")
    parser.add_argument("--data", default="digits", help="name of the images in the rows")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--figure", type=Path, help="PNG of the waterfall")
    parser.add_argument("--result", default="linear", help="the result in the figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_names(options.data, options.overrides)
    overrides = options.overrides or ["dataset=digits"]
    for seed in options.seeds:
        for case in options.cases:
            if seed in read(options.data)[case]:
                continue
            for name, results in run(case, seed, overrides).items():
                done = Row(options.data, name, seed, results, code_fingerprint(), date.today().isoformat(), machine())
                append_text(ROWS, json.dumps(asdict(done)) + "\n")
                print(
                    f"seed {seed}, {name}:", *(f"{key} {100 * value:.1f}" for key, value in results.items()), flush=True
                )
    rows = read(options.data)
    needed = ("centralized", *CHAIN.values()) if options.figure else ("centralized",)
    if missing := [case for case in needed if not rows[case]]:
        sys.exit(f"gap: {options.data} has no rows of {', '.join(missing)}; repeat the command with all --cases")
    if options.result not in (known := next(iter(rows["centralized"].values())).results):
        sys.exit(f"gap: --result {options.result!r} is not in the rows; choose from {', '.join(known)}")
    print(table(rows))
    if options.figure:
        draw(rows, options.result, options.figure)


if __name__ == "__main__":
    main()
