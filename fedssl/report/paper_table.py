"""A table of a paper beside runs of one's own: ``fedssl-report --paper l_dawa.table2 DIR...``.

The papers' numbers are in ``papers/*.yaml``, one file per paper, as printed: a table has columns and rows, each with
settings as on the command line, and a column the name of the result (``linear``) that holds its numbers.

A run belongs to a number of the paper if every choice that it was made with (strategy, method, data set, ...) is that
of ``experiment=PAPER/TABLE`` with the settings of the number, whoever made it, and it has these settings. Other
differences of its settings (``rounds=10`` for 200) are shown beside the result, and runs that differ so are kept apart.
Results are found by their name; how they were computed is not compared.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.config.compose import flatten, resolve_config
from fedssl.config.overrides import did_you_mean
from fedssl.errors import InputError
from fedssl.evaluation.scores import ACCURACY, Score
from fedssl.runs.groups import IGNORED, first_of_each_seed, group_runs, is_ignored, same_value, score_over_seeds
from fedssl.runs.run import Run, flatten_settings
from fedssl.text_table import TableCell, TableData, TextTable, text_cell, to_csv
from fedssl.untrusted import read_yaml, sanitize

PAPERS_FOLDER = Path(__file__).parent / "papers"
# What may differ between runs of one number of a paper: nothing, or nothing that the paper speaks of.
IGNORED_KEYS = {*IGNORED, "evaluation", "experiment", "early_stopping"}
MAX_LISTED = 4  # differences that a line names
NOT_RUN, NOT_EVALUATED = "not run", "not evaluated"

Differences = dict[str, tuple[str, str]]  # key to the value in the runs and in the experiment


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """A number of a paper.

    Attributes
    ----------
    settings : dict
        Key to value, as on the command line: what tells this run from others of the table.
    encoder_kind : str
        Whose number it is: of the ``"federated"`` or of the ``"untrained"`` encoder.
    results : tuple of str
        Names of the result in ``summary.json``: by the paper's own protocol, and by the one that we have for all.
    value : float
        In per cent.
    std : float or None
        Standard deviation as the paper has it; None: it gives none.
    """

    settings: dict[str, str]
    encoder_kind: str
    results: tuple[str, ...]
    value: float
    std: float | None


def table_names() -> list[str]:
    """All tables there are, as ``paper.table``."""
    return [f"{file.stem}.{table}" for file in sorted(PAPERS_FOLDER.glob("*.yaml")) for table in _read(file)["tables"]]


def read_table(name: str) -> list[PaperNumber]:
    """The numbers of a table, row by row.

    Raises
    ------
    InputError
        There is no such table.
    """
    names = table_names()
    if name not in names:
        raise InputError(f"there is no table {name!r}{did_you_mean(name, names)}; choose one of {', '.join(names)}")
    paper, _, table = name.partition(".")
    found = _read(PAPERS_FOLDER / f"{paper}.yaml")
    return list(_cells(found["tables"][table], found["own"]))


@functools.cache
def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(file, dict)
    return found


def _cells(table: dict[str, Any], own: dict[str, str]) -> Iterator[PaperNumber]:
    for row in table["rows"]:
        for column, number in zip(table["columns"], row["numbers"], strict=True):
            if number is None:  # the paper gives none
                continue
            settings = {**column, **row["settings"]}
            protocol, at, where = column["result"].partition("@")
            value, _, std = str(number).partition(" ± ")
            yield PaperNumber(
                settings={key: str(setting) for key, setting in settings.items() if key != "result"},
                encoder_kind=row.get("encoder_kind", "federated"),
                results=tuple(dict.fromkeys((f"{own.get(protocol, protocol)}{at}{where}", column["result"]))),
                value=float(value),
                std=float(std) if std else None,
            )


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A number of the paper, and what runs with the same settings but for ``differs`` have.

    Attributes
    ----------
    number : PaperNumber
    result : str
        Name of the result that is compared, one of the number's.
    differs : dict
        Key to the value in the runs and in the experiment.
    runs : int
        Number of finished runs with these settings, one for every seed.
    ours : Score or None
        Mean and standard deviation over seeds; None: there is no run, or none that has such a result.
    """

    number: PaperNumber
    result: str
    differs: Differences
    runs: int
    ours: Score | None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points of per cent."""
        return None if self.ours is None else 100 * self.ours.value - self.number.value


@dataclass(frozen=True)
class PaperTable(TextTable):
    """A paper's table with ours beside it, in the order of the paper.

    Attributes
    ----------
    name : str
        As in ``l_dawa.table2``.
    lines : list of PaperRow
    others : list of str
        Folders of finished runs that belong to no number of the table.
    """

    name: str
    lines: list[PaperRow]
    others: list[str]

    def data(self) -> TableData:
        """The table as cells; accuracies in per cent."""
        header = [*self._keys, "differs", "result", "paper (%)", "ours (%)", "difference", "runs"]
        notes = {f"finished runs that belong to no row of {self.name}:": self.others} if self.others else {}
        return TableData(
            f"Beside {self.name}", header, [*map(self._row, self.lines)], left=len(self._keys) + 2, notes=notes
        )

    def csv(self) -> str:
        """As comma-separated values; accuracies in per cent, in full precision."""
        numbers = ("paper", "paper_std", "ours", "ours_std", "difference")
        rows: list[list[object]] = [[*self._keys, "differs", "result", *numbers, "runs"]]
        for line in self.lines:
            ours = line.ours and 100 * line.ours.value
            std = line.ours and line.ours.std and 100 * line.ours.std
            paper = (line.number.value, line.number.std)
            settings = self._settings(line, told=len(line.differs))
            rows.append([*settings, *paper, ours, std, line.difference, line.runs])
        return to_csv(rows)

    @property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for line in self.lines for key in line.number.settings))

    def _settings(self, line: PaperRow, *, told: int) -> list[str]:
        settings = [line.number.settings.get(key, "") for key in self._keys]
        whose = "" if line.number.encoder_kind == "federated" else f" ({line.number.encoder_kind})"
        return [*settings, _told(line.differs, told), line.result + whose]

    def _row(self, line: PaperRow) -> list[TableCell]:
        paper = f"{line.number.value:.2f}" + ("" if line.number.std is None else f" ± {line.number.std:.2f}")
        ours = line.ours.number if line.ours else NOT_EVALUATED if line.runs else NOT_RUN
        difference = "" if line.difference is None else f"{round(line.difference, 1) + 0.0:+.1f}"  # + 0.0: no -0.0
        return [
            *map(text_cell, self._settings(line, told=MAX_LISTED)),
            TableCell(paper, line.number.value),
            TableCell(ours, None if line.ours is None else line.ours.value),
            TableCell(difference, line.difference),
            text_cell(str(line.runs or "")),
        ]


def paper_table(name: str, runs: Sequence[Run]) -> PaperTable:
    """Set runs beside a table of a paper.

    Parameters
    ----------
    name : str
        A paper and a table, such as ``l_dawa.table2``.
    runs : sequence of Run
        Those that did not finish are left out.

    Raises
    ------
    InputError
        There is no such table.
    """
    experiment, finished = name.replace(".", "/"), [run for run in runs if run.finished and run.settings is not None]
    matched: dict[frozenset[tuple[str, str]], list[tuple[Differences, list[Run]]]] = {}
    lines = []
    for number in read_table(name):
        same = frozenset(number.settings.items())
        if same not in matched:
            matched[same] = list(_groups({"experiment": experiment, **number.settings}, finished))
        found = [_line(number, differs, group) for differs, group in matched[same]]
        lines += found or [PaperRow(number=number, result=number.results[0], differs={}, runs=0, ours=None)]
    belong = {run.folder for groups in matched.values() for _, group in groups for run in group}
    return PaperTable(name, lines, [str(run.folder) for run in finished if run.folder not in belong])


def _line(number: PaperNumber, differs: Differences, runs: Sequence[Run]) -> PaperRow:
    runs = first_of_each_seed(runs)
    for result in number.results:
        scores = [run.results_of(number.encoder_kind).get(result) for run in runs]
        values = [score.value for score in scores if score is not None and score.unit == ACCURACY]
        if values:
            ours = score_over_seeds(values)
            return PaperRow(number=number, result=result, differs=differs, runs=len(values), ours=ours)
    return PaperRow(number=number, result=number.results[0], differs=differs, runs=len(runs), ours=None)


def _groups(settings: Mapping[str, str], runs: Sequence[Run]) -> Iterator[tuple[Differences, list[Run]]]:
    """The runs with these settings, those together that have the same differences."""
    keys = [key for key in settings if key != "experiment"]
    runs = [run for run in runs if all(same_value(run.value(key), settings[key]) for key in keys)]
    if not runs:
        return
    config, choices = resolve_config([f"{key}={value}" for key, value in settings.items()])
    values = {key: sanitize(value) for key, value in flatten(config)}
    choices = {group: name for group, name in choices.items() if group not in IGNORED_KEYS}
    runs = [run for run in runs if all(run.choices.get(group) == name for group, name in choices.items())]
    for group in group_runs(runs, lambda run: _differing_settings(run.settings or {}, values)):
        yield {key: (ours, values[key]) for key, ours in group.settings.items()}, group.runs


def _differing_settings(settings: Mapping[str, Any], expected: Mapping[str, str]) -> dict[str, str]:
    """Settings of a run with other values than expected; those that one of the two does not have are left out."""
    ours = flatten_settings(settings)
    return {
        key: ours[key]
        for key, value in expected.items()
        if key in ours and not is_ignored(key, IGNORED_KEYS) and not _is_place(key) and not same_value(ours[key], value)
    }


def _is_place(key: str) -> bool:
    """Whether a setting says where images lie."""
    return key.rpartition(".")[2] in ("path", "cache")


def _told(differs: Mapping[str, tuple[str, str]], max_shown: int) -> str:
    told = [f"{key}={ours} ({paper})" for key, (ours, paper) in list(differs.items())[:max_shown]]
    more = len(differs) - len(told)
    return ", ".join([*told, *([f"and {more} more"] if more else [])])
