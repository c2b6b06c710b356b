"""What FedSSL-Bench runs: suites of rows, each with some seeds, on divisions that files list."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARTITIONS = Path(__file__).parent / "partitions"

RULES = (
    *("fedavg", "loss", "l_dawa", "m_dawa", "fedu", "l_dawa_fedu", "fedema", "eua", "euc", "fedprox", "fedbn"),
    *("per_ssl", "featarc", "clustered", "gossip", "median", "trimmed_mean", "krum"),
)
METHODS = {  # what a method needs beyond the settings of all (docs/learning.md tells why)
    "simclr": ("method.temperature=0.2",),
    "byol": ("method.projector.last_norm=true",),
    "simsiam": ("method.projector.layers=1",),
    "moco_v3": (),
    "barlow_twins": (),
}
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
        Whether several clients hold the pictures, as the suite's files divide them.
    """

    rule: str
    method: str
    words: tuple[str, ...]
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
    pictures, clients : int
        What the files in `PARTITIONS` divide.
    alpha : float
        Of the Dirichlet distribution from which the divisions were drawn.
    """

    name: str
    words: tuple[str, ...]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    pictures: int
    clients: int
    alpha: float

    def division(self, seed: int) -> Path:
        """The file that lists who holds what in the runs of this seed."""
        return PARTITIONS / f"cifar10-{self.pictures}-{self.clients}clients-alpha{self.alpha:g}-{seed}.csv"

    def arguments(self, row: Row, seed: int, data: str) -> list[str]:
        """Words of the command line for one run, on pictures that ``data`` names (``dataset.path``)."""
        divided = [f"partition=file partition.file={self.division(seed)}"] if row.shared else []
        return [*self.words, f"dataset.path={data}", *" ".join(divided).split(), *row.words, f"seed={seed}"]


def rows(rules: Sequence[str], both: Sequence[str]) -> tuple[Row, ...]:
    """All rows: ``rules`` with SimCLR, then every method with the rules ``both``; bounds for every method."""
    own = METHODS["simclr"]
    made = [Row(rule, "simclr", (f"strategy={rule}", *own), 0, 2.0 if rule in _DOUBLE else 1.0) for rule in rules]
    idle = ("strategy=fedavg", *own, "rounds=1", "local_epochs=2", "optimizer.lr=0")
    made.append(Row(IDLE, "simclr", idle, 0, 0.1))
    for method, words in METHODS.items():
        chosen = (f"method={method}", *words)
        cost, stage = _COST.get(method, 1.0), int(method != "simclr")
        if stage:
            made += [Row(rule, method, (f"strategy={rule}", *chosen), stage, cost) for rule in both]
        for name, bound in BOUNDS.items():
            made.append(Row(name, method, (*bound, *chosen), stage, cost, shared=name != ALL))
    return tuple(made)


SUITES = {
    "cpu": Suite(
        name="cpu",
        words=("experiment=bench_cpu", "threads=1", "engine=local"),
        rows=rows(RULES, ("fedavg", "l_dawa")),
        seeds=(0, 1, 2),
        pictures=5000,
        clients=10,
        alpha=0.1,
    ),
}
