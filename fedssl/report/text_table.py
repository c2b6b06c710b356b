"""A table as cells, which every form of a report is written from: text, Markdown, LaTeX, and the page."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedssl.report.tables import align, escape_markdown, latex, markdown
from fedssl.untrusted import sanitize


class TableCell(NamedTuple):
    """What stands in a place of a table.

    Attributes
    ----------
    text : str
    value : float or None
        What rows are sorted by; None: the text.
    best : bool
        Whether it is marked as the best of its column.
    """

    text: str
    value: float | None = None
    best: bool = False


def text_cell(text: str) -> TableCell:
    """A setting, or another text that may be a number."""
    try:
        value = float(text)
    except ValueError:
        return TableCell(text)
    return TableCell(text, value if math.isfinite(value) else None)


@dataclass(frozen=True)
class TableData:
    """A table of text.

    Attributes
    ----------
    title : str
    header : sequence of str
    rows : sequence of sequence of Entry
    left : int
        How many columns, the first ones, are words; the others are numbers.
    notes : mapping of str to sequence of str
        Lines under the table, by their title.
    mark_caption : str
        When a cell is marked; empty: none ever is.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    left: int
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    mark_caption: str = ""

    def without_constants(self) -> tuple["TableData", dict[str, str]]:
        """The table without the settings that are the same in all rows, of which there are several, and these."""
        columns = list(zip(*self.rows, strict=True))[: self.left] if len(self.rows) > 1 else []
        same = {place: cells[0].text for place, cells in enumerate(columns) if len({one.text for one in cells}) == 1}
        kept = [place for place in range(len(self.header)) if place not in same]
        rows = [[row[place] for place in kept] for row in self.rows]
        narrow = replace(self, header=[self.header[place] for place in kept], rows=rows, left=self.left - len(same))
        return narrow, {self.header[place]: value for place, value in same.items()}

    @property
    def lines(self) -> list[list[str]]:
        """The header and all rows as text."""
        return [list(self.header), *([one.text for one in row] for row in self.rows)]

    @property
    def marked(self) -> set[tuple[int, int]]:
        """Line and column of cells that are marked; the header is line 0."""
        cells = [(line, column, one) for line, row in enumerate(self.rows, start=1) for column, one in enumerate(row)]
        return {(line, column) for line, column, one in cells if one.best}

    def lines_below(self, bullet: str, mark: str, write: Callable[[str], str]) -> list[str]:
        """The lines under the table: what a mark says, if there is one, and the notes."""
        rule = ["", f"{mark}: {self.mark_caption}"] if self.marked else []
        blocks = [["", title, "", *(bullet + write(line) for line in lines)] for title, lines in self.notes.items()]
        return [*rule, *(line for block in blocks for line in block)]


class TextTable(ABC):
    """A table that can be written in every form."""

    @abstractmethod
    def data(self) -> TableData:
        """The table as cells."""

    @abstractmethod
    def csv(self) -> str:
        """As comma-separated values: numbers in full precision."""

    def text(self) -> str:
        """For the terminal."""
        data = self.data()
        table = align(data.lines, left=data.left, marked=data.marked)
        return "\n".join([table, *data.lines_below("  ", "*", sanitize)])

    def markdown(self) -> str:
        """As a Markdown table."""
        data = self.data()
        table = markdown(data.lines, left=data.left, marked=data.marked)
        return table + "".join(f"{line}\n" for line in data.lines_below("- ", "Bold", escape_markdown))

    def latex(self) -> str:
        """As a table for LaTeX; what stands below it is a comment."""
        data = self.data()
        below = [line for line in data.lines_below("- ", "bold", sanitize) if line]
        head = r"% \usepackage{booktabs}" + "\n"
        return head + latex(data.lines, left=data.left, marked=data.marked) + "".join(f"% {line}\n" for line in below)
