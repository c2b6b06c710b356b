"""The tests of ``tests/redundant.txt``, which only ``--heavy`` runs."""

from pathlib import Path

from tests.conftest import REDUNDANT
from tests.redundancy import redundant

ROOT = Path(__file__).parents[1]


def test_the_slowest_tests_go_while_every_line_stays_covered():
    # a[1] and a[2] cover the same: the slower one goes. a[3] covers line 3 alone, b has one case.
    tests = {"a[1]": {1, 2}, "a[2]": {1, 2}, "a[3]": {3}, "b": {1}, "test_digests[1]": {1}, "test_digests[2]": {1}}
    times = {"a[1]": 1.0, "a[2]": 2.0, "a[3]": 9.0, "b": 9.0, "test_digests[1]": 9.0, "test_digests[2]": 8.0}
    assert redundant(tests, times) == ["a[2]"]
    # Of two tests that cover a line together, one stays.
    assert redundant({"a[1]": {1}, "a[2]": {1}, "a[3]": {2}}, {"a[1]": 5.0, "a[2]": 4.0, "a[3]": 1.0}) == ["a[1]"]
    assert redundant({"a[1]": {1}, "a[2]": {1}}, {"a[1]": 0.1, "a[2]": 0.2}) == []


def test_all_listed_tests_exist():
    for test in REDUNDANT:
        if not test.startswith("#"):
            file, *_, function = test.partition("[")[0].split("::")
            assert f"def {function}(" in (ROOT / file).read_text(), test
