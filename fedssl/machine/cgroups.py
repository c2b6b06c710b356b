"""Control groups (cgroups) of this process: folders with the limits of a container or service, versions 1 and 2."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OWN = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


class Cgroup(NamedTuple):
    """A folder that may have files with limits, and the version of cgroups, which names these files."""

    folder: Path
    version: int


def iter_cgroups(controller: str) -> Iterator[Cgroup]:
    """Yield the cgroups that limit this process by a controller, e.g. ``cpu``: its own, and all that contain it.

    A folder may be missing, because a container's path may be that of its host. Its mount then has only its own
    cgroup, at the root. Without cgroups (not Linux) there is none.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (_MOUNT / controller, 1) if controllers else (_MOUNT, 2)
        folder = root / path.strip("/")
        for ancestor in (folder, *folder.parents[: len(folder.parts) - len(root.parts)]):
            yield Cgroup(ancestor, version)
