"""How well RankMe, alpha-ReQ and LiDAR predict linear accuracy, over all finished runs below some folders.

    uv run python benchmarks/label_free.py multirun [runs ...]

Each row is Spearman's rank correlation with the final ``linear`` accuracy: over runs, and over means of runs that
differ only in their seed, which alone are independent; then over these of each data set and of each method.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from fedssl.command_line import run_command
from fedssl.evaluation.scores import Score
from fedssl.runs.catalog import goodness, readable_runs
from fedssl.runs.groups import group_by_seed
from fedssl.runs.reliability import TARGET, correlation
from fedssl.runs.run import LABEL_FREE, Run
from fedssl.text_table import markdown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    runs, problems = readable_runs(parser.parse_args().folders)
    finished = [run for run in runs if run.score(TARGET) is not None]
    seeds = [group.runs for group in group_by_seed(finished)]
    rows = [row("all runs", [[run] for run in finished]), row("means over seeds", seeds)]
    for key in ("dataset", "method"):
        rows += [row(f"{key} {name}", chosen) for name, chosen in split(seeds, lambda run, key=key: run.value(key))]
    print(markdown([["", *LABEL_FREE], *rows], left=1))
    print("\n".join(problems))


def row(title: str, groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the cells of a row, whose values are means over the runs of a group."""
    cells = [title]
    for metric in LABEL_FREE:
        known = [[run for run in runs if run.score(metric) is not None] for runs in groups]
        pairs = [(average(runs, metric), average(runs, TARGET)) for runs in known if runs]
        found = correlation([goodness(metric, Score(one, unit="")) for one, _ in pairs], [other for _, other in pairs])
        cells.append(found.text if found else f"- ({len(pairs)} runs)")
    return cells


def average(runs: Sequence[Run], metric: str) -> float:
    return mean(value for run in runs if (value := run.metric(metric)) is not None)


def split(groups: Sequence[Sequence[Run]], key: Callable[[Run], str]) -> list[tuple[str, list[Sequence[Run]]]]:
    names = sorted({key(runs[0]) for runs in groups})
    return [(name, [runs for runs in groups if key(runs[0]) == name]) for name in names]


if __name__ == "__main__":
    sys.exit(run_command("label_free", main))
