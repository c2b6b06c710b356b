"""Which updates moved too far, and what a round does with them."""

import numpy as np
import pytest

from fedssl.arrays import GlobalLayers
from fedssl.low_rank_products import FactorPairs, LowRankLayer
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.m_dawa import MDAWA
from strategies.mods.norm_filter import factor_change, norm_outliers
from tests.server_app.test_round import end, played, run_round


def test_more_than_so_many_times_the_median():
    """Weights moved 1, 2, 3 and 31 (median 2.5: 12.4 times), statistics 1, 1, 1 and 1."""
    moved = {4: (1.0, 1.0), 5: (2.0, 1.0), 6: (3.0, 1.0), 9: (31.0, 1.0)}
    assert norm_outliers(moved, factor=12.5) == {}
    found = norm_outliers(moved, factor=12)
    assert list(found) == [9]
    ratio = "its weights moved 12.4 times as far as the median of the round"
    assert found[9] == f"{ratio}, of which 12 times are plausible (aggregation.max_norm_ratio)"


def test_two_clients_have_no_outlier_and_none_may_move():
    assert norm_outliers({0: (1.0,), 1: (9.0,)}, factor=1) == {}  # the median 5 is exceeded
    assert norm_outliers({0: (1.0,), 1: (9.0,), 2: (1.0,)}, factor=1).keys() == {1}
    found = norm_outliers({0: (0.0,), 1: (9.0,), 2: (0.0,)}, factor=10)
    assert found[1].startswith("its weights moved inf times as far")


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


def near(layers, partition):
    """Honest: a step of a tenth of the layers' length, each client in a direction of its own."""
    step = np.roll([0.3, 0.0, 0.0], partition)
    return {"encoder.weight": (layers["encoder.weight"] + step).astype(np.float32), **statistics_of(layers, 0.55)}


def statistics_of(layers, value):
    return {"encoder.bn.running_mean": np.array([value], dtype=np.float32)}


def times(factor):
    def attack(layers, partition):
        return {name: (array * factor).astype(np.float32) for name, array in near(layers, partition).items()}

    return attack


def huge_statistics(layers, partition):
    return {**near(layers, partition), **statistics_of(layers, 1e9)}


@pytest.mark.parametrize("strategy", [FedAvg, LDAWA, MDAWA])
@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        # Honest clients move by 0.3 / 3 = 0.1 of the layers' length; 1000 times the layers is about 1000 / 0.1.
        (times(1000.0), r"weights moved 1.0\d?e\+04 times"),
        (times(-1000.0), r"weights moved 1.0\d?e\+04 times"),
        (times(-1.0), r"weights moved 20.\d? times"),  # |-(w + s) - w| is about 2 |w|
        (huge_statistics, "running statistics moved 2e"),  # (1e9 - 0.5) / 0.5 over (0.55 - 0.5) / 0.5
    ],
)
def test_an_update_that_is_not_plausible_is_dropped(strategy, attack, reason):
    result, report = run_round(strategy(), [near, near, attack, near], max_norm_ratio=10)
    assert list(report.dropped) == [2]
    assert pytest.raises(AssertionError, match=reason).matches(AssertionError(report.dropped[2]))
    # What is left is what the honest clients make of it, to the bit.
    configured, replies = played(strategy(), [near, near, near, near])
    expected, _ = end(configured, [replies[0], replies[1], replies[3]])
    assert all(np.array_equal(expected[name], result[name]) for name in expected)
    # Without the limit the attack is taken.
    assert not run_round(strategy(), [near, near, attack, near])[1].dropped
