"""CSV files: partitions, traces of clients, and targets of images."""

import codecs
import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedssl.errors import InputError, sanitize
from fedssl.safe_io import MAX_LINES_BYTES, corrupt_file_error, read_bytes

_MAX_DIGITS = 9  # of a client's number
_MAX = 1e15  # seconds, or a speed; float64 then still resolves an eighth of a second


def decoded(file: Path) -> str:
    """Return text in UTF-8, or as Excel saves it: in UTF-16 or Windows' code page of Western Europe."""
    content = read_bytes(file, max_bytes=MAX_LINES_BYTES)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def csv_text(file: Path) -> tuple[str, str]:
    """Return the text of a file from its first line on, and what separates its columns."""
    text = re.sub(r"\Asep=.\s+", "", decoded(file).lstrip("\r\n "))  # of Excel
    first = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    return text, max(",;\t|", key=first.count)


def read_lines(file: Path, *, setting: str, content: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns of a CSV file, and the values of every line; raises `InputError`.

    ``setting`` and ``content`` are for errors.
    """
    try:
        text, delimiter = csv_text(file)
        names, *rows = list(csv.reader(io.StringIO(text), strict=True, delimiter=delimiter)) or [[]]
    except FileNotFoundError as error:
        raise InputError(f"{setting} does not exist; choose a CSV file {content}") from error
    except (OSError, ValueError) as error:  # ValueError: a name may contain a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise corrupt_file_error(file, sanitize(reason)) from error
    except csv.Error as error:
        raise InputError(f"{setting} is not a CSV file ({error}); choose a CSV file {content}") from error
    while rows and not rows[-1]:  # blank lines at the end
        rows.pop()
    return [name.strip() for name in names], rows


def read_rows(file: Path, *headers: str, setting: str, content: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield place (for errors) and values by column of every line of a CSV file; raises `InputError`.

    ``headers`` are the possible first lines, in any order of columns. ``setting`` and ``content`` are for errors.
    """
    names, rows = read_lines(file, setting=setting, content=content)
    if sorted(names) not in [sorted(header.split(",")) for header in headers]:
        found = sanitize(",".join(names))[:80]
        raise InputError(f"{setting} begins with {found!r}; its first line must be {', or '.join(headers)}")
    for line, row in enumerate(rows, start=2):
        place = f"{setting}, line {line}"
        if not row and len(names) > 1:
            continue
        values = row or [""]  # of one column, an empty value
        check_line(place, values, names)
        yield place, dict(zip(names, values, strict=True))


def check_line(place: str, row: Sequence[str], names: Sequence[str]) -> None:
    """Raise an `InputError` unless a line has a value for every column."""
    if len(row) != len(names):
        columns = sanitize(",".join(names))[:80]
        raise InputError(f"{place}, has {len(row)} values for the {len(names)} columns {columns}; correct it")


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
