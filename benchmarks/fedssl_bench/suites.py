"""What FedSSL-Bench runs: suites of rows, each with some seeds, on divisions that files list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedssl.config.overrides import quote_value

PARTITIONS = Path(__file__).parent / "partitions"

RULES = (
    *("fedavg", "loss_weighted", "l_dawa", "m_dawa", "fedu", "l_dawa_fedu", "fedema", "eua", "euc", "fedprox", "fedbn"),
    *("per_ssl", "featarc", "clustered", "gossip", "median", "trimmed_mean", "krum"),
)
VARIANTS = {  # rows whose name is no choice of strategy
    "l_dawa by examples": ("strategy=l_dawa", "strategy.weighting=examples"),
    "l_dawa by loss": ("strategy=l_dawa", "strategy.weighting=loss"),
}
TABLE_1 = ("fedavg", "m_dawa", "l_dawa")  # of L-DAWA
TABLE_2 = ("loss_weighted", "fedu", "euc", "l_dawa_fedu", *VARIANTS)
SINGLE, ALL, IDLE = "single client", "centralised", "untrained, batch norm"
BOUNDS = {
    SINGLE: ("strategy=local_only",),
    ALL: ("strategy=fedavg", "partition=iid", "num_clients=1"),
}
_COST = {"byol": 1.4, "moco_v3": 1.4, "barlow_twins": 1.1}  # training, beside SimCLR's
_DOUBLE = ("per_ssl",)  # trains two models


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes
    ----------
    rule : str
        The strategy, or the name of a bound.
    method : str
    words : tuple of str
        Of the command line, behind the suite's.
    stage : int
        Rows of a lower stage run first.
    cost : float
        Time of a run, beside FedAvg with SimCLR.
    shared : bool
        Whether several clients hold the images, as the suite's files divide them.
    """

    rule: str
    method: str
    overrides: tuple[str, ...]
    stage: int
    cost: float
    shared: bool = True

    @property
    def place(self) -> str:
        """A name for folders."""
        return f"{self.method}-{self.rule}".replace(",", "").replace(" ", "_")


@dataclass(frozen=True)
class Suite:
    """A protocol and its rows.

    Attributes
    ----------
    name : str
    words : tuple of str
        Of the command line, for all rows.
    rows : tuple of Row
    seeds : tuple of int
        A row's runs are compared with another row's of the same seed.
    num_images, clients : int
        What the files in `PARTITIONS` divide.
    alpha : float
        Of the Dirichlet distribution from which the divisions were drawn.
    beside : int or None
        How many runs at a time; None: as many as there are cores.
    """

    name: str
    overrides: tuple[str, ...]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    num_images: int
    clients: int
    alpha: float
    beside: int | None = None

    def division(self, seed: int) -> Path:
        """The file that lists who holds what in the runs of this seed."""
        return PARTITIONS / f"cifar10-{self.num_images}-{self.clients}clients-alpha{self.alpha:g}-{seed}.csv"

    def data(self, path: str) -> list[str]:
        """Words of the command line for the images."""
        return [f"dataset.path={quote_value(path)}", f"dataset.limit={self.num_images}"]

    def arguments(self, row: Row, seed: int, data: str) -> list[str]:
        """Words of the command line for one run, on images that ``data`` names (``dataset.path``)."""
        divided = ["partition=file", f"partition.file={quote_value(str(self.division(seed)))}"] if row.shared else []
        return [*self.overrides, *self.data(data), *divided, *row.overrides, f"seed={seed}"]


def rows(stages: Sequence[Sequence[str]], methods: Mapping[str, Sequence[str]], both: Sequence[str]) -> tuple[Row, ...]:
    """All rows: rules with SimCLR, stage by stage, then every method with the rules ``both``, and the bounds.

    ``methods`` has the words of each.
    """
    own = tuple(methods["simclr"])
    made = [
        Row(rule, "simclr", (*_words(rule), *own), stage, 2.0 if rule in _DOUBLE else 1.0)
        for stage, rules in enumerate(stages)
        for rule in rules
    ]
    last = len(stages) - 1
    idle = (*_words("fedavg"), *own, "rounds=1", "local_epochs=2", "optimizer.lr=0")
    made.append(Row(IDLE, "simclr", idle, last, 0.1))
    for method, overrides in methods.items():
        cost, stage = _COST.get(method, 1.0), last + int(method != "simclr")
        if method != "simclr":
            made += [Row(rule, method, (*_words(rule), *overrides), stage, cost) for rule in both]
        for name, bound in BOUNDS.items():
            made.append(Row(name, method, (*bound, *overrides), stage, cost, shared=name != ALL))
    return tuple(made)


def _words(rule: str) -> tuple[str, ...]:
    return VARIANTS.get(rule, (f"strategy={rule}",))


# What a method needs beyond the settings of all; docs/learning.md tells why.
_BYOL, _SIMSIAM = (
    ("method=byol", "method.projector.last_batch_norm=true"),
    ("method=simsiam", "method.projector.num_layers=1"),
)

SUITES = {
    "cpu": Suite(
        name="cpu",
        overrides=("experiment=bench_cpu", "threads=1", "engine=local"),
        rows=rows(
            [RULES],
            {
                "simclr": ["method.temperature=0.2"],
                "byol": _BYOL,
                "simsiam": _SIMSIAM,
                "moco_v3": ["method=moco_v3"],
                "barlow_twins": ["method=barlow_twins"],
            },
            ["fedavg", "l_dawa"],
        ),
        seeds=(0, 1, 2),
        num_images=5000,
        clients=10,
        alpha=0.1,
    ),
    "gpu": Suite(
        name="gpu",
        overrides=("experiment=bench_gpu", "device=cuda", "engine=local"),
        rows=rows(
            [TABLE_1, TABLE_2, [rule for rule in RULES if rule not in (*TABLE_1, *TABLE_2)]],
            {
                "simclr": [],
                "byol": _BYOL,
                "simsiam": _SIMSIAM,
                "moco_v3": ["method=moco_v3"],
                "barlow_twins": ["method=l_dawa/barlow_twins"],
            },
            ["fedavg", "l_dawa"],
        ),
        seeds=(0, 1, 2),
        num_images=50000,
        clients=10,
        alpha=0.1,
        beside=1,
    ),
}
