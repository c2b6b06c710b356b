"""Statistics of differences that are paired over seeds, by hand, against transcriptions, and by simulation."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from fedssl.report.significance import (
    compare,
    detectable,
    hedges_g,
    holm,
    interval,
    p_value,
    power,
    seeds_for,
)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, times 3, 2, 1: 0.03, 0.04, and 0.03 raised to the one before.
    assert holm({"b": 0.02, "a": 0.01, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_equal_differences_have_the_p_of_the_sign_test():
    # All n signs are equal with probability 2 / 2^n under the null hypothesis.
    assert [p_value([1.5] * n) for n in (2, 3, 6)] == [0.5, 0.25, 0.03125]
    assert p_value([0.1 + 0.2, 0.3]) == 0.5  # equal up to rounding
    assert p_value([0.0, 0.0]) == 1.0


def test_interval_and_effect_by_hand():
    # 1, 2, 3: mean 2, deviation 1, and t with two degrees of freedom has F(t) = 1/2 + t / (2 sqrt(2 + t^2)) = 0.975 at
    # t = sqrt(2 * 0.95^2 / (1 - 0.95^2)) = 4.302653, so the half length is 4.302653 / sqrt(3) = 2.484138.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)
    # Hedges' factor for m degrees of freedom is Gamma(m / 2) / (sqrt(m / 2) Gamma((m - 1) / 2)), for m = 2 therefore
    # 1 / sqrt(pi), and for m = 4: 1 / (sqrt(2) * sqrt(pi) / 2) = 0.797885. The deviation of 1, 2, 3, 4, 5 is sqrt(2.5).
    assert hedges_g([1.0, 2.0, 3.0]) == pytest.approx(2 / math.sqrt(math.pi))
    assert hedges_g([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.797885 * 3 / math.sqrt(2.5), rel=1e-6)
    assert hedges_g([1.0, 3.0]) == 0.0  # the factor for one degree of freedom
    assert (hedges_g([0.0, 0.0]), hedges_g([-1.0, -1.0])) == (0.0, -math.inf)
    assert hedges_g([0.3, 0.1 + 0.2, 0.3]) == math.inf  # equal up to rounding


@pytest.mark.parametrize(("shift", "seeds"), [(1.0, 3), (2.0, 5), (0.3, 20)])
def test_power_equals_the_integral_over_the_variance(shift, seeds):
    # T = (Z + d) / sqrt(V / m), with Z normal, V chi-squared with m = n - 1 and d = shift sqrt(n). Given V, T > t if
    # Z > t sqrt(V / m) - d, with probability Phi(d - t sqrt(V / m)).
    m, d = seeds - 1, shift * math.sqrt(seeds)
    t = {2: 4.30265273, 4: 2.77644511, 19: 2.09302405}[m]  # of a table

    def integrand(v: float) -> float:
        density = v ** (m / 2 - 1) * math.exp(-v / 2) / (2 ** (m / 2) * math.gamma(m / 2))
        return density * math.erfc((t * math.sqrt(v / m) - d) / math.sqrt(2)) / 2

    assert power(shift, 1.0, seeds=seeds) == pytest.approx(quad(integrand, 0, np.inf)[0], abs=1e-7)


def test_numbers_of_seeds_are_those_of_tables_of_power():
    # Paired t-test, two-sided, 5%, power 0.8: Cohen's d of 1, 0.8, 0.5 and 0.2 need 10, 15, 34 and 199 pairs.
    assert [seeds_for(1 / d) for d in (1.0, 0.8, 0.5, 0.2)] == [10, 15, 34, 199]
    assert [seeds_for(spread) for spread in (0.0, 1e-15, 1e-6, 0.01)] == [2, 2, 2, 2]
    assert power(1.0, 1.0, seeds=9) < 0.8 <= power(1.0, 1.0, seeds=10)
    assert power(detectable(0.7, seeds=3), 0.7, seeds=3) == pytest.approx(0.8)
    assert (detectable(0.0, seeds=3), seeds_for(0.7, difference=2.0)) == (0.0, seeds_for(0.35))


def test_intervals_cover_and_holm_bounds_false_findings_in_simulation():
    random = np.random.default_rng(0)
    draws = random.normal(0.7, 2.0, (1000, 3))
    covered = sum(low <= 0.7 <= high for low, high in map(interval, draws.tolist()))
    assert abs(covered / 1000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 1000)
    # Five rows share one reference, as in a table; all true differences are 0.
    tables = random.normal(size=(150, 5, 4)) - random.normal(size=(150, 1, 4))
    p_values = ({str(name): p_value(row) for name, row in enumerate(table)} for table in tables.tolist())
    found = sum(min(holm(one).values()) < 0.05 for one in p_values)
    assert found / 150 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)


def test_comparison_does_not_depend_on_order_or_sign():
    rows = {"a": [1.0, 2.0, 4.0], "b": [0.5, -1.0, 0.2], "c": [3.0, 3.1, 2.9]}
    found = compare(rows)
    assert compare(dict(reversed(rows.items()))) == found
    negative = compare({name: [-value for value in row] for name, row in rows.items()})
    for name, row in found.items():
        mirrored = negative[name]
        assert (mirrored.mean, mirrored.p) == pytest.approx((-row.mean, row.p))
        assert (mirrored.low, mirrored.high, mirrored.effect) == pytest.approx((-row.high, -row.low, -row.effect))
