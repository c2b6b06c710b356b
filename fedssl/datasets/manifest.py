"""Tables of CSV files and lines of JSON, and image files that a column of a table names."""

import os
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from pyarrow import csv, json

from fedssl.csv_file import csv_text, decoded
from fedssl.datasets.formats import SUFFIXES as IMAGE_SUFFIXES
from fedssl.datasets.listing import ending_of

SUFFIXES = (".csv", ".tsv", ".jsonl")


def manifest_table(file: Path) -> pa.Table:
    """Return the table of a file with objects of JSON, or whose columns are separated by one of ``, ; |`` or tabs."""
    return _table(file, file.stat().st_mtime_ns)


def named_file(value: str, folder: Path) -> Path:
    """Return the file that a table in ``folder`` names; Windows writes backslashes."""
    path = folder / value.strip()
    return folder / value.strip().replace("\\", os.sep) if "\\" in value and not path.exists() else path


def names_image(text: str) -> bool:
    """Return whether a text has the ending of an image file."""
    return ending_of(text.strip()) in IMAGE_SUFFIXES


@lru_cache(maxsize=4)
def _table(file: Path, _modified: int) -> pa.Table:
    if file.suffix.lower() == ".jsonl":
        content = decoded(file).encode()
        return json.read_json(pa.BufferReader(content), json.ReadOptions(block_size=len(content) + 1))  # long lines
    text, delimiter = csv_text(file)
    table = csv.read_csv(
        pa.BufferReader(text.encode()),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=csv.ConvertOptions(strings_can_be_null=True),
    )
    names = [name.strip() for name in table.column_names]
    if found := next(filter(names_image, names), None):
        raise pa.ArrowInvalid(f"its first line has the file {found}; write names of the columns above, as path,label")
    if len({*names}) < len(names):
        raise pa.ArrowInvalid(f"two of its columns {', '.join(names)} have the same name")
    return table.rename_columns(names)
