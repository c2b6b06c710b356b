"""Locks on files that the caller opened, since it decides about links and rights. They end with the file or process."""

import fcntl
import time

PROBE_SECONDS = 0.05  # patience with probes


def lock(descriptor: int, *, wait: bool = False, patience: float = 0.0) -> bool:
    """Lock an open file; return False if another process has locked it, unless it is to ``wait``.

    With ``patience`` try again after so many seconds, because a probe of `is_locked` holds the lock for an instant.
    Raise an `OSError` on a file system without locks.
    """
    from filelock import lock_descriptor  # here: slow import

    if lock_descriptor(descriptor, blocking=wait):
        return True
    time.sleep(patience)
    return patience > 0 and lock_descriptor(descriptor, blocking=False)


def is_locked(descriptor: int) -> bool:
    """Return whether another process has locked an open file, which this one may only be able to read.

    A probe takes the lock in shared mode, which filelock lacks, so that two probes do not see each other.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
