"""Values that a constraint allows, and its text."""

import math

import pytest

from fedssl.config.constraint import Constraint


@pytest.mark.parametrize(
    ("constraint", "allowed", "rejected", "text"),
    [
        (
            Constraint(kind=int, minimum=1, maximum=4),
            [1, 4],
            [0, 5, 1.0, True, None, "2", [1]],
            "an integer from 1 to 4",
        ),
        (
            Constraint(above=0, below=1, optional=True),
            [None, 0.5, 1e-30],
            [0, 1, 1e-31, 5e-324, math.nan, math.inf, -math.inf, False, "x"],
            "a number above 0 and below 1, or null",
        ),
        (Constraint(), [-1e30, 0, 3], [1e31, -1e-31, math.nan, math.inf, True, None], "a number"),
        (Constraint(kind=bool), [True, False], [0, 1, None, "true"], "true or false"),
        (Constraint(choices=("a", 1)), ["a", 1], ["b", True, 1.0, None], "a or 1"),
        (
            Constraint(minimum=0, is_list=True),
            [[], [0, 2.5], (1,)],
            [[-1], [[1]], 1, None, ["x"], {"a": 1}],
            "a list of numbers of at least 0",
        ),
        (
            Constraint(above=0, maximum=1, is_range=True),
            [[0.5, 1], (1, 1)],
            [[1, 0.5], [0.5], [], 0.5, [0, 1], [0.5, math.inf], [True, 1], ["a", "b"], None],
            "a list [low, high] of numbers above 0 and at most 1",
        ),
        (
            Constraint(choices=("a", "b"), list_of=Constraint(kind=int, minimum=1)),
            ["a", [1, 2], []],
            ["c", [0], [True], 1, None],
            "a or b, or a list of integers of at least 1",
        ),
        (Constraint(kind=dict, optional=True), [{"a": 1}, {}, None], [[], "a", 1], "a mapping, or null"),
    ],
)
def test_values_and_text(constraint: Constraint, allowed: list, rejected: list, text: str) -> None:
    assert str(constraint) == text
    assert [value for value in allowed if not constraint.allows(value)] == []
    assert [value for value in rejected if constraint.allows(value)] == []
