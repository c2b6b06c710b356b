"""The studies of `benchmarks/study.py`: parts that depend on each other, and rows with learning rates of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from fedssl.config.overrides import quote_value

RATES = (0.003, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3)
TUNING_SEEDS = (100,)
Row = tuple[str, ...]  # overrides

L_DAWA: dict[str, Row] = {
    "l_dawa": ("strategy=l_dawa",),
    "l_dawa normalize": ("strategy=l_dawa", "strategy.normalize=true"),
}
STRATEGIES: dict[str, Row] = {
    "fedavg": ("strategy=fedavg",),
    **L_DAWA,
    "fedu": ("strategy=fedu",),
    "fedema": ("strategy=fedema",),
    "l_dawa_fedu": ("strategy=l_dawa_fedu",),
    "eua + fur": ("strategy=eua", "regularizer=fur"),
    "featarc": ("strategy=featarc",),
    "scaffold": ("strategy=scaffold",),
    "ssd": ("strategy=fedavg", "method=ssd"),
    "layer-wise, calibration": (
        *("strategy=fedavg", "schedule=layer_wise", "regularizer=alignment", "calibration=auxiliary"),
    ),
}
VARIANTS: dict[str, Row] = {  # with the learning rate of "l_dawa"
    "l_dawa by examples": ("strategy=l_dawa", "strategy.weighting=examples"),
    "l_dawa by loss": ("strategy=l_dawa", "strategy.weighting=loss"),
    "l_dawa warm-up": ("strategy=l_dawa", "strategy.warmup_rounds=3"),
    "l_dawa scaled buffers": ("strategy=l_dawa", "strategy.buffers=scale"),
}
FIVE = {name: STRATEGIES[name] for name in ("fedavg", "l_dawa", "l_dawa normalize", "fedu", "eua + fur")}
THREE = {name: STRATEGIES[name] for name in ("fedavg", "l_dawa", "l_dawa normalize")}
TWO = {name: STRATEGIES[name] for name in ("fedavg", "l_dawa")}


@dataclass(frozen=True)
class Part:
    """Rows that share settings and seeds. Without ``rates``, a row has the best one of the first part."""

    rows: Mapping[str, Row]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class StudyJob:
    """A run of a study."""

    study: str
    part: str
    row: str
    rate: float
    seed: int
    overrides: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str, float, int]:
        return self.study, self.part, self.row, self.rate, self.seed


@dataclass(frozen=True)
class Study:
    """Parts in the order of running. ``selected_by`` is the final result that selects learning rates."""

    overrides: tuple[str, ...]
    parts: Mapping[str, Part]
    selected_by: str
    needs_data: bool = False

    def jobs(self, name: str, part_name: str, best: Mapping[str, float], data: str | None) -> list[StudyJob]:
        """Return the runs of a part by seed; rows without a selected learning rate are missing."""
        part = self.parts[part_name]
        images = (f"dataset.path={quote_value(data)}",) if self.needs_data and data else ()
        shared = (*self.overrides, *images, *part.overrides)
        jobs = []
        for seed, (row, overrides) in product(part.seeds, part.rows.items()):
            tuned = best.get(row, best.get("l_dawa") if row in VARIANTS else None)
            for rate in part.rates or ([tuned] if tuned is not None else []):
                own = (f"optimizer.lr={rate:g}", f"seed={seed}")
                jobs.append(StudyJob(name, part_name, row, rate, seed, (*shared, *overrides, *own)))
        return jobs


_DIGITS = ("dataset=digits", "dataset.limit=null", "dataset.test_limit=null", "dataset.size=8")
_PARTS = {
    "tuning": Part(STRATEGIES, TUNING_SEEDS, rates=RATES),
    "alpha 0.1": Part(STRATEGIES, (0, 1, 2, 3, 4)),
    "variants": Part(VARIANTS, (0, 1, 2)),
    "two classes": Part(STRATEGIES, (0, 1, 2), ("partition=pathological",)),
    "ten epochs": Part(FIVE, (0, 1, 2), ("local_epochs=10", "rounds=20", "evaluate_every=2", "checkpoint_every=2")),
    "5 clients": Part(THREE, (0, 1, 2), ("num_clients=5",)),
    "100 clients": Part(STRATEGIES, (0, 1, 2), ("num_clients=100", "clients_per_round=10", "partition.min_size=0")),
    "2,000 epochs": Part(TWO, (0, 1), ("local_epochs=10",)),
}

STUDIES = {
    "digits": Study(("experiment=many_rounds", "engine=local", *_DIGITS), _PARTS, "linear_5_per_class"),
    "cifar10": Study(("experiment=many_rounds", "engine=local"), _PARTS, "linear", needs_data=True),
}
