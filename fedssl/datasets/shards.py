"""Tar shards of WebDataset as tables: one row per sample, whose files have names that begin with its key.

``n01/0001.jpg`` and ``n01/0001.cls`` are the sample ``n01/0001``. Its images are read where they are in the file, and
its small texts (`_TEXTS`) become columns, as do other values of a ``json``. An integer is a number,
unless it has leading zeros or is a text of a ``json``. If a folder of the keys names a split, it is the column
``split``, and ``folder`` has the folders below it. Nothing is extracted or unpickled, and links and other special
members are left out, so that the names of members have no effect on the file system.

Shards of gzip are decompressed from their start, once for the index and once for the images, up to `_EXPANSION` times
their size.
"""

import gzip
import json
import logging
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedssl.datasets.formats import SUFFIXES as IMAGE_SUFFIXES
from fedssl.datasets.listing import ending_of, is_hidden
from fedssl.datasets.splits import split_of
from fedssl.logs import log_once

KEY = "__key__"  # column of the names of samples
ANY_IMAGE = "__image__"  # column of the images of all endings, if no sample has two
PLACE = pa.struct([("offset", pa.int64()), ("length", pa.int64())])  # of an image in the file
_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}")  # in 64 bits, and written as `str` does
_NUMBER = re.compile(r"\b[0-9]{2,}\.")  # in the endings of a sample; views of one have a digit, as ``1.png``
_TEXTS = ("json", "cls", "txt", "id", "label")  # later ones replace values of the same name
_MAX_TEXT, _MAX_ENDINGS = 2**20, 64
SUFFIXES = (".tar", *(_GZIP := (".tar.gz", ".tgz")))
_EXPANSION, _MIN_EXPANDED = 200, 2**26  # decompressed bytes per byte, and of small files
_MAX_IMAGE = 2**29  # bytes of gzip


def is_shard(file: Path) -> bool:
    """Return whether a file is a shard by its name."""
    return ending_of(file.name) in SUFFIXES


def is_compressed(file: Path) -> bool:
    """Return whether a shard is compressed by its name."""
    return ending_of(file.name) in _GZIP


def stored_images(file: Path, places: Sequence[tuple[int, int] | None]) -> Iterator[bytes]:
    """Yield the images at offsets with lengths; no bytes for None. Ascending offsets are read in one pass."""
    with _opened(file) as stream:
        for place in places:
            content = b""
            if place is not None and place[1] <= _MAX_IMAGE:
                stream.seek(place[0])
                content = stream.read(place[1])
            yield content


def shard_table(file: Path) -> pa.Table:
    """Return the samples of a file, which is read once; `pyarrow.ArrowInvalid` if it is damaged."""
    return _table(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2**14)  # every column of a data set is read shard by shard
def _table(file: Path, _modified: int) -> pa.Table:
    if is_compressed(file):
        log_once(logging.INFO, f"{file} is decompressed from its start to find its images; gunzip it once")
    try:
        with _opened(file) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            members, texts = _members(archive, _max_bytes(file))
            _check_end(file, stream, archive.offset)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        kind = "tar file of gzip" if is_compressed(file) else "uncompressed tar file"
        raise pa.ArrowInvalid(f"it is no {kind}: {error}") from error
    named = {member.name.removeprefix("./"): member for member in members}  # the last of several with a name
    named = {
        name: member for name, member in named.items() if not any(map(is_hidden, {*name.split("/")} - {".", ".."}))
    }
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for (key, ending), member in zip(_keyed(list(named)), named.values(), strict=True):
        if ending in _TEXTS or _is_image(ending):
            samples.setdefault(key, {})[ending] = member
    rows, num_images = [], 0
    for row, number in _rows(samples, texts):
        rows.append(row)
        num_images = max(num_images, number)
    names = dict.fromkeys(name for row in rows for name in row)
    if num_images > 1:
        names.pop(ANY_IMAGE)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


class _Gzip(gzip.GzipFile):
    """A compressed file, of which parts of limited sizes are read: a header may declare any."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_IMAGE:
            raise tarfile.ReadError(f"it has a part of {size} bytes")
        return super().read(size)


def _opened(file: Path) -> _Gzip | BufferedReader:
    return _Gzip(file) if is_compressed(file) else file.open("rb")


def _max_bytes(file: Path) -> int:
    """Return the maximum of a shard's bytes, decompressed."""
    return max(_EXPANSION * file.stat().st_size, _MIN_EXPANDED) if is_compressed(file) else sys.maxsize


def _members(archive: tarfile.TarFile, max_bytes: int) -> tuple[list[tarfile.TarInfo], dict[int, bytes]]:
    """Return the files of an archive, and the contents of texts by their offsets, in one pass."""
    members, texts = list[tarfile.TarInfo](), dict[int, bytes]()
    for member in archive:
        if (end := member.offset_data + member.size) > max_bytes:
            raise tarfile.ReadError(
                f"its files have {end:,} bytes, more than {max_bytes:,}, so that it may be malicious; gunzip it"
            )
        if member.isreg() and not member.issparse():
            members.append(member)
            if ending_of(member.name)[1:] in _TEXTS and (content := archive.extractfile(member)):
                texts[member.offset_data] = content.read(_MAX_TEXT)
    return members, texts


def _check_end(file: Path, stream: _Gzip | BufferedReader, end: int) -> None:
    """Raise a `tarfile.TarError` unless the rest of a file is empty: the library ignores what it cannot read."""
    stream.seek(end)
    content = stream.read(tarfile.RECORDSIZE)
    if not content:
        log_once(logging.WARNING, f"{file} has no end: it may be cut, and images may be missing")
    while content:
        if content.strip(b"\0") or stream.tell() > end + _max_bytes(file):
            raise tarfile.ReadError(f"it is cut or damaged at byte {end:,}, or several files are joined")
        content = stream.read(tarfile.RECORDSIZE)


def _keyed(names: list[str]) -> list[tuple[str, str]]:
    """Return key and ending of each name: parted at the first dot, as in WebDataset, or the last if keys have dots.

    Keys have dots if there are many endings, if all files would be one sample and have a number, as ``scan.012.png``,
    or if only the last dot leaves texts, such as that of ``1.5mm.cls``, to as many samples.
    """
    split = [(folder + slash, base) for folder, slash, base in (name.rpartition("/") for name in names)]
    first, last = (
        [(folder + stem, ending.lower()) for folder, base in split for stem, _, ending in [part(base, ".")]]
        for part in (str.partition, str.rpartition)
    )
    keys, endings = {key for key, _ in first}, {ending for _, ending in first}
    is_numbered = len(keys) == 1 and all(map(_NUMBER.search, endings))
    loses_texts = not endings & {*_TEXTS} and any(ending in _TEXTS for _, ending in last)
    is_same_number = len(keys) == len({key for key, _ in last})
    return last if len(endings) > _MAX_ENDINGS or is_numbered or (loses_texts and is_same_number) else first


def _rows(
    samples: Mapping[str, Mapping[str, tarfile.TarInfo]], texts: Mapping[int, bytes]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the columns of each sample, and its number of images."""
    for key, members in samples.items():
        folders = key.split("/")[:-1]
        place, split = next(((n, found) for n, name in enumerate(folders) if (found := split_of(name))), (-1, None))
        row: dict[str, Any] = {KEY: key, "folder": "/".join(folders[place + 1 :])}
        row |= {} if split is None else {"split": split}
        images = list(filter(_is_image, members))
        row |= {name: {"offset": members[name].offset_data, "length": members[name].size} for name in images}
        for name in filter(members.__contains__, _TEXTS):
            text = texts[members[name].offset_data].decode(errors="replace").strip()
            row |= _scalars(text) if name == "json" else {name: int(text) if _INTEGER.fullmatch(text) else text}
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
    parts = {name: value if isinstance(value, list) else [value] for name, value in values}
    return {name: value for name, value in values if all(isinstance(part, str | int | float) for part in parts[name])}


def _is_image(ending: str) -> bool:
    return ending_of(f"x.{ending}") in IMAGE_SUFFIXES


def _column(values: list[Any]) -> pa.Array:
    """Return a column of places, of values of one type, or of texts."""
    if any(isinstance(value, dict) for value in values):
        return pa.array(values, PLACE)
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])
