"""Which updates moved too far."""

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.low_rank_products import FactorPairs, LowRankLayer
from strategies.mods.norm_filter import factor_change, norm_outliers


def test_more_than_so_many_times_the_median():
    """Weights moved 1, 2, 3 and 31 (median 2.5: 12.4 times), statistics 1, 1, 1 and 1."""
    moved = {4: (1.0, 1.0), 5: (2.0, 1.0), 6: (3.0, 1.0), 9: (31.0, 1.0)}
    assert norm_outliers(moved, factor=12.5) == {}
    found = norm_outliers(moved, factor=12)
    assert list(found) == [9]
    assert found[9] == (
        "its weights moved 12.4 times as far as the median of the round, of which 12 times are plausible "
        "(aggregation.max_norm_ratio)"
    )


def test_statistics_count_by_themselves_and_one_reason_is_enough():
    moved = {0: (1.0, 1.0), 1: (1.0, 50.0), 2: (70.0, 60.0), 3: (1.0, 1.0), 4: (1.0, 1.0)}
    found = norm_outliers(moved, factor=10)
    assert list(found) == [2, 1]
    assert found[1].startswith("its running statistics moved 50 times")
    assert found[2].startswith("its weights moved 70 times")


def test_how_far_factors_moved():
    """A = (3, 4), B = (0, 0): norm 5. A moves by (6, 8) and B by (0, 10): sqrt(36 + 64 + 100) / 5."""
    pair = LowRankLayer("w", "a", "b", 1.0)
    start = {"a": np.array([[3.0, 4.0]]), "b": np.zeros((2, 1)), "head": np.ones(3)}
    reference = GlobalLayers(start, FactorPairs((pair,)))
    moved = {"a": np.array([[9.0, 12.0]]), "b": np.array([[0.0], [10.0]]), "head": np.full(3, 1e9)}
    assert factor_change(reference, moved) == pytest.approx(200**0.5 / 5)
    assert factor_change(reference, start) == 0.001  # the smallest change, as of weights
    assert factor_change(GlobalLayers(start), moved) == 0.001  # without factors
