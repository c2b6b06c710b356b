"""Tables as text: aligned for the terminal, as Markdown, and as comma-separated values."""

import csv
import io
from collections.abc import Iterable, Sequence

Lines = Sequence[Sequence[str]]  # the cells of every line, the header first


def align(lines: Lines, *, left: int) -> str:
    """Give columns equal width; the first ``left`` start, the others end, at the same place."""
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
    rows = (" | ".join(cell.replace("|", r"\|") for cell in line) for line in (header, rule, *body))
    return "".join(f"| {row} |\n" for row in rows)


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Write comma-separated values; numbers in full precision, None as nothing."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
