"""Ranks, Friedman's test and differences of the rows of a suite, by hand."""

import pytest

from benchmarks.fedssl_bench.ranking import differences, friedman, ranks


def test_ranks_by_hand():
    # Seed 0: b, then a and c share places 2 and 3. Seed 1: a, b, c.
    assert ranks({"a": [1.0, 9.0], "b": [2.0, 8.0], "c": [1.0, 7.0]}) == {"a": 1.75, "b": 1.5, "c": 2.75}


def test_friedman_by_hand():
    # Three rows, four seeds, always the same order: rank sums 4, 8, 12. chi2 = 12 / (4 * 3 * 4) * (16 + 64 + 144)
    # - 3 * 4 * 4 = 56 - 48 = 8; with two degrees of freedom p = exp(-8 / 2).
    values = {"a": [9.0, 8.0, 9.0, 7.0], "b": [5.0, 5.5, 6.0, 5.0], "c": [1.0, 2.0, 3.0, 4.0]}
    assert friedman(values) == pytest.approx(0.018315638888734)
    assert friedman({"a": [1.0], "b": [2.0], "c": [3.0]}) is None
    assert friedman({name: [10.0, 11.0] for name in "abc"}) is None  # nothing to rank


def test_paired_differences_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, t = 2 * sqrt(3); with two degrees of freedom
    # p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14) = 0.0741799. Two rows, Holm: twice as much.
    found = differences(
        {"fedavg": [10.0, 20.0, 30.0], "x": [11.0, 22.0, 33.0], "y": [10.0, 20.0, 30.0]}, reference="fedavg"
    )
    assert (found["x"].mean, found["x"].spread) == (2.0, 1.0)
    assert found["x"].p == pytest.approx(2 * 0.0741799, abs=1e-6)
    assert found["y"].p == 1.0
    assert differences({"fedavg": [1.0], "x": [2.0]}, reference="fedavg") == {}
