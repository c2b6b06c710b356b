"""Checks of encoded DICOM data before it is decoded: its declared sizes, and what it expands to."""

import struct
from itertools import pairwise

import numpy as np

# Markers of JPEG and JPEG-LS: with a frame's size, of the first scan, and those without a length.
_SIZES = {0xFFF7, 0xFFDE, *range(0xFFC0, 0xFFD0)} - {0xFFC4, 0xFFC8, 0xFFCC}
_SCAN = 0xFFDA
_BARE = {0xFF00, 0xFF01, *range(0xFFD0, 0xFFDA)}
_CODESTREAM = b"\xff\x4f\xff\x51"  # start of JPEG 2000
_VALUE_BYTES = 4  # of a run-length encoded value, at most
_EXPANSION, _NO_OPERATION = 64, 128  # of run lengths: the most bytes per encoded byte, and a byte without meaning
_HARMLESS = 2**26  # expanded bytes of run lengths
MAX_TABLE = 2**16  # values of a palette


def check_segments(table: bytes, *, wide: bool) -> None:
    """Raise a `ValueError` if a segmented palette expands to more than it may have, or refers to itself."""
    values, position, size = np.frombuffer(table[: len(table) // 2 * 2], "<u2" if wide else "u1").tolist(), 0, 0
    while position + 1 < len(values):
        kind, length = values[position : position + 2]
        position += 2 + (length if kind == 0 else 1)
        size += length
        if kind > 1 or size > MAX_TABLE:
            raise ValueError("its segmented palette is indirect or too long; convert it to one without segments")


def check_run_lengths(frame: bytes, pixels: int, samples: int) -> None:
    """Raise a `ValueError` for a run-length encoded frame that is longer than its pixels, encoded or expanded."""
    most = 2 * _VALUE_BYTES * pixels * samples + 2**12
    if len(frame) > most:
        raise ValueError(f"its frame has {len(frame):,} bytes of run lengths, more than {most:,}")
    count, *offsets = struct.unpack_from("<16I", frame)
    for start, end in pairwise([*offsets[:count], len(frame)]):
        segment, position, size = frame[start:end], 0, 0
        if len(segment) * _EXPANSION <= _HARMLESS:
            continue
        while position < len(segment) and size <= 2 * pixels:
            head = segment[position]
            size += 0 if head == _NO_OPERATION else head + 1 if head < _NO_OPERATION else 257 - head
            position += 1 if head == _NO_OPERATION else head + 2 if head < _NO_OPERATION else 2
        if size > 2 * pixels:
            raise ValueError("its run lengths expand to more than its pixels")


def codestream_sizes(frame: bytes) -> set[tuple[int, int]]:
    """Return all declared rows and columns of a JPEG, JPEG-LS or JPEG 2000 frame; empty if it is malformed.

    Decoders skip what is malformed in different ways, and could find another size.
    """
    position = 0
    while frame[4:8] == b"jP  " and position >= 0 and frame[position + 4 : position + 8] != b"jp2c":  # a JP2 file
        length = int.from_bytes(frame[position : position + 4], "big")
        position = position + length if length >= 8 else -1
    position += 8 if frame[4:8] == b"jP  " else 0
    if frame[position : position + 4] == _CODESTREAM and len(frame) >= position + 24:
        right, bottom, left, top = struct.unpack_from(">IIII", frame, position + 8)
        return {(bottom - top, right - left)}
    sizes = set[tuple[int, int]]()
    position = 2 if frame[:2] == b"\xff\xd8" else len(frame)
    while position + 9 <= len(frame):
        marker, length = struct.unpack_from(">HH", frame, position)
        if marker == _SCAN:
            return sizes
        if marker < 0xFF00 or marker in _BARE:
            break
        if marker in _SIZES:
            sizes.add(struct.unpack_from(">HH", frame, position + 5))
        position += 2 + length if marker != 0xFFFF else 1
    return set()
