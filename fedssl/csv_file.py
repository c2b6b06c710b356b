"""CSV files with a client per line: partitions, and traces of clients."""

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

from fedssl.errors import InputError
from fedssl.safe_io import MAX_LINES_BYTES, read_text, sanitize

_MAX_DIGITS = 9  # of a client's number
_MAX = 1e15  # seconds, or a speed; float64 then still resolves an eighth of a second


def read_rows(file: Path, *headers: str, setting: str, content: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield place (for errors) and values by column of every line of a CSV file; raises `InputError`.

    ``headers`` are the possible first lines, in any order of columns. ``setting`` and ``content`` are for errors.
    """
    text = read_text(file, max_bytes=MAX_LINES_BYTES)
    if text is None:
        raise InputError(f"{setting} does not exist; choose a CSV file {content}")
    try:
        names, *rows = list(csv.reader(io.StringIO(text), strict=True)) or [[]]
    except csv.Error as error:
        raise InputError(f"{setting} is not a CSV file ({error}); choose a CSV file {content}") from error
    if sorted(names) not in [sorted(header.split(",")) for header in headers]:
        found = sanitize(",".join(names))[:80]
        raise InputError(f"{setting} begins with {found!r}; its first line must be {', or '.join(headers)}")
    for line, row in enumerate(rows, start=2):
        place = f"{setting}, line {line}"
        if len(row) != len(names):
            columns = ",".join(names)
            raise InputError(f"{place}, has {len(row)} values for the {len(names)} columns {columns}; correct it")
        yield place, dict(zip(names, row, strict=True))


def count_in(text: str, name: str, place: str) -> int:
    """Return a whole number of a line; raises `InputError`."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InputError(f"{place}: {sanitize(text)[:50]!r} is no {name}; write a whole number from 0")
    return int(text)


def client_in(text: str, place: str, *, num_clients: int) -> int:
    """Return the client of a line; raises `InputError`."""
    client = count_in(text, "client", place)
    if client >= num_clients:
        raise InputError(f"{place}: there is no client {client}; the {num_clients=} clients are 0 to {num_clients - 1}")
    return client


def number_in(text: str, name: str, place: str, *, minimum: float) -> float:
    """Return a number of a line; raises `InputError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not minimum <= value <= _MAX:
        raise InputError(
            f"{place}: {name}={sanitize(text)[:50]} must be a number from {minimum:g} to {_MAX:g}; correct it"
        )
    return value
