"""The papers' numbers: what stands in the tables of the five papers, by the settings that make a row and a column.

They lie in ``papers/*.yaml``, one file per paper, as printed: a table has columns and rows, each with settings as on
the command line, and a column the name of the result (``linear``) that holds its numbers. ``experiment=PAPER/TABLE``
with the settings of a row and a column is the run that a number is of.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.config.overrides import nearest
from fedssl.errors import InputError
from fedssl.untrusted import read_yaml

PAPERS_FOLDER = Path(__file__).parent / "papers"


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
    spread : float or None
        Standard deviation as the paper has it; None: it gives none.
    """

    settings: dict[str, str]
    encoder_kind: str
    results: tuple[str, ...]
    value: float
    spread: float | None


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
        raise InputError(f"there is no table {name!r}{nearest(name, names)}; choose one of {', '.join(names)}")
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
            value, _, spread = str(number).partition(" ± ")
            yield PaperNumber(
                settings={key: str(setting) for key, setting in settings.items() if key != "result"},
                encoder_kind=row.get("encoder_kind", "federated"),
                results=tuple(dict.fromkeys((f"{own.get(protocol, protocol)}{at}{where}", column["result"]))),
                value=float(value),
                spread=float(spread) if spread else None,
            )
