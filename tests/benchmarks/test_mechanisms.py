"""The recorded differences of mechanisms are those of the recorded results."""

import re

import pytest

from benchmarks.fedssl_bench.results import RESULTS, read
from benchmarks.mechanisms import MECHANISMS, mechanism_table
from benchmarks.mechanisms import RESULTS as PROTOCOLS
from fedssl.config.overrides import CONF
from fedssl.errors import InputError
from fedssl.report.significance import compare


@pytest.mark.parametrize("row", MECHANISMS)
def test_recorded_differences_are_those_of_the_results(row):
    method, _, rule = row.partition("-")
    of = {entry.key: entry.results for entry in read(RESULTS)}
    pairs = [
        (of["digits", rule, method, seed], of["digits", "fedavg", method, seed])
        for seed in range(5)
        if ("digits", rule, method, seed) in of
    ]
    found = compare({name: [100 * (own[name] - other[name]) for own, other in pairs] for name in PROTOCOLS})
    cells = [f"{one.mean:+.1f} ({one.low:+.1f} to {one.high:+.1f})" for one in found.values()]
    page = (CONF.parent / "benchmarks" / "README.md").read_text()
    line = re.search(rf"^\| {method} {rule} \|.*\|$", page, flags=re.M)
    assert line is not None
    assert line[0].split(" | ")[2:] == [*cells, f"{len(pairs)} |"]


def test_a_folder_without_runs_of_the_suite_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no finished runs of two seeds.*such as runs/bench/digits"):
        mechanism_table(tmp_path)
