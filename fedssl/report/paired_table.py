"""Differences of rows from the row with one other choice, such as ``strategy=fedavg``, paired by seed."""

from collections.abc import Sequence
from statistics import median, median_low

from fedssl.errors import InputError
from fedssl.evaluation.scores import IN_PERCENT
from fedssl.plain_values import flatten
from fedssl.report.significance import LEVEL, POWER, Difference, compare, detectable, seeds_for
from fedssl.runs.groups import RunGroup, group_by_seed, is_ignored, same_value, varying
from fedssl.runs.run import Run
from fedssl.text_table import TableCell, TextTable, text_cell

_COLUMNS = ["seeds", "difference", "interval", "p", "effect", "seeds for 1 point"]
_CSV = ["seeds", "difference", "spread", "low", "high", "p", "effect", "seeds_for_1_point"]


def paired_table(runs: Sequence[Run], reference: str) -> TextTable:
    """Compare finished runs with those that have the choice ``reference`` instead, over the seeds that both have.

    Other settings agree, except for those of the replaced choice (``strategy.weighting``) and those that only one of
    the two has (``regularizer.weight`` with ``strategy=fedprox``). The tests of one result are corrected together.
    Accuracies are in percent, differences in points; those of other results are in their own unit.

    Raises
    ------
    InputError
        If no row has two seeds in common with a row of the reference.
    """
    key, equals, choice = reference.partition("=")
    if not (key and equals and choice):
        raise InputError(f"--reference {reference} is no setting and value; use e.g. --reference strategy=fedavg")
    if is_ignored(key):
        raise InputError(
            f"--reference {reference}: rows are not compared by {key}; use e.g. --reference strategy=fedavg"
        )
    groups = group_by_seed([run for run in runs if run.finished])
    keys = list(dict.fromkeys(name for group in groups for name in group.settings))
    bases = [group for group in groups if same_value(group.runs[0].value(key), choice)]
    if not bases:
        known = dict.fromkeys(group.runs[0].value(key) for group in groups)
        others = sum(not run.finished and same_value(run.value(key), choice) for run in runs)
        absent = f"no finished run has {reference}" + (f", and {others} with it failed or still run" if others else "")
        raise InputError(f"{absent}; {key} is {', '.join(filter(None, known)) or 'in no run'}")
    pairs = [(group, _reference_of(group, bases, key)) for group in groups if group not in bases]
    rows: list[list[TableCell]] = []
    notes, compared_rows = [], set[int]()
    units = {name: score.unit for group in groups for run in group.runs for name, score in run.results.items()}
    for name, unit in units.items():
        found = {
            index: paired
            for index, (group, base) in enumerate(pairs)
            if base is not None and len(paired := _paired(group, base, name)) > 1
        }
        compared_rows |= found.keys()
        compared = compare({str(index): paired for index, paired in found.items()})
        for index, paired in found.items():
            settings = [text_cell(pairs[index][0].settings.get(name, "")) for name in keys]
            rows.append([*settings, text_cell(name), *_cells(compared[str(index)], len(paired), unit)])
        if spreads := [row.spread for row in compared.values() if row.varies]:
            spread, seeds = median(spreads), median_low(map(len, found.values()))
            points = " points" * (unit in IN_PERCENT)
            notes.append(f"{name}: {detectable(spread, seeds=seeds):.2g}{points} with {seeds} seeds")
    if not rows:
        raise InputError(f"{_why_no_pair(pairs, bases, key)}, or choose another --reference than {reference}")
    meaning = (
        f"difference: mean ± standard deviation, of percentages in points; interval: {LEVEL:.0%}, of this row alone; "
        "p: paired t-test with Holm's correction over the rows of a result; effect: Hedges' g"
    )
    own = [name for name in varying([base.settings for base in bases]) if name.startswith(f"{key}.")]
    remarks = [f"references differ in {', '.join(own)}; a row has the first one whose other settings agree"] * bool(own)
    if missing := len(pairs) - len(compared_rows):
        remarks.append(f"{missing} of {len(pairs)} rows have no reference with two seeds in common")
    detected = f"differences that are detected with probability {POWER:g}, at the median deviation:"
    about = {f"differences from {reference}, paired by seed:": [meaning, *remarks]}
    return TextTable(
        "Differences",
        [*keys, "result", *_COLUMNS],
        rows,
        left=len(keys) + 1,
        notes=about | ({detected: notes} if notes else {}),
        csv_header=[*keys, "result", *_CSV],
    )


def _reference_of(group: RunGroup, bases: Sequence[RunGroup], key: str) -> RunGroup | None:
    """Return the first of the bases from which the row differs least; None if it differs in a setting of both."""
    found = min(bases, key=lambda base: len(_differences(group, base, key)))
    return None if any(_have(found, group, name) for name in _differences(group, found, key)) else found


def _differences(group: RunGroup, base: RunGroup, key: str) -> dict[str, tuple[str, str]]:
    """Return the values of both, by the settings in which they differ besides the choice and those of the choice."""
    return {
        name: (value, base.settings[name])
        for name, value in group.settings.items()
        if name != key and not name.startswith(f"{key}.") and value != base.settings[name]
    }


def _have(one: RunGroup, other: RunGroup, name: str) -> bool:
    """Return whether the runs of both have a setting, which may be null."""
    return all(name in {*group.runs[0].choices, *dict(flatten(group.runs[0].settings or {}))} for group in (one, other))


def _why_no_pair(pairs: Sequence[tuple[RunGroup, RunGroup | None]], bases: Sequence[RunGroup], key: str) -> str:
    """Return why no row can be compared with its reference, and what to do."""
    if not pairs:
        return f"all finished runs have one {key}; add runs with another one"
    equal = [(group, base) for group, base in pairs if base is not None]
    if not equal:
        differing = min((_differences(group, base, key) for group, _ in pairs for base in bases), key=len)
        values = " and ".join(
            f"{name} ({one or 'null'} and {other or 'null'})" for name, (one, other) in differing.items()
        )
        return f"each row differs from the reference in other settings, at least in {values}; run both with equal ones"
    seeds = [[sorted(run.seed for run in one.runs) for one in pair] for pair in equal]
    index = max(range(len(equal)), key=lambda index: len(set(seeds[index][0]).intersection(seeds[index][1])))
    ours, theirs = (", ".join(map(str, one)) for one in seeds[index])
    row = equal[index][0].label
    if len(set(seeds[index][0]).intersection(seeds[index][1])) > 1:
        return f"{row} and its reference have no result in common for two seeds; evaluate both alike"
    return f"{row} has seeds {ours} and its reference {theirs}, but two in common are needed; run the same ones of both"


def _paired(group: RunGroup, base: RunGroup, name: str) -> list[float]:
    """Return the differences in points, or in the result's own unit, by seed."""
    theirs = {run.seed: run.results[name] for run in base.runs if name in run.results}
    ours = {run.seed: run.results[name] for run in group.runs if name in run.results}
    common = [seed for seed in ours if seed in theirs]
    return [(100 if ours[seed].unit in IN_PERCENT else 1) * (ours[seed].value - theirs[seed].value) for seed in common]


def _cells(row: Difference, seeds: int, unit: str) -> list[TableCell]:
    form = ".1f" if unit in IN_PERCENT else ".3g"
    needed = seeds_for(row.spread) if unit in IN_PERCENT and row.varies else None  # for a point of percentages
    mean = float(f"{row.mean:{form}}") + 0.0  # no -0.0
    ends = (row.low, row.high) if row.varies else (None, None)
    return [
        TableCell(str(seeds), numbers=(seeds,)),
        TableCell(f"{mean:+{form}} ± {row.spread:{form}}", numbers=(row.mean, row.spread)),
        TableCell(f"{row.low:+{form}} to {row.high:+{form}}" if row.varies else "-", numbers=ends),
        TableCell(f"{row.p:.3f}", numbers=(row.p,)),
        TableCell(f"{round(row.effect, 1) + 0.0:+.1f}" if seeds > 2 else "-", numbers=(row.effect,)),
        TableCell("-" if needed is None else str(needed), numbers=(needed,)),
    ]
