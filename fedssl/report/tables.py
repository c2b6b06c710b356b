"""Tables as text: aligned for the terminal, as Markdown, and as comma-separated values."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from fedssl.untrusted import printable

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Lines = Sequence[Sequence[str]]  # the cells of every line, the header first


def align(lines: Lines, *, left: int) -> str:
    """Give columns equal width; the first ``left`` start, the others end, at the same place."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position < left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(lines: Lines, *, left: int) -> str:
    """Write a Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    header, *body = lines
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    rows = [[escaped(cell) for cell in line] for line in (header, *body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def escaped(text: str) -> str:
    """Text of others in Markdown: no link, picture, element or cell of its own."""
    return re.sub(r"([\\`*\[\]<>|~#!])", r"\\\1", printable(text))


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Write comma-separated values; numbers in full precision, None as nothing."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(map(_inert, row) for row in rows)
    return stream.getvalue()


def _inert(cell: object) -> object:
    """A cell of words; one that a spreadsheet would take for a formula begins with a quote."""
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if re.match(r"\s*[=+\-@]", text) and not _NUMBER.fullmatch(text) else text
