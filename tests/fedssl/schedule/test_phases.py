"""Rounds and stages of schedules by hand, and what is no schedule."""

import pytest

from fedssl.errors import InputError
from fedssl.schedule.phases import layer_wise, phase_at, progressive, split_rounds


@pytest.mark.parametrize(
    ("rounds", "stages", "shares", "expected"),
    [
        (180, 12, "uniform", [15] * 12),  # the paper's
        (10, 4, "uniform", [3, 2, 3, 2]),  # one each, and 6 at 1.5 each: ends after 1.5, 3, 4.5, 6, rounded up
        # One each, and 6 in proportion to 1, 2, 3: ends after 1, 3, 6.
        (9, 3, "left_skewed", [2, 3, 4]),
        (9, 3, "right_skewed", [4, 3, 2]),
        (3, 3, "left_skewed", [1, 1, 1]),
        (6, 3, [1, 2, 3], [1, 2, 3]),
    ],
)
def test_rounds_per_stage_by_hand(rounds, stages, shares, expected):
    assert split_rounds(rounds, stages, shares) == expected


@pytest.mark.parametrize("shares", ["uniform", "left_skewed", "right_skewed"])
def test_every_round_belongs_to_one_stage(shares):
    for stages in (1, 4, 12):
        for rounds in range(stages, 60):
            counts = split_rounds(rounds, stages, shares)
            assert sum(counts) == rounds
            assert min(counts) >= 1
            schedule = progressive(rounds=rounds, depth=stages, rounds_per_stage=shares)
            numbers = [phase_at(schedule, round).number for round in range(1, rounds + 1)]
            assert numbers == [number for number, count in enumerate(counts, start=1) for _ in range(count)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_rounds(3, 4, "uniform"), "rounds=3 but the encoder has 4 stages"),
        (lambda: layer_wise(rounds=8, depth=4, rounds_per_stage="even"), "schedule.rounds_per_stage=even must be"),
        (lambda: progressive(rounds=8, depth=4, rounds_per_stage="even"), "schedule.rounds_per_stage=even must be"),
        (lambda: split_rounds(8, 4, [2, 2, 2, 1]), r"rounds_per_stage=\[2, 2, 2, 1\] must be 4 integers"),
        (lambda: split_rounds(8, 4, [4, 4]), "must be 4 integers"),
        (lambda: split_rounds(8, 3, [8, 0, 0]), "of at least 1"),
        (lambda: layer_wise(rounds=8, depth=4, depth_dropout=1.0), "depth_dropout=1.0"),
    ],
)
def test_bad_schedules_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
