"""Tar shards of WebDataset as tables: one row per sample, whose files have names that begin with its key.

``n01/0001.jpg`` and ``n01/0001.cls`` are the sample ``n01/0001``. Its images are read where they are in the file, and
its small texts (`_TEXTS`) become columns, as do the values of a ``json``. If a folder of the keys names a split, it is
the column ``split``, and ``folder`` has the folders below it. Nothing is extracted or unpickled, and links
and other special members are left out, so that the names of members have no effect on the file system.
"""

import json
import logging
import os
import tarfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedssl.datasets.formats import SUFFIXES as IMAGE_SUFFIXES
from fedssl.datasets.listing import ending_of, is_hidden, log_once
from fedssl.datasets.splits import split_of
from fedssl.safe_io import sanitize

KEY = "__key__"  # column of the names of samples
ANY_IMAGE = "__image__"  # column of the images of all endings, if no sample has two
PLACE = pa.struct([("offset", pa.int64()), ("length", pa.int64())])  # of an image in the file
_TEXTS = ("cls", "txt", "json", "id", "label")
_MAX_TEXT, _MAX_ENDINGS = 2**20, 64


def is_shard(file: Path) -> bool:
    """Return whether a file is a shard by its name."""
    return file.suffix.lower() == ".tar"


def shard_table(file: Path) -> pa.Table:
    """Return the samples of a file, which is read once; `pyarrow.ArrowInvalid` if it is damaged."""
    return _table(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def _table(file: Path, _modified: int) -> pa.Table:
    try:
        with tarfile.open(file, "r:") as archive:
            members = [member for member in archive if member.isreg() and not member.issparse()]
            _check_end(file, archive.offset)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise pa.ArrowInvalid(f"it is no uncompressed tar file: {error}") from error
    named = {member.name.removeprefix("./"): member for member in members}  # the last of several with a name
    named = {name: member for name, member in named.items() if not any(map(is_hidden, {*_parts(name)} - {".", ".."}))}
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for (key, ending), member in zip(_keyed(list(named)), named.values(), strict=True):
        if ending in _TEXTS or _is_image(ending):
            samples.setdefault(key, {})[ending] = member
    rows, num_images = [], 0
    for row, number in _rows(file, samples):
        rows.append(row)
        num_images = max(num_images, number)
    names = dict.fromkeys(name for row in rows for name in row)
    if num_images > 1:
        names.pop(ANY_IMAGE)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _check_end(file: Path, end: int) -> None:
    """Raise a `tarfile.TarError` unless the rest of a file is empty: the library ignores what it cannot read."""
    with file.open("rb") as stream:
        stream.seek(end)
        content = stream.read(tarfile.RECORDSIZE)
        if not content:
            log_once(logging.WARNING, sanitize(f"{file} has no end: it may be cut, and images may be missing"))
        while content:
            if content.strip(b"\0"):
                raise tarfile.ReadError(f"it is cut or damaged at byte {end:,}, or several files are joined")
            content = stream.read(tarfile.RECORDSIZE)


def _keyed(names: list[str]) -> list[tuple[str, str]]:
    """Return key and ending of each name: parted at the first dot, as in WebDataset, or the last if keys have dots."""
    parts = [(folder + slash, *base.partition(".")) for folder, slash, base in (name.rpartition("/") for name in names)]
    if len({ending for *_, ending in parts}) > _MAX_ENDINGS:
        parts = [(folder, *(stem + dot + ending).rpartition(".")) for folder, stem, dot, ending in parts]
    return [(folder + stem, ending.lower()) for folder, stem, _, ending in parts]


def _rows(file: Path, samples: Mapping[str, Mapping[str, tarfile.TarInfo]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the columns of each sample, and its number of images."""
    with file.open("rb") as stream:
        for key, members in samples.items():
            folders = _parts(key)[:-1]
            place, split = next(((n, found) for n, name in enumerate(folders) if (found := split_of(name))), (-1, None))
            row: dict[str, Any] = {KEY: key, "folder": "/".join(folders[place + 1 :])}
            row |= {} if split is None else {"split": split}
            images = list(filter(_is_image, members))
            row |= {name: {"offset": members[name].offset_data, "length": members[name].size} for name in images}
            for name in members.keys() & {*_TEXTS}:
                content = os.pread(stream.fileno(), min(members[name].size, _MAX_TEXT), members[name].offset_data)
                text = content.decode(errors="replace").strip()
                row |= _scalars(text) if name == "json" else {name: text}
            if "label" not in row and "cls" in row:
                row["label"] = row["cls"]
            row |= {ANY_IMAGE: row[images[0]]} if images else {}
            yield row, len(images)


def _scalars(text: str) -> dict[str, Any]:
    """Return the single values, and lists of these, of a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    values = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in values if _is_scalar(value) or _is_list(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_scalar, value))


def _is_image(ending: str) -> bool:
    return ending_of(f"x.{ending}") in IMAGE_SUFFIXES


def _parts(name: str) -> list[str]:
    return name.split("/")


def _column(values: list[Any]) -> pa.Array:
    """Return a column of places, of integers if all texts are, or of texts."""
    if any(isinstance(value, dict) for value in values):
        return pa.array(values, PLACE)
    if all(value is None or (str(value).isascii() and str(value).removeprefix("-").isdigit()) for value in values):
        values = [None if value is None else int(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])
