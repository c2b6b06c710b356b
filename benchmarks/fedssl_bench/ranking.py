"""Which rows differ by more than chance: ranks and differences, paired over seeds.

Runs of one seed share the division, the initial weights and the labelled images, so that rows are compared within
seeds. Friedman's test asks whether rows differ at all; a t-test of the differences from one row, whether one differs
from it, with Holm's correction for as many rows as are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy import stats

Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """A row's difference from another one, over seeds.

    Attributes
    ----------
    mean, spread : float
        Mean and standard deviation (divisor n - 1) of the differences.
    p : float
        Of the two-sided paired t-test, after Holm's correction.
    """

    mean: float
    spread: float
    p: float


def ranks(values: Values) -> dict[str, float]:
    """Mean rank over seeds, 1 for the best; equal numbers share their ranks.

    Parameters
    ----------
    values : mapping
        Row to one number per seed, in the same order of seeds, larger being better.
    """
    table = np.array(list(values.values()))  # (rows, seeds)
    within = stats.rankdata(-table, axis=0)
    return dict(zip(values, within.mean(axis=1).tolist(), strict=True))


def friedman(values: Values) -> float | None:
    """The chance of ranks that differ as much where rows do not differ.

    None below three rows or two seeds, and where all rows share their ranks with every seed.
    """
    if len(values) < 3 or len(next(iter(values.values()))) < 2 or len(set(map(tuple, values.values()))) == 1:
        return None
    return float(stats.friedmanchisquare(*values.values()).pvalue)


def differences(values: Values, *, reference: str) -> dict[str, Difference]:
    """Every other row beside ``reference``; none below two seeds."""
    base = values[reference]
    if len(base) < 2:
        return {}
    found = {
        name: [one - other for one, other in zip(row, base, strict=True)]
        for name, row in values.items()
        if name != reference
    }
    p = holm({name: _p(each) for name, each in found.items()})
    return {name: Difference(mean(each), stdev(each), p[name]) for name, each in found.items()}


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the k-th smallest of m times m - k + 1, never below the one before, at most 1."""
    corrected, largest = {}, 0.0
    for place, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - place) * p[name]))
        corrected[name] = largest
    return corrected


def _p(each: Sequence[float]) -> float:
    if stdev(each) == 0:  # all differences alike: none at all, or no chance
        return 1.0 if each[0] == 0 else 0.0
    return float(stats.ttest_1samp(each, 0.0).pvalue)
