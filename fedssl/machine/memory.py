"""How much memory there is for a process."""

import sys
from contextlib import suppress
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def available_memory() -> int | None:
    """Bytes that can be used without pushing others out; None where the system does not tell (it is not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # there is none, or its limit is "max"
        found.append(int(_LIMIT.read_text(encoding="ascii")))
    return min(found, default=None)


def peak_memory() -> int:
    """The most bytes that this process has had in memory so far; needs Linux or macOS."""
    import resource  # here: Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gigabytes(number: int) -> str:
    """Bytes, in words for people: ``12.3 GB``."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
