"""Compare runs with a table of a paper: ``fedssl-report --paper l_dawa.table2 DIR...``.

The papers' numbers are in ``papers/*.yaml``, one file per paper, as printed: a table has columns and rows, each with
settings as on the command line, and a column has the name of its result (``linear``). ``with`` are further settings of
a row's command, such as a learning rate that the paper does not state; a list has one value per column.

A run matches a number of the paper if it has the settings of the number, and if its choices (strategy, method, data
set, ...) are those of ``experiment=PAPER/TABLE`` with these settings and those of ``with``. Other differences
(``rounds=10`` instead of 200) are displayed, and runs that differ so have separate rows. Results are matched by name;
protocols are not compared.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.config.compose import resolve_config
from fedssl.config.overrides import did_you_mean
from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.runs.groups import IGNORED, group_runs, is_ignored, newest_of_each_seed, same_value
from fedssl.runs.run import Run, flatten_settings
from fedssl.safe_io import read_yaml
from fedssl.text_table import TableCell, TextTable, text_cell

PAPERS_FOLDER = Path(__file__).parent / "papers"
# Differences that are not displayed.
IGNORED_KEYS = {
    *(*IGNORED, "evaluation", "experiment", "early_stopping", "collapse_images", "adaptation_epochs"),
    "final_evaluation._target_",  # see the name of the result
}
MAX_LISTED = 4  # differences in a cell
NOT_RUN, NOT_EVALUATED = "not run", "not evaluated"

Differences = dict[str, tuple[str, str]]  # key to the value in the runs and in the experiment


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """A number of a paper, in percent."""

    settings: dict[str, str]  # overrides that distinguish it in the table
    others: dict[str, str]  # further overrides of its command, from which a run may differ except for choices
    encoder_kind: str  # "federated" or "untrained"
    results: tuple[str, ...]  # names in ``summary.json``: by the paper's own protocol, and by the common one
    value: float
    std: float | None


def table_names() -> list[str]:
    """Return the names of all tables as ``paper.table``."""
    return [f"{file.stem}.{table}" for file in sorted(PAPERS_FOLDER.glob("*.yaml")) for table in _read(file)["tables"]]


def read_table(name: str) -> list[PaperNumber]:
    """Return the numbers of a table by row; raise an `InputError` if it does not exist."""
    names = table_names()
    if name not in names:
        raise InputError(f"there is no table {name!r}{did_you_mean(name, names)}; choose one of {', '.join(names)}")
    paper, _, table = name.partition(".")
    content = _read(PAPERS_FOLDER / f"{paper}.yaml")
    return list(_cells(content["tables"][table], content["own"]))


@functools.cache
def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_yaml(file, dict)
    return content


def _cells(table: dict[str, Any], own_protocols: dict[str, str]) -> Iterator[PaperNumber]:
    for row in table["rows"]:
        for index, (column, number) in enumerate(zip(table["columns"], row["numbers"], strict=True)):
            if number is None:  # not in the paper
                continue
            settings = {**column, **row["settings"]}
            protocol, at, dataset = column["result"].partition("@")
            value, _, std = str(number).partition(" ± ")
            yield PaperNumber(
                settings={key: str(setting) for key, setting in settings.items() if key != "result"},
                others={
                    key: str(setting[index] if isinstance(setting, list) else setting)
                    for key, setting in row.get("with", {}).items()
                },
                encoder_kind=row.get("encoder_kind", "federated"),
                results=tuple(
                    dict.fromkeys((f"{own_protocols.get(protocol, protocol)}{at}{dataset}", column["result"]))
                ),
                value=float(value),
                std=float(std) if std else None,
            )


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A number of the paper, and the score over seeds of runs whose settings are the same except for ``differs``."""

    number: PaperNumber
    result: str  # one of the number's
    differs: Differences
    runs: int  # finished ones, one for each seed
    ours: Score | None

    @property
    def difference(self) -> float | None:
        """Return ours minus the paper's, in percentage points."""
        return None if self.ours is None else 100 * self.ours.value - self.number.value


def paper_table(name: str, runs: Sequence[Run]) -> TextTable:
    """Compare the finished runs with a paper's table, such as l_dawa.table2; an unknown name is an `InputError`.

    The order is that of the paper, and accuracies are in percent.
    """
    lines, others = match_runs(name, runs)
    keys = list(dict.fromkeys(key for line in lines for key in line.number.settings))
    return TextTable(
        f"Comparison with {name}",
        [*keys, "differs", "result", "paper (%)", "ours (%)", "difference", "runs"],
        [[*(text_cell(line.number.settings.get(key, "")) for key in keys), *_cells_of(line)] for line in lines],
        left=len(keys) + 2,
        notes={f"finished runs that match no row of {name}:": others} if others else {},
        csv_header=[*keys, "differs", "result", "paper", "paper_std", "ours", "ours_std", "difference", "runs"],
    )


def _cells_of(line: PaperRow) -> list[TableCell]:
    number, ours = line.number, line.ours
    kind = "" if number.encoder_kind == "federated" else f" ({number.encoder_kind})"
    paper = f"{number.value:.2f}" + ("" if number.std is None else f" ± {number.std:.2f}")
    difference = "" if line.difference is None else f"{round(line.difference, 1) + 0.0:+.1f}"  # + 0.0: no -0.0
    in_percent = (ours and 100 * ours.value, ours and ours.std and 100 * ours.std)
    text = ours.number if ours else NOT_EVALUATED if line.runs else NOT_RUN
    differs = text_cell(_format_differences(line.differs, MAX_LISTED))
    return [
        differs._replace(numbers=(_format_differences(line.differs, len(line.differs)),)),
        text_cell(line.result + kind),
        TableCell(paper, number.value, numbers=(number.value, number.std)),
        TableCell(text, None if ours is None else ours.value, numbers=in_percent),
        TableCell(difference, line.difference, numbers=(line.difference,)),
        text_cell(str(line.runs or ""))._replace(numbers=(line.runs,)),
    ]


def match_runs(name: str, runs: Sequence[Run]) -> tuple[list[PaperRow], list[str]]:
    """Return the rows of `paper_table`, and the folders of the finished runs that match no number."""
    experiment, finished = name.replace(".", "/"), [run for run in runs if run.finished and run.settings is not None]
    matched: dict[frozenset[tuple[str, str]], list[tuple[Differences, list[Run]]]] = {}  # by settings and others
    lines = []
    for number in read_table(name):
        same = frozenset((*number.settings.items(), *number.others.items()))
        if same not in matched:
            matched[same] = list(_groups({"experiment": experiment, **number.settings}, number.others, finished))
        rows = [_line(number, differs, group) for differs, group in matched[same]]
        lines += rows or [PaperRow(number=number, result=number.results[0], differs={}, runs=0, ours=None)]
    folders = {run.folder for groups in matched.values() for _, group in groups for run in group}
    return lines, [str(run.folder) for run in finished if run.folder not in folders]


def _line(number: PaperNumber, differs: Differences, runs: Sequence[Run]) -> PaperRow:
    runs = newest_of_each_seed(runs)
    for result in number.results:
        scores = [run.results_of(number.encoder_kind).get(result) for run in runs]
        known = [score for score in scores if score is not None and score.unit == ACCURACY]
        if known:
            ours = Score.over_runs(known)
            return PaperRow(number=number, result=result, differs=differs, runs=len(known), ours=ours)
    return PaperRow(number=number, result=number.results[0], differs=differs, runs=len(runs), ours=None)


def _groups(
    settings: Mapping[str, str], others: Mapping[str, str], runs: Sequence[Run]
) -> Iterator[tuple[Differences, list[Run]]]:
    """Group the runs with these settings, and the choices among the others, by their differences."""
    keys = [key for key in settings if key != "experiment"]
    runs = [run for run in runs if all(same_value(run.value(key), settings[key]) for key in keys)]
    if not runs:
        return
    config, choices = resolve_config([f"{key}={value}" for key, value in {**settings, **others}.items()])
    values = flatten_settings(config)
    choices = {group: name for group, name in choices.items() if group not in (*IGNORED_KEYS, "final_evaluation")}
    runs = [run for run in runs if all(run.choices.get(group) == name for group, name in choices.items())]
    for group in group_runs(runs, lambda run: _differing_settings(run.settings or {}, values)):
        yield {key: (ours, values[key]) for key, ours in group.settings.items()}, group.runs


def _differing_settings(settings: Mapping[str, Any], expected: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run that differ from the expected ones, of those that both have."""
    ours = flatten_settings(settings)
    compared = (key for key in expected if key in ours and key.rpartition(".")[2] not in ("path", "cache"))
    return {
        key: ours[key]
        for key in compared
        if not is_ignored(key, IGNORED_KEYS) and not same_value(ours[key], expected[key])
    }


def _format_differences(differs: Differences, max_listed: int) -> str:
    listed = [f"{key}={ours} ({paper})" for key, (ours, paper) in list(differs.items())[:max_listed]]
    more = len(differs) - len(listed)
    return ", ".join([*listed, *([f"and {more} more"] if more else [])])
