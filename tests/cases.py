"""Cases of parametrized tests of which a few run by default."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *, default: Collection[Any]) -> list[Any]:
    """Return the cases as parameters; all but those of ``default`` are close to these and marked heavy."""
    return [pytest.param(case, marks=[] if case in default else pytest.mark.heavy) for case in cases]
