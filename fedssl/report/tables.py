"""Tables as text: aligned for the terminal, as Markdown, for LaTeX, and as comma-separated values."""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Sequence

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
