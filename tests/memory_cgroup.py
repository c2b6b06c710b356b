"""A memory cgroup for the processes of a device: a limit that the kernel enforces, the peak, and the processes killed.

Version 1 (``memory.limit_in_bytes``) and version 2 (``memory.max``) of cgroups. Both count anonymous memory, and pages
of files that no other cgroup has read before.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_FILES = {  # limit, peak and the number of killed processes of each version
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.peak", "memory.events"),
}
_ANONYMOUS = {1: ("total_rss", "total_shmem"), 2: ("anon", "shmem")}
_PATIENCE = 30.0  # seconds until killed processes have ended


class NoMemoryCgroup(Exception):
    """This system permits no memory cgroup: one sentence with the reason."""


@dataclass(frozen=True)
class MemoryCgroup:
    """A memory cgroup by its folder and version; created by `memory_cgroup`. All sizes are in bytes."""

    folder: Path
    version: int

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs ``command``, and all that it starts, in this cgroup."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *command]

    def pids(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def peak(self) -> int:
        """Return the peak, with pages of files, which the kernel frees when it needs memory."""
        return int((self.folder / _FILES[self.version][1]).read_text())

    def anonymous(self) -> int:
        """Return the memory in use that the kernel cannot free."""
        values = _table(self.folder / "memory.stat")
        return sum(values[name] for name in _ANONYMOUS[self.version])

    def oom_kills(self) -> int:
        return _table(self.folder / _FILES[self.version][2])["oom_kill"]


@contextmanager
def memory_cgroup(limit: int, *, root: Path = ROOT) -> Iterator[MemoryCgroup]:
    """Yield a new cgroup with a limit in bytes and no swap, and end its processes; raises `NoMemoryCgroup`."""
    version = 1 if (root / "memory").is_dir() else 2
    parent = root / "memory" if version == 1 else root
    group = MemoryCgroup(parent / f"fedssl-{os.getpid()}-{time.monotonic_ns()}", version)
    try:
        if version == 2:
            with suppress(OSError):  # it may be on already
                (root / "cgroup.subtree_control").write_text("+memory")
        group.folder.mkdir()
    except OSError as error:
        raise NoMemoryCgroup(f"no memory cgroup can be created in {parent} ({error.strerror})") from error
    try:
        _limit(group, limit)
        yield group
    finally:
        _end(group)


def _limit(group: MemoryCgroup, limit: int) -> None:
    try:
        (group.folder / _FILES[group.version][0]).write_text(str(limit))
        group.peak(), group.oom_kills()
        swap, value = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}[group.version]
        if (group.folder / swap).exists():  # version 2 has none without swap
            (group.folder / swap).write_text(value)
    except OSError as error:
        raise NoMemoryCgroup(f"{error.filename} cannot be used ({error.strerror})") from error


def _end(group: MemoryCgroup) -> None:
    last = time.monotonic() + _PATIENCE
    while (pids := group.pids()) and time.monotonic() < last:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    group.folder.rmdir()


def _table(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
