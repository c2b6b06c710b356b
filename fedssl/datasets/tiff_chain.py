"""Directories of a TIFF file: which of its pages are images in full size, found without a library.

A directory has 12 bytes per entry (20 in BigTIFF) and the place of the next directory. Pages of reduced size and masks
have bits 0 and 2 of NewSubfileType (TIFF 6.0, section 8).
"""

import struct
from collections.abc import Iterator
from io import SEEK_END
from itertools import islice
from typing import IO

MAX_PAGES = 2**20  # of a file
_SUBFILE_TYPE = 254
_REDUCED_OR_MASK = 0b101


def image_pages(stream: IO[bytes], *, limit: int | None = None) -> list[int]:
    """Return the numbers of the pages that are images in full size, ``limit`` at most; the first page if none is."""
    numbers = (number for number, kind in enumerate(_subfile_types(stream)) if not kind & _REDUCED_OR_MASK)
    return list(islice(numbers, limit)) or [0]


def _subfile_types(stream: IO[bytes]) -> Iterator[int]:
    """Yield the NewSubfileType of each page, until the chain ends, repeats or is damaged."""
    end = stream.seek(0, SEEK_END)
    stream.seek(0)
    head = stream.read(16)
    order = "<" if head.startswith(b"II") else ">"
    is_big = head[2:4] in (b"+\0", b"\0+")
    entry, count_form, place_form = (20, "Q", "Q") if is_big else (12, "H", "I")
    place = struct.unpack_from(order + place_form, head, 8 if is_big else 4)[0]
    seen = set[int]()
    while 0 < place < end and place not in seen and len(seen) < MAX_PAGES:
        seen.add(place)
        stream.seek(place)
        start = stream.read(struct.calcsize(count_form))
        if len(start) < struct.calcsize(count_form):
            return
        count = struct.unpack(order + count_form, start)[0]
        size = entry * min(count, 2**16)
        content = stream.read(size + struct.calcsize(place_form))
        if len(content) < size + struct.calcsize(place_form):
            return
        yield _subfile_type(content[:size], entry, order)
        place = struct.unpack_from(order + place_form, content, size)[0]


def _subfile_type(entries: bytes, size: int, order: str) -> int:
    for start in range(0, len(entries), size):
        tag: int = struct.unpack_from(order + "H", entries, start)[0]
        if tag >= _SUBFILE_TYPE:  # tags are sorted
            value: int = struct.unpack_from(order + "I", entries, start + size - (4 if size == 12 else 8))[0]
            return value if tag == _SUBFILE_TYPE else 0
    return 0
