"""Differences of rows from the row with one other choice, such as ``strategy=fedavg``, paired by seed."""

from collections.abc import Mapping, Sequence
from statistics import median, median_low

from fedssl.errors import InputError
from fedssl.evaluation.scores import IN_PERCENT
from fedssl.report.significance import LEVEL, POWER, Difference, compare, detectable
from fedssl.runs.groups import RunGroup, group_by_seed, same_value
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TextTable, text_cell

_COLUMNS = ["seeds", "difference", "interval", "p", "effect", "seeds for 1 point"]
_CSV = ["seeds", "difference", "spread", "low", "high", "p", "effect", "seeds_for_1_point"]


def paired_table(runs: Sequence[Run], reference: str) -> TextTable:
    """Compare finished runs with those that have the choice ``reference`` instead, over the seeds that both have.

    Other settings agree, except for those of the replaced choice (``strategy.weighting``). The tests of one result are
    corrected together. Accuracies are in percent, differences in points.

    Raises
    ------
    InputError
        If no row has two seeds in common with a row of the reference.
    """
    key, equals, choice = reference.partition("=")
    if not (key and equals and choice):
        raise InputError(f"--reference {reference} is no setting and value; use e.g. --reference strategy=fedavg")
    groups = group_by_seed([run for run in runs if run.finished])
    keys = list(dict.fromkeys(name for group in groups for name in group.settings))
    bases = [group for group in groups if same_value(group.runs[0].value(key), choice)]
    if not bases:
        known = dict.fromkeys(group.runs[0].value(key) for group in groups)
        raise InputError(f"no finished run has {reference}; {key} is {', '.join(known) or 'in no run'}")
    pairs = [(group, _reference_of(group, bases, key)) for group in groups if group not in bases]
    rows: list[list[TableCell]] = []
    notes = []
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.results)
    for name in names:
        found = {
            index: paired
            for index, (group, base) in enumerate(pairs)
            if base is not None and len(paired := _paired(group, base, name)) > 1
        }
        compared = compare({str(index): paired for index, paired in found.items()})
        for index, paired in found.items():
            settings = [text_cell(pairs[index][0].settings.get(name, "")) for name in keys]
            rows.append([*settings, text_cell(name), *_cells(compared[str(index)], len(paired))])
        if found:
            spread, seeds = median(row.spread for row in compared.values()), median_low(map(len, found.values()))
            notes.append(f"{name}: {detectable(spread, seeds=seeds):.2g} points with {seeds} seeds")
    if not rows:
        raise InputError(
            f"no row has two seeds in common with a row of {reference} with otherwise equal settings; run more seeds "
            "of both, or choose another --reference"
        )
    meaning = (
        f"difference: mean ± standard deviation in points; interval: {LEVEL:.0%}, of this row alone; p: paired t-test "
        "with Holm's correction over the rows of a result; effect: Hedges' g"
    )
    detected = f"differences that are detected with probability {POWER:g}, at the median deviation:"
    return TextTable(
        "Differences",
        [*keys, "result", *_COLUMNS],
        rows,
        left=len(keys) + 1,
        notes={f"differences from {reference}, paired by seed:": [meaning], detected: notes},
        csv_header=[*keys, "result", *_CSV],
    )


def _reference_of(group: RunGroup, bases: Sequence[RunGroup], key: str) -> RunGroup | None:
    def others(settings: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in settings.items() if name != key and not name.startswith(f"{key}.")}

    return next((base for base in bases if others(base.settings) == others(group.settings)), None)


def _paired(group: RunGroup, base: RunGroup, name: str) -> list[float]:
    """Return the differences in points, or in the result's own unit, by seed."""
    theirs = {run.seed: run.results[name] for run in base.runs if name in run.results}
    ours = {run.seed: run.results[name] for run in group.runs if name in run.results}
    common = [seed for seed in ours if seed in theirs]
    return [(100 if ours[seed].unit in IN_PERCENT else 1) * (ours[seed].value - theirs[seed].value) for seed in common]


def _cells(row: Difference, seeds: int) -> list[TableCell]:
    return [
        TableCell(str(seeds), numbers=(seeds,)),
        TableCell(f"{row.mean:+.1f} ± {row.spread:.1f}", numbers=(row.mean, row.spread)),
        TableCell(f"{row.low:+.1f} to {row.high:+.1f}", numbers=(row.low, row.high)),
        TableCell(f"{row.p:.3f}", numbers=(row.p,)),
        TableCell(f"{row.effect:+.1f}" if seeds > 2 else "-", numbers=(row.effect,)),
        TableCell(str(row.seeds), numbers=(row.seeds,)),
    ]
