"""Tables of cells, as aligned text, Markdown, LaTeX and comma-separated values."""

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedssl.errors import sanitize
from fedssl.safe_io import valid_text

MAX_TEXT_COLUMNS = 10
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_FORMULA = re.compile(r"[\s\u200b-\u200d\ufeff]*[=+\-@]")
_SIGNS = re.compile(r"[\s+\-@]*")  # no formula, but perhaps a class
# Control characters, separators of lines, overrides of the direction, and surrogates that stand for no byte.
_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]")

_LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\char34{}", "±": r"$\pm$"}
_LATEX |= {"[": "{[}", "*": "{*}"}  # after the end of a row they would be its options

Lines = Sequence[Sequence[str]]  # cells, the header first
Positions = Collection[tuple[int, int]]  # line and column of marked cells; the header is line 0


def align(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Align the first ``left`` columns to the left, the others to the right. A mark is a star."""
    lines = _escape(lines, sanitize, marked, "*{}")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Return a Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    header, *body = _escape(lines, escape_markdown, marked, "**{}**")
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *body))


def latex(lines: Lines, *, left: int, marked: Positions = ()) -> str:
    """Return a ``tabular`` with the rules of the package booktabs."""
    header, *body = (" & ".join(row) + r" \\" for row in _escape(lines, escape_latex, marked, r"\textbf{{{}}}"))
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
    """Escape Markdown: no link, image, element or cell."""
    return re.sub(r"([\\`*\[\]<>|~#!])", r"\\\1", sanitize(text))


def escape_latex(text: str) -> str:
    """Escape LaTeX: no command, comment, formula or cell."""
    return "".join(_LATEX.get(sign, sign) for sign in sanitize(text))


def _escape(lines: Lines, escape: Callable[[str], str], marked: Positions, mark: str) -> list[list[str]]:
    return [
        [mark.format(escape(cell)) if (row, column) in marked else escape(cell) for column, cell in enumerate(line)]
        for row, line in enumerate(lines)
    ]


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return comma-separated values: numbers in full precision, None as an empty cell."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(
        [csv_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return stream.getvalue()


def csv_cell(text: str) -> str:
    """Return a text as a cell: a quote before what a spreadsheet would evaluate, and no control character.

    Spaces and joiners of any script are kept, because they are parts of names.
    """
    text = _without_controls(text)
    is_formula = _FORMULA.match(text) and not _NUMBER.fullmatch(text) and not _SIGNS.fullmatch(text)
    return f"'{text}" if is_formula else text


def csv_path(path: str) -> str:
    """Return a path as a cell, as `csv_cell`, but with ``./`` in place of the quote, which keeps its meaning."""
    path = _without_controls(path)
    return f"./{path}" if _FORMULA.match(path) else path


def _without_controls(text: str) -> str:
    return text if text.isascii() and text.isprintable() else valid_text(_UNSAFE.sub(" ", text))


class TableCell(NamedTuple):
    """A cell of a table."""

    text: str
    value: float | None = None  # sort key; None to sort by the text
    best: bool = False  # marked as the best of its column
    numbers: tuple[object, ...] | None = None  # cells of a CSV file, in full precision; None: the text


def text_cell(text: str) -> TableCell:
    """Return the cell of a text, which is sorted by its value if it is a number."""
    try:
        value = float(text)
    except ValueError:
        return TableCell(text)
    return TableCell(text, value if math.isfinite(value) else None)


@dataclass(frozen=True)
class TextTable:
    """A table that is written in several formats."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    left: int  # number of text columns, which come before those of numbers
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # title to lines below the table
    mark_caption: str = ""  # meaning of a mark; empty if there are none
    csv_header: Sequence[str] = ()  # names of `TableCell.numbers`

    def without_constants(self) -> tuple["TextTable", dict[str, str]]:
        """Split off the text columns that are the same in all rows, if there are several rows."""
        columns = list(zip(*self.rows, strict=True))[: self.left] if len(self.rows) > 1 else []
        same = {index: cells[0].text for index, cells in enumerate(columns) if len({cell.text for cell in cells}) == 1}
        kept = [index for index in range(len(self.header)) if index not in same]
        rows = [[row[index] for index in kept] for row in self.rows]
        narrow = replace(self, header=[self.header[index] for index in kept], rows=rows, left=self.left - len(same))
        return narrow, {self.header[index]: value for index, value in same.items()}

    def narrow(self) -> "TextTable":
        """Join text columns in which most rows agree or are empty, if there are more than `MAX_TEXT_COLUMNS`.

        The joined column has the values that differ from the most frequent ones, which are a note.
        """
        if self.left <= MAX_TEXT_COLUMNS:
            return self
        usual = {}
        for index in range(self.left):
            texts = [row[index].text for row in self.rows]
            counts = Counter(filter(None, texts))
            value, count = counts.most_common(1)[0] if counts else ("", 0)
            if 2 * (count + texts.count("")) > len(texts):
                usual[index] = value
        shown, results = [index for index in range(self.left) if index not in usual], slice(self.left, None)
        rows = []
        for row in self.rows:
            others = [
                f"{self.header[index]}={row[index].text}"
                for index, value in usual.items()
                if row[index].text not in ("", value)
            ]
            rows.append([*(row[index] for index in shown), text_cell(" ".join(others)), *row[results]])
        return replace(
            self,
            header=[*(self.header[index] for index in shown), "other settings", *self.header[results]],
            rows=rows,
            left=len(shown) + 1,
            notes={
                "settings, if there are no others:": [f"{self.header[i]}={value}" for i, value in usual.items()],
                **self.notes,
            },
        )

    def text(self) -> str:
        """Return the table for a terminal."""
        shown = self.narrow()
        table = align(shown._lines, left=shown.left, marked=shown._marked)
        return "\n".join([table, *shown._lines_below("  ", "*", sanitize)])

    def markdown(self) -> str:
        """Return a Markdown table."""
        shown = self.narrow()
        table = markdown(shown._lines, left=shown.left, marked=shown._marked)
        return table + "".join(f"{line}\n" for line in shown._lines_below("- ", "Bold", escape_markdown))

    def latex(self) -> str:
        """Return a LaTeX table, with the lines below it as comments."""
        shown = self.narrow()
        below = [line for line in shown._lines_below("- ", "bold", sanitize) if line]
        table = latex(shown._lines, left=shown.left, marked=shown._marked)
        return r"% \usepackage{booktabs}" + "\n" + table + "".join(f"% {line}\n" for line in below)

    def csv(self) -> str:
        """Return comma-separated values: numbers in full precision."""
        cells = ((cell.numbers or (cell.text,) for cell in row) for row in self.rows)
        return to_csv([self.csv_header, *(itertools.chain.from_iterable(row) for row in cells)])

    @property
    def _lines(self) -> list[list[str]]:
        return [list(self.header), *([cell.text for cell in row] for row in self.rows)]

    @property
    def _marked(self) -> set[tuple[int, int]]:
        return {(line, column) for line, row in enumerate(self.rows, 1) for column, cell in enumerate(row) if cell.best}

    def _lines_below(self, bullet: str, mark: str, escape: Callable[[str], str]) -> list[str]:
        """Return the lines below the table: the meaning of a mark, if there is one, and the notes."""
        caption = ["", f"{mark}: {self.mark_caption}"] if self._marked else []
        blocks = [["", title, "", *(bullet + escape(line) for line in lines)] for title, lines in self.notes.items()]
        return [*caption, *(line for block in blocks for line in block)]
