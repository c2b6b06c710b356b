"""Memory for large images: so many at a time on a host, in whichever threads and processes they are decoded."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedssl.machine.memory import available_memory

SMALL = 2**26  # bytes that need not be asked for
_MAX_SLOTS = 8  # images at a time, however much memory there is
_SHARE = 4  # of the memory there is, large images get one part in so many
_PATIENCE = 0.01  # seconds between two looks


@contextmanager
def decode_slot(needed: int, *, largest: int) -> Iterator[None]:
    """Wait until an image that needs so many bytes may be decoded.

    Parameters
    ----------
    needed : int
        Bytes; what is small does not wait.
    largest : int
        Bytes of the largest image there can be: as many images have room as would of this size.
    """
    if needed <= SMALL:
        yield
        return
    free = available_memory()
    slots = _MAX_SLOTS if free is None else min(max(free // _SHARE // largest, 1), _MAX_SLOTS)
    descriptor = _acquire_slot(slots)
    try:
        yield
    finally:
        os.close(descriptor)  # which lets go of the lock


def _acquire_slot(slots: int) -> int:
    """The descriptor of a locked file, one of so many that all processes of the user on this host share."""
    files = [Path(tempfile.gettempdir(), f"fedssl-{os.getuid()}-decoding-{number}") for number in range(slots)]
    while True:
        for file in files:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                os.close(descriptor)
        time.sleep(_PATIENCE)
