"""Differences of rows from a reference, paired over seeds.

Runs of one seed share the partition, the initial weights and the labeled images, so rows are compared within seeds: a
paired t-test against the reference with Holm's correction, Student's interval of the mean difference, Hedges' g of the
differences, and the power of the test.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

LEVEL = 0.95  # of intervals; tests have the significance level 1 - LEVEL
POWER = 0.8

Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """Difference of a row from the reference over seeds, in the unit of the values."""

    mean: float
    spread: float  # standard deviation with divisor n - 1
    low: float  # end points of the interval of `LEVEL`, of this row alone
    high: float
    p: float  # of the two-sided paired t-test, after Holm's correction
    effect: float  # Hedges' g: mean / spread, corrected for the bias of few seeds; 0 for two seeds

    @property
    def varies(self) -> bool:
        """Return whether the differences have a spread above that of rounding, without which they have no interval."""
        return _is_above_rounding(self.spread, self.mean)


def compare(paired: Values) -> dict[str, Difference]:
    """Compare differences, at least two per row, with 0. Holm's correction is over all rows."""
    corrected = holm({name: p_value(row) for name, row in paired.items()})
    return {
        name: Difference(mean(row), stdev(row), *interval(row), corrected[name], hedges_g(row))
        for name, row in paired.items()
    }


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Apply Holm's correction: multiply the k-th smallest of m by m - k + 1, keep the order, and clip at 1."""
    corrected, largest = {}, 0.0
    for index, name in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - index) * p[name]))
        corrected[name] = largest
    return corrected


def p_value(row: Sequence[float]) -> float:
    """Return the p-value of the two-sided t-test of differences against 0; of the sign test if all are equal."""
    from scipy.stats import ttest_1samp

    if not _varies(row):  # two seeds would be certain
        return 2.0 ** (1 - len(row)) if mean(row) else 1.0
    return float(ttest_1samp(row, 0.0).pvalue)


def _varies(row: Sequence[float]) -> bool:
    return _is_above_rounding(stdev(row), mean(row))


def _is_above_rounding(spread: float, center: float) -> bool:
    return spread > 1e-9 * abs(center)


def interval(row: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean: mean -+ t(n - 1) spread / sqrt(n)."""
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(row) - 1)) * stdev(row) / math.sqrt(len(row))
    return mean(row) - half, mean(row) + half


def hedges_g(row: Sequence[float]) -> float:
    """Return the standardized mean difference, whose expectation is the true one (Hedges 1981, exact factor).

    The factor is 0 for two values, and a row without spread has an infinite effect, or 0.
    """
    if not _varies(row):
        return math.copysign(math.inf, mean(row)) if mean(row) else 0.0
    m = len(row) - 1  # degrees of freedom
    factor = math.exp(math.lgamma(m / 2) - math.lgamma((m - 1) / 2)) / math.sqrt(m / 2) if m > 1 else 0.0
    return factor * mean(row) / stdev(row)


def power(difference: float, spread: float, *, seeds: int) -> float:
    """Return the probability that the two-sided paired t-test detects a true positive difference, with its sign."""
    from scipy.stats import nct, t

    limit = t.ppf((1 + LEVEL) / 2, seeds - 1)
    return float(nct.sf(limit, seeds - 1, difference / spread * math.sqrt(seeds)))


def seeds_for(spread: float, *, difference: float = 1.0) -> int:
    """Return the number of seeds, at least 2, with which ``difference`` is detected with probability `POWER`."""
    from scipy.stats import norm

    # The number for a known spread, which is smaller than that of the t-test by two or three.
    start = float((norm.ppf((1 + LEVEL) / 2) + norm.ppf(POWER)) ** 2 * (spread / difference) ** 2)
    counts = itertools.count(max(2, math.floor(start)))
    certain = spread < difference / 1000  # then two suffice, and SciPy's noncentral t may not be a number
    return next(n for n in counts if certain or power(difference, spread, seeds=n) >= POWER)


def detectable(spread: float, *, seeds: int) -> float:
    """Return the smallest difference that ``seeds`` detect with probability `POWER`."""
    from scipy.optimize import brentq

    if spread == 0:
        return 0.0
    return spread * float(brentq(lambda shift: power(shift, 1.0, seeds=seeds) - POWER, 1e-3, 100.0))
