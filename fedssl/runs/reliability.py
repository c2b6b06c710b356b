"""How well results that need no labels predict linear accuracy, over finished runs: Spearman's rank correlation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import norm, spearmanr

from fedssl.runs.catalog import goodness
from fedssl.runs.groups import MAIN, compared_settings, group_runs, newest_of_each_seed
from fedssl.runs.run import Run

TARGET = "linear"  # the result that is predicted
MIN_RUNS = 5  # below, the interval would be nearly all numbers from -1 to 1


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation, and its 95% interval."""

    rho: float
    low: float
    high: float
    num_runs: int

    @property
    def text(self) -> str:
        return f"{self.rho:.2f} (95% interval {self.low:.2f} to {self.high:.2f}) over {self.num_runs} runs"


def correlation(values: Sequence[float], targets: Sequence[float]) -> Correlation | None:
    """Return the correlation of two results of the same runs; None for fewer than `MIN_RUNS`, or if one is constant.

    The interval is that of Bonett and Wright (Psychometrika 2000): Fisher's z has the variance (1 + rho^2 / 2) / (n -
    3). It supposes independent runs.
    """
    n = len(values)
    if n < MIN_RUNS or min(len({*values}), len({*targets})) < 2:
        return None
    rho = float(spearmanr(values, targets).statistic)
    z = math.atanh(min(max(rho, -1 + 1e-9), 1 - 1e-9))
    half = norm.ppf(0.975) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return Correlation(rho, math.tanh(z - half), math.tanh(z + half), n)


def reliability(runs: Sequence[Run], metric: str) -> str:
    """Return a sentence on how well a result predicts linear accuracy over the finished runs that have both.

    A repeated run counts once. Runs of several data sets or encoders are not compared: their spectra differ anyway.
    """
    finished = [run for run in runs if run.finished]
    settings_of = compared_settings(finished, always=MAIN)
    groups = group_runs(finished, lambda run: settings_of(run) if run.settings else {"folder": str(run.folder)})
    runs = [run for group in groups for run in newest_of_each_seed(group.runs)]
    for key in ("dataset", "encoder"):
        values = {run.value(key) for run in runs if run.score(metric) and run.score(TARGET)}
        if len(values) > 1:
            return f"how reliable {metric} is here is unknown: runs with {key}={','.join(sorted(values))}; select one"
    pairs = [(run.score(metric), run.score(TARGET)) for run in runs]
    both = [(goodness(metric, one), other.value) for one, other in pairs if one is not None and other is not None]
    found = correlation([one for one, _ in both], [other for _, other in both])
    if found is None:
        return (
            f"how reliable {metric} is here is unknown: {len(both)} of these runs have {metric} and {TARGET} accuracy, "
            f"and {MIN_RUNS} different ones are needed; docs/evaluate.md has a study"
        )
    doubt = ", so that its ranking may be chance" if found.low <= 0 else ""
    return f"rank correlation of {metric} with {TARGET} accuracy: {found.text}{doubt}"
