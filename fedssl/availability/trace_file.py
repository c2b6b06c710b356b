"""Traces of clients in CSV files: a header, then lines with a client and numbers."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedssl.errors import InputError
from fedssl.safe_io import MAX_LINES_BYTES, read_text, sanitize

_MAX_DIGITS = 9  # of a client's number
_MAX = 1e15  # seconds, or a speed; float64 then still resolves an eighth of a second


def read_rows(
    file: Path, *, setting: str, header: Sequence[str], num_clients: int
) -> Iterator[tuple[str, int, list[str]]]:
    """Yield place (for errors), client and other values of every line of a CSV file; raises `InputError`.

    ``setting`` is that of the file, for errors, and ``header`` its first line, with ``client`` first.
    """
    columns = ",".join(header)
    text = read_text(file, max_bytes=MAX_LINES_BYTES)
    if text is None:
        raise InputError(f"{setting} does not exist; choose a CSV file of {columns}")
    try:
        first, *rows = list(csv.reader(io.StringIO(text), strict=True)) or [[]]
    except csv.Error as error:
        raise InputError(f"{setting} is not a CSV file ({error}); choose a CSV file of {columns}") from error
    if first != list(header):
        raise InputError(f"{setting} begins with {sanitize(','.join(first))[:80]!r}; its first line must be {columns}")
    for line, row in enumerate(rows, start=2):
        place = f"{setting}, line {line}"
        if len(row) != len(header):
            raise InputError(f"{place}, has {len(row)} values for the {len(header)} columns {columns}; correct it")
        client = row[0]
        if not (client.isascii() and client.isdigit() and len(client) <= _MAX_DIGITS):
            raise InputError(f"{place}: {sanitize(client)[:50]!r} is no client; write a whole number from 0")
        if int(client) >= num_clients:
            raise InputError(
                f"{place}: there is no client {client}; the num_clients={num_clients} clients are 0 to "
                f"{num_clients - 1}"
            )
        yield place, int(client), row[1:]


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
