"""Ranks of rows over seeds, Friedman's test of all rows, and their differences from a reference."""

import numpy as np
from scipy.stats import friedmanchisquare, rankdata

from fedssl.report.significance import Difference, Values, compare


def ranks(values: Values) -> dict[str, float]:
    """Return the mean rank of each row over its values, one per seed; 1 is the highest, and ties share their ranks."""
    table = np.array(list(values.values()))  # (rows, seeds)
    within = rankdata(-table, axis=0)
    return dict(zip(values, within.mean(axis=1).tolist(), strict=True))


def friedman(values: Values) -> float | None:
    """Return the p-value of Friedman's test; None for fewer than three rows or two seeds, or if all rows are equal."""
    if len(values) < 3 or len(next(iter(values.values()))) < 2 or len(set(map(tuple, values.values()))) == 1:
        return None
    return float(friedmanchisquare(*values.values()).pvalue)


def differences(values: Values, *, reference: str) -> dict[str, Difference]:
    """Return the difference of every other row from ``reference``; empty for fewer than two seeds."""
    base = values[reference]
    if len(base) < 2:
        return {}
    return compare(
        {
            name: [value - other for value, other in zip(row, base, strict=True)]
            for name, row in values.items()
            if name != reference
        }
    )
