"""Tables of CSV files and lines of JSON, and image files that a column of a table names."""

import logging
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache, reduce
from pathlib import Path, PureWindowsPath

import pyarrow as pa
from pyarrow import csv, json

from fedssl.csv_file import csv_text, decoded
from fedssl.datasets.formats import SUFFIXES as IMAGE_SUFFIXES
from fedssl.datasets.listing import ending_of, exists, is_file, is_folder, list_files
from fedssl.errors import InputError, shortened
from fedssl.logs import log_once

SUFFIXES = (".csv", ".tsv", ".jsonl")
_NAME = re.compile(r"\s*-?0\d")  # such as 01, which is not 1
_NAME_OR_INEXACT = re.compile(r"\s*(-?0\d|\d+[eE]\d+\s*$|-?\d{16})")  # 1e3 is not 1000; programs write 1e+03


def manifest_table(file: Path) -> pa.Table:
    """Return the table of a file with objects of JSON, or whose columns are separated by one of ``, ; |`` or tabs."""
    return _table(file, file.stat().st_mtime_ns)


def listed_classes(folder: Path, paths: Sequence[str]) -> list[str]:
    """Return the classes of the images ``paths`` of a split by the list in its folder; none without a list.

    Tiny ImageNet has ``val/val_annotations.txt``, whose lines begin with the name of an image and its class.
    """
    file = folder / f"{folder.name}_annotations.txt"
    if not is_file(file):
        return []
    lines = (line.split("\t") for line in decoded(file).splitlines())
    classes = {name: values[0].strip() for name, *values in lines if values}
    names = [path.rpartition("/")[2] for path in paths]
    missing = [name for name in names if name not in classes]
    if missing and len(missing) < len(names):
        raise InputError(f"{file} has no class of {shortened(missing)}; complete it, or delete it for no labels")
    if not missing and len({*names}) < len(names):
        raise InputError(f"{file} has names that several images below {folder} have; give each image another name")
    return [] if missing else [classes[name] for name in names]


def named_file(value: str, folder: Path) -> Path:
    """Return the file that a table in ``folder`` names, also without its ending; Windows writes backslashes.

    A name may begin with that of the folder.
    """
    path = folder / value.strip()
    if "\\" in value and not exists(path):
        windows = PureWindowsPath(value.strip())
        path = Path(windows.as_posix()) if windows.drive else folder / windows.as_posix()
    name, text = folder.name or folder.absolute().name, value.strip().replace("\\", "/")
    if name and text.startswith(f"{name}/") and not exists(path):  # as of CheXpert
        path = folder / text.removeprefix(f"{name}/")
    if not value.isascii() and not exists(path):  # macOS writes the letters of names and their accents one by one
        path = reduce(_in_its_form, path.parts, Path())
    if names_image(path.name) or is_file(path) or not is_folder(path.parent):
        return path
    return _by_stem(path.parent, path.parent.stat().st_mtime_ns).get(path.name) or path


def _in_its_form(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder, in the form of its accents that exists."""
    forms = (folder / unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next((path for path in (folder / name, *forms) if exists(path)), folder / name)


def found_below(paths: Sequence[Path | None], folder: Path) -> Sequence[Path | None]:
    """Return the paths, those that are absent from the folder itself by the files of their names in its subfolders.

    Lists of large data sets have names alone, and their images are in ``images_001/images``. If a name is that of
    several files, such as an image and its mask, no file is searched.
    """
    absent = [place for place, path in enumerate(paths) if path and path.parent == folder and not is_file(path)]
    if not absent:
        return paths
    below = dict[str, list[Path]]()
    for listed in list_files(folder, IMAGE_SUFFIXES).paths:
        file = folder / listed
        for name in {file.name, file.name[: -len(ending_of(file.name))]}:
            below.setdefault(name, []).append(file)
    found = {place: below[path.name] for place in absent if (path := paths[place]) and path.name in below}
    several = [files for files in found.values() if len(files) > 1]
    if several:
        line = f"{len(several):,} names are those of several images below {folder}, such as {shortened(several[0])}: "
        log_once(logging.WARNING, f"{line}write paths in place of names")
    elif found:
        folders = sorted({str(file.parent.relative_to(folder)) for (file,) in found.values()})
        log_once(logging.INFO, f"{folder}: {len(found):,} of {len(paths):,} images are in {shortened(folders)}")
        paths = [found[place][0] if place in found else path for place, path in enumerate(paths)]
    return paths


@lru_cache(maxsize=64)
def _by_stem(folder: Path, _modified: int) -> dict[str, Path | None]:
    """Return the image files of a folder by their names without endings; None for several of one name."""
    found: dict[str, Path | None] = {}
    for file in folder.iterdir():
        if ending := names_image(file.name) and ending_of(file.name):
            stem = file.name[: -len(ending)]
            found[stem] = None if stem in found else file
    return found


def names_image(text: str) -> bool:
    """Return whether a text has the ending of an image file."""
    return ending_of(text.strip()) in IMAGE_SUFFIXES


@lru_cache(maxsize=4)
def _table(file: Path, _modified: int) -> pa.Table:
    if file.suffix.lower() == ".jsonl":
        content = decoded(file).encode()
        table = json.read_json(pa.BufferReader(content), json.ReadOptions(block_size=len(content) + 1))  # long lines
        dates = [column.cast(pa.string()) if pa.types.is_temporal(column.type) else column for column in table.columns]
        return pa.table(dates, table.column_names)
    text, delimiter = csv_text(file)
    text = re.sub(rf"^[{re.escape(delimiter)} \r]+\n", "", text + "\n", flags=re.MULTILINE)  # empty lines of Excel
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = csv.ConvertOptions(strings_can_be_null=True)
    table = csv.read_csv(pa.BufferReader(text.encode()), parse_options=parse, convert_options=convert)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(table.column_names, pa.string()))
    texts = csv.read_csv(pa.BufferReader(text.encode()), parse_options=parse, convert_options=convert)
    names = [name.strip() for name in table.column_names]
    named = [name for name in names if name]  # Excel writes further columns that are empty
    if found := next(filter(names_image, names), None):
        raise pa.ArrowInvalid(f"its first line has the file {found}; write names of the columns above, as path,label")
    if len({*named}) < len(named):
        raise pa.ArrowInvalid(f"two of its columns {', '.join(names)} have the same name")
    columns = zip(names, table.columns, texts.columns, strict=True)
    return pa.table([_as_written(f"{file}: {name}", *both) for name, *both in columns if name], named)


def _as_written(name: str, column: pa.ChunkedArray, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of numbers or truth values, or else its texts, also for dates and names such as 01.

    A blank cell of texts is an empty text. Words that are read as missing are logged.
    """
    kind = column.type
    names = _NAME if pa.types.is_integer(kind) else _NAME_OR_INEXACT if pa.types.is_floating(kind) else None
    if (pa.types.is_string(kind) and not column.null_count) or pa.types.is_boolean(kind):
        return column
    if names is not None and not any(map(names.match, texts.to_pylist())):
        return column
    cells = list(zip(texts.to_pylist(), column.is_valid().to_pylist(), strict=True))
    words = [text for text, is_valid in cells if text and not is_valid]
    if words and pa.types.is_string(kind):
        line = f"{name}: {len(words):,} values {', '.join(sorted(set(words)))} are read as missing; write names "
        log_once(logging.WARNING, f"{line}differently")
    return pa.chunked_array([[text if is_valid or not text else None for text, is_valid in cells]], pa.string())
