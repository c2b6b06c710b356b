"""Memory available to a process, and memory limits for decoding large images."""

import sys
from contextlib import suppress
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # limit of a container


def available_memory() -> int | None:
    """Return the bytes that can be used without swapping; None if unknown (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # no limit, or "max"
        limits.append(int(_LIMIT.read_text(encoding="ascii")))
    return min(limits, default=None)


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; requires Linux or macOS."""
    import resource  # here: Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gigabytes(number: int) -> str:
    """Format bytes for people: ``12.3 GB``."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
