"""The suites of FedSSL-Bench: rows, seeds, and recorded partitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedssl.config.overrides import quote_value

RULES = (
    *("fedavg", "loss_weighted", "l_dawa", "m_dawa", "fedu", "l_dawa_fedu", "fedema", "eua", "euc", "fedprox", "fedbn"),
    *("per_ssl", "featarc", "clustered", "gossip", "median", "trimmed_mean", "krum"),
)
VARIANTS = {  # rows whose name is not a choice of strategy
    "l_dawa by examples": ("strategy=l_dawa", "strategy.weighting=examples"),
    "l_dawa by loss": ("strategy=l_dawa", "strategy.weighting=loss"),
}
TABLE_1 = ("fedavg", "m_dawa", "l_dawa")  # of L-DAWA
TABLE_2 = ("loss_weighted", "fedu", "euc", "l_dawa_fedu", *VARIANTS)
SINGLE, ALL, UNTRAINED = "single client", "centralized", "untrained, batch norm"
BOUNDS = {
    SINGLE: ("strategy=local_only",),
    ALL: ("strategy=fedavg", "partition=iid", "num_clients=1"),
}
_COST = {"byol": 1.4, "moco_v3": 1.4, "barlow_twins": 1.1}  # training time relative to SimCLR
_DOUBLE = ("per_ssl",)  # trains two models


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    rule: str  # the strategy, or the name of a baseline
    method: str
    overrides: tuple[str, ...]  # added to those of the suite
    stage: int  # rows of a lower stage run first
    cost: float  # time of a run relative to FedAvg with SimCLR
    partitioned: bool = True  # whether the run uses the recorded partition

    @property
    def folder(self) -> str:
        """Return the name of the row's folder."""
        return f"{self.method}-{self.rule}".replace(",", "").replace(" ", "_")


@dataclass(frozen=True)
class Suite:
    """A protocol and its rows. Rows are compared within seeds."""

    name: str
    overrides: tuple[str, ...]  # of all rows
    rows: tuple[Row, ...]
    num_images: int
    seeds: tuple[int, ...] = (0, 1, 2)
    clients: int = 10
    alpha: float = 0.1  # Dirichlet concentration of the partitions
    jobs: int | None = None  # number of concurrent runs; None: one per core
    tuned: bool = False  # whether the settings of each row were selected on other seeds
    recorded: bool = (
        True  # whether the partitions of CIFAR-10 are recorded; False: the overrides select data and partition
    )

    def partition(self, seed: int) -> str:
        """Return the name of the partition of a seed."""
        return f"cifar10-{self.num_images}-{self.clients}clients-alpha{self.alpha:g}-{seed}"

    def data(self, path: str) -> list[str]:
        """Return the overrides that select the images. ``path`` is ``dataset.path``."""
        return [f"dataset.path={quote_value(path)}", f"dataset.limit={self.num_images}"] if self.recorded else []

    def arguments(self, row: Row, seed: int, data: str, partitions: Path) -> list[str]:
        """Return the overrides of a run. The folder ``partitions`` contains the CSV files."""
        file = quote_value(str(partitions / f"{self.partition(seed)}.csv"))
        partition = ["partition=file", f"partition.file={file}"] if row.partitioned and self.recorded else []
        return [*self.overrides, *self.data(data), *partition, *row.overrides, f"seed={seed}"]


def rows(stages: Sequence[Sequence[str]], methods: Mapping[str, Sequence[str]], both: Sequence[str]) -> tuple[Row, ...]:
    """Return rules with SimCLR by stage, every method (with its overrides) with the rules ``both``, and baselines."""
    simclr = tuple(methods["simclr"])
    result = [
        Row(rule, "simclr", (*_overrides(rule), *simclr), stage, 2.0 if rule in _DOUBLE else 1.0)
        for stage, rules in enumerate(stages)
        for rule in rules
    ]
    last = len(stages) - 1
    untrained = (*_overrides("fedavg"), *simclr, "rounds=1", "local_epochs=2", "optimizer.lr=0")
    result.append(Row(UNTRAINED, "simclr", untrained, last, 0.1))
    for method, overrides in methods.items():
        cost, stage = _COST.get(method, 1.0), last + int(method != "simclr")
        if method != "simclr":
            result += [Row(rule, method, (*_overrides(rule), *overrides), stage, cost) for rule in both]
        for name, bound in BOUNDS.items():
            result.append(Row(name, method, (*bound, *overrides), stage, cost, partitioned=name != ALL))
    return tuple(result)


def _overrides(rule: str) -> tuple[str, ...]:
    return VARIANTS.get(rule, (f"strategy={rule}",))


METHODS = {  # with the settings that a method needs in addition, see docs/learning.md
    "simclr": [],
    "byol": ["method=byol", "method.projector.last_batch_norm=true"],
    "simsiam": ["method=simsiam", "method.projector.num_layers=1"],
    "moco_v3": ["method=moco_v3"],
    "barlow_twins": ["method=barlow_twins"],
}
_BYOL = ("method=byol", "method.projector.last_batch_norm=true")
_LAYER_WISE = {"layer-wise": ("strategy=fedavg", "schedule=layer_wise")}
DIGITS = tuple(  # clients in conflict: FedU's partition, and every mechanism of benchmarks/mechanisms.py
    Row(name, method, (*overrides, *options), stage, 1.0)
    for stage, (method, options, names, others) in enumerate(
        (
            ("byol", _BYOL, ("fedavg", "fedu"), {SINGLE: BOUNDS[SINGLE]}),
            ("simclr", (), ("fedavg", "fedu", "l_dawa", "eua", "featarc"), _LAYER_WISE),
        )
    )
    for name, overrides in ({name: _overrides(name) for name in names} | others).items()
)
_OTHERS = [rule for rule in RULES if rule not in (*TABLE_1, *TABLE_2)]

SUITES = {
    "cpu": Suite(
        name="cpu",
        overrides=("experiment=bench_cpu", "threads=1", "engine=local"),
        rows=rows([RULES], METHODS | {"simclr": ["method.temperature=0.2"]}, ["fedavg", "l_dawa"]),
        num_images=5000,
    ),
    "digits": Suite(
        name="digits",
        overrides=("experiment=digits_conflict", "encoder.width=16", "rounds=6", "threads=1", "engine=local"),
        rows=DIGITS,
        num_images=1438,
        seeds=(0, 1, 2, 3, 4),
        clients=5,
        jobs=1,
        recorded=False,
    ),
    "gpu": Suite(
        name="gpu",
        overrides=("experiment=bench_gpu", "device=cuda", "engine=local"),
        rows=rows(
            [TABLE_1, TABLE_2, _OTHERS],
            METHODS | {"barlow_twins": ["method=l_dawa/barlow_twins"]},
            ["fedavg", "l_dawa"],
        ),
        num_images=50000,
        jobs=1,
    ),
}
