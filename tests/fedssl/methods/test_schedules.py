"""Schedules over rounds."""

import pytest

from fedssl.methods.schedules import cosine_increase, linear_warmup


def test_a_cosine_increase_by_hand():
    # Five rounds from 0.9 to 1: the cosine of 0, 45, 90, 135 and 180 degrees; halfway 0.95.
    values = [cosine_increase(0.9, end=1.0, round=round, rounds=5) for round in range(1, 6)]
    quarter = 1 - 0.1 * (1 + 0.5**0.5) / 2
    assert values == pytest.approx([0.9, quarter, 0.95, 1.9 - quarter, 1.0])
    assert cosine_increase(0.9, end=1.0, round=1, rounds=1) == 0.9
    assert cosine_increase(0.9, end=1.0, round=9, rounds=5) == pytest.approx(1.0)  # a round beyond the planned ones


def test_a_linear_warmup_by_hand():
    values = [linear_warmup(0.04, end=0.07, round=round, warmup_rounds=3) for round in (1, 2, 3, 4, 5)]
    assert values == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07])
    assert linear_warmup(0.04, end=0.07, round=1, warmup_rounds=0) == 0.07
