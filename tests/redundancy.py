"""List tests that cover no line or branch alone, for ``tests/redundant.txt``.

uv run pytest --cov --cov-branch --cov-context=test --cov-report= --durations=0 -vv > times.log
uv run python -m tests.redundancy times.log > tests/redundant.txt

Tests are removed greedily, the slowest first, while every line and branch stays covered. Of a parametrized test the
fastest case stays. Tests with one case are removed in `OTHER_CASES` only. Tests that match `KEPT` stay: what they check
is not a matter of lines (equal bits after a resume, commands of the documentation, faults).
"""

import re
import sqlite3
import sys
from collections import Counter, defaultdict
from pathlib import Path

HEAD = "# Tests that only `--heavy` runs: they cover no line or branch alone. Written by tests/redundancy.py."
KEPT = re.compile(
    "test_digests|test_commands|test_flwr_run|test_ray_grid|test_resume_parts|resumed_run|test_crash|test_learning|"
    "test_readme|refused|is_lost_in_any_stage|test_what_a_kill|edge_client|test_notebook|test_accuracy|"
    "test_all_components|test_compose|captured_anew|followed_by_an_optimizer|test_export|test_onnx_maps|test_paper_table|test_theory|test_list|torch_runs"
)
OTHER_CASES = re.compile(
    "tests/(fedssl/(report|plots|export|runs|machine|evaluation|partition|test_step_cost)|experiments|benchmarks|examples|"
    "strategies/test_baselines|server_app/test_(personalization|collapse_monitor|several_models))"
)
MIN_SECONDS = 0.3  # faster tests are not worth a line


def covered(database: Path) -> dict[str, set[int]]:
    """Return the ids of the lines and branches that each test covers."""
    with sqlite3.connect(database) as connection:
        names = {
            key: context.rpartition("|")[0] for key, context in connection.execute("SELECT id, context FROM context")
        }
        ids: dict[tuple[int, int, int], int] = {}
        tests: dict[str, set[int]] = defaultdict(set)
        for context, *arc in connection.execute("SELECT context_id, file_id, fromno, tono FROM arc"):
            if names[context]:
                tests[names[context]].add(ids.setdefault((arc[0], arc[1], arc[2]), len(ids)))
    return tests


def seconds(log: str) -> dict[str, float]:
    """Return the seconds of each test, from the output of ``--durations=0 -vv``."""
    times: dict[str, float] = defaultdict(float)
    for value, test in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(.+?)$", log, flags=re.MULTILINE):
        times[test] += float(value)
    return times


def redundant(tests: dict[str, set[int]], times: dict[str, float]) -> list[str]:
    """Return the sorted tests that can be removed."""
    cases = defaultdict(list)
    for test in times:
        cases[test.partition("[")[0]].append(test)
    fastest = {min(group, key=times.__getitem__) for group in cases.values() if len(group) > 1}
    count = Counter(arc for arcs in tests.values() for arc in arcs)
    removed = []
    for test in sorted(tests, key=lambda test: -times[test]):
        is_candidate = len(cases[test.partition("[")[0]]) > 1 or OTHER_CASES.match(test)
        if times[test] < MIN_SECONDS or test in fastest or KEPT.search(test) or not is_candidate:
            continue
        if all(count[arc] > 1 for arc in tests[test]):
            count.subtract(tests[test])
            removed.append(test)
    return sorted(removed)


if __name__ == "__main__":
    print("\n".join([HEAD, *redundant(covered(Path(".coverage")), seconds(Path(sys.argv[1]).read_text()))]))
