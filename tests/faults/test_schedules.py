"""Schedules of faults end as the undisturbed run, or with one sentence.

All of them: ``uv run python -m tests.faults.run``. `planted.toml` has bugs that those of this file find.
"""

from pathlib import Path

import pytest

from tests.cases import some
from tests.faults.schedules import make_schedule, play


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.parametrize("number", some(range(72), default=(3,)))
def test_a_schedule_keeps_its_invariants(number: int, tmp_path: Path, base: Path) -> None:
    schedule = make_schedule(number)
    print(schedule)
    play(schedule, tmp_path / "run", base=base)
