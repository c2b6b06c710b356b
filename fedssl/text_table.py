"""Tables as text (aligned, Markdown, LaTeX, comma-separated values), and as cells, from which every form is written."""

import csv
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedssl.untrusted import sanitize

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

_LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"}


_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\char34{}", "±": r"$\pm$"}
_LATEX |= {"[": "{[}", "*": "{*}"}  # behind the end of a row they would be its options

Lines = Sequence[Sequence[str]]  # the cells of every line, the header first
Positions = Collection[tuple[int, int]]  # line and column of cells that are marked; the header is line 0


def align(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Give columns equal width; the first ``left`` start, the others end, at the same place. A mark is a star."""
    lines = _changed(lines, sanitize, marked, "*{}")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position < left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Write a Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    header, *body = _changed(lines, escape_markdown, marked, "**{}**")
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *body))


def latex(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Write a ``tabular`` with the rules of the package booktabs."""
    header, *body = (" & ".join(row) + r" \\" for row in _changed(lines, escape_latex, marked, r"\textbf{{{}}}"))
    columns = "l" * left + "r" * (len(lines[0]) - left)
    rows = [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        header,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "".join(f"{row}\n" for row in rows)


def escape_markdown(text: str) -> str:
    """Text of others in Markdown: no link, image, element or cell of its own."""
    return re.sub(r"([\\`*\[\]<>|~#!])", r"\\\1", sanitize(text))


def escape_latex(text: str) -> str:
    """Text of others in LaTeX: no command, comment, formula or cell of its own."""
    return "".join(_LATEX.get(sign, sign) for sign in sanitize(text))


def _changed(lines: Lines, write: Callable[[str], str], marked: Positions, mark: str) -> list[list[str]]:
    """Write every cell so, and put those that are marked into ``mark``."""
    return [
        [mark.format(write(cell)) if (row, column) in marked else write(cell) for column, cell in enumerate(line)]
        for row, line in enumerate(lines)
    ]


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Write comma-separated values; numbers in full precision, None as nothing."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(map(_inert, row) for row in rows)
    return stream.getvalue()


def _inert(cell: object) -> object:
    """A cell of words; one that a spreadsheet would take for a formula begins with a quote."""
    if not isinstance(cell, str):
        return cell
    text = sanitize(cell)
    return f"'{text}" if re.match(r"\s*[=+\-@]", text) and not _NUMBER.fullmatch(text) else text


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
