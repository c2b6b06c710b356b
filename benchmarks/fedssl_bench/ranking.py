"""Ranks of rows, and significance of their differences, paired over seeds.

Runs of one seed share the partition, the initial weights and the labeled images, so rows are compared within seeds:
Friedman's test for all rows, and paired t-tests against a reference with Holm's correction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy import stats

Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """Difference of a row from the reference over seeds."""

    mean: float
    spread: float  # standard deviation with divisor n - 1
    p: float  # of the two-sided paired t-test, after Holm's correction


def ranks(values: Values) -> dict[str, float]:
    """Return the mean rank of each row over its values, one per seed; 1 is the highest, and ties share their ranks."""
    table = np.array(list(values.values()))  # (rows, seeds)
    within = stats.rankdata(-table, axis=0)
    return dict(zip(values, within.mean(axis=1).tolist(), strict=True))


def friedman(values: Values) -> float | None:
    """Return the p-value of Friedman's test; None for fewer than three rows or two seeds, or if all rows are equal."""
    if len(values) < 3 or len(next(iter(values.values()))) < 2 or len(set(map(tuple, values.values()))) == 1:
        return None
    return float(stats.friedmanchisquare(*values.values()).pvalue)


def differences(values: Values, *, reference: str) -> dict[str, Difference]:
    """Return the difference of every other row from ``reference``; empty for fewer than two seeds."""
    base = values[reference]
    if len(base) < 2:
        return {}
    paired = {
        name: [value - other for value, other in zip(row, base, strict=True)]
        for name, row in values.items()
        if name != reference
    }
    p = holm({name: _p(each) for name, each in paired.items()})
    return {name: Difference(mean(each), stdev(each), p[name]) for name, each in paired.items()}


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Apply Holm's correction: multiply the k-th smallest of m by m - k + 1, keep the order, and clip at 1."""
    corrected, largest = {}, 0.0
    for index, name in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - index) * p[name]))
        corrected[name] = largest
    return corrected


def _p(each: Sequence[float]) -> float:
    if stdev(each) == 0:  # all differences are equal
        return 1.0 if each[0] == 0 else 0.0
    return float(stats.ttest_1samp(each, 0.0).pvalue)
