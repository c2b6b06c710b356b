"""Rules about what excludes what: each is a function that returns the sentence of the error, or nothing.

A rule stands beside the feature that needs it. It is about settings, about a built run, or about what the clients of a
round exchange.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from fedssl.errors import InputError

T = TypeVar("T")

Problem = str | None  # the sentence of the error
Rule = Callable[[T], Problem]


def check_rules(rules: Iterable[Rule[T]], subject: T) -> None:
    """Raise `InputError` with the sentence of the first rule that is broken."""
    for rule in rules:
        problem = rule(subject)
        if problem is not None:
            raise InputError(problem)
