"""Which row leads, by hand-computed means and deviations."""

import pytest

from fedssl.report.marking import best_rows, comparison_key


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Means .9 and .7 differ by .2; deviations sqrt(2 * .1^2 / 1) = .1414 and sqrt(2 * .05^2 / 1) = .0707.
        ([[0.8, 1.0], [0.65, 0.75]], {0}),
        ([[0.65, 0.75], [0.8, 1.0]], {1}),
        # Means .9 and .78 differ by .12, which is more than .0707 but not than .1414, whichever of the two varies so.
        ([[0.8, 1.0], [0.73, 0.83]], set()),
        ([[0.85, 0.95], [0.68, 0.88]], set()),
        # Of three the second best counts, not the last: .9 - .6 against a deviation of .0707, then .9 - .88.
        ([[0.3, 0.9], [0.85, 0.95], [0.55, 0.65]], {1}),
        ([[0.1, 0.2], [0.85, 0.95], [0.83, 0.93]], set()),
        # One seed of either, no rival, nobody: nothing can be said.
        ([[0.9], [0.1, 0.2]], set()),
        ([[0.9, 0.9], [0.1]], set()),
        ([[0.9, 0.9]], set()),
        ([[], [0.9, 0.9], []], set()),
        ([], set()),
        # Without any spread every lead is one, but a tie is none.
        ([[0.5, 0.5], [0.6, 0.6]], {1}),
        ([[0.5, 0.5], [0.5, 0.5]], set()),
    ],
)
def test_a_row_leads_by_more_than_the_larger_deviation(values: list[list[float]], expected: set[int]):
    assert best_rows(values, ["same"] * len(values)) == expected


def test_rows_are_compared_within_their_task_only():
    values = [[0.8, 0.81], [0.6, 0.61], [0.5, 0.51], [0.4, 0.41], [0.9, 0.91]]
    alphas = ("0.1", "0.1", "1", "1", "10")
    rows = [{"strategy": str(n), "partition.alpha": alpha} for n, alpha in enumerate(alphas)]
    assert best_rows(values, [comparison_key(row) for row in rows]) == {0, 2}
    assert comparison_key({"strategy": "a", "rounds": "3", "num_clients": "5"}) == comparison_key({"num_clients": "5"})
    assert comparison_key({"dataset.limit": "5"}) != comparison_key({})
