"""Available memory, the control groups (cgroups) that limit it, and slots of it for large images.

Cgroups are folders with the limits of a container or service, in versions 1 and 2. All processes of the user on a host
share the slots.
"""

import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedssl.locks import lock

_OWN_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


class _Version(NamedTuple):
    """Names of files and statistics of a version of cgroups."""

    limit: str
    usage: str
    files: tuple[str, ...]  # contained in the usage; the kernel frees them when it needs memory
    mapped: str  # of these, mostly libraries: a process without them reads them again and again


_VERSIONS = {
    1: _Version(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
        "total_mapped_file",
    ),
    2: _Version("memory.max", "memory.current", ("active_file", "inactive_file"), "file_mapped"),
}

SMALL = 2**26  # bytes that need no slot
_MAX_SLOTS = 8  # images at a time, for any amount of memory
_SHARE = 4  # large images use at most one part in four of the available memory
_PATIENCE = 0.01  # seconds between two attempts


def available_memory(*, reusable: int = 0) -> int | None:
    """Return the bytes that can be used without swapping; None if unknown (not Linux).

    ``reusable`` bytes are held by this process, and count as available.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    free += [*_available_in_cgroups(), *_available_by_ulimit()]
    return max(0, min(free)) + reusable if free else None


def _available_by_ulimit() -> Iterator[int]:
    """Yield what ``ulimit -v`` or systemd's ``LimitAS`` leaves to this process, if there is such a limit."""
    import resource  # here: Windows has none

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        yield limit - pages * os.sysconf("SC_PAGE_SIZE")


def _available_in_cgroups() -> Iterator[int]:
    """Yield what each limit of this process leaves: those of a container or service, and of all that contain it."""
    for folder, version in iter_cgroups("memory"):
        with suppress(OSError, ValueError, KeyError):  # no limit, "max", not in this mount, or of another kernel
            yield _available_in(folder, _VERSIONS[version])


def _available_in(folder: Path, version: _Version) -> int:
    limit, used = (int((folder / name).read_text(encoding="ascii")) for name in (version.limit, version.usage))
    lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    return limit - used + max(0, sum(stat[name] for name in version.files) - stat[version.mapped])


def iter_cgroups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders with limits of this process, and the version of cgroups, which names their files.

    They are of a controller, e.g. ``cpu``: the process's own cgroup, and all that contain it. A folder may be missing,
    because a container's path may be that of its host. Its mount then has only its own cgroup, at the root. Without
    cgroups (not Linux) there is none.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_CGROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (_MOUNT / controller, 1) if controllers else (_MOUNT, 2)
        folder = root / path.strip("/")
        for ancestor in (folder, *folder.parents[: len(folder.parts) - len(root.parts)]):
            yield ancestor, version


def grown_memory() -> int:
    """Return by how many bytes this process has grown since the first call; 0 if unknown (not Linux).

    A process that works repeatedly reuses what it has kept: freed memory, a model and images.
    """
    return max(0, _private_memory() - _first_private_memory())


@functools.cache
def _first_private_memory() -> int:
    return _private_memory()


def _private_memory() -> int:
    """Return the resident memory of this process that is no mapped file."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; requires Linux or macOS."""
    import resource  # here: Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> None:
    """Reset `peak_memory` to the resident memory, if the kernel can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def gigabytes(num_bytes: int) -> str:
    """Format bytes for people: ``12.3 GB``, ``266 MB`` or ``1.5 MB``."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def decode_slot(needed: int, *, largest: int) -> Iterator[None]:
    """Wait until an image of ``needed`` bytes may be decoded; small ones do not wait.

    Slots are shared by all processes of the user on this host. Their number is the number of images of ``largest``
    bytes, the largest valid ones, that fit into memory.
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
        os.close(descriptor)  # releases the lock


def _acquire_slot(slots: int) -> int:
    """Lock one of the slot files and return its descriptor."""
    files = [Path(tempfile.gettempdir(), f"fedssl-{os.getuid()}-decoding-{number}") for number in range(slots)]
    while True:
        for file in files:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if lock(descriptor):
                return descriptor
            os.close(descriptor)
        time.sleep(_PATIENCE)
