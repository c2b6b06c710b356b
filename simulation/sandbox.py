"""A private place for foreign processes: whatever is started in it ends with it, and nothing of it stays on disk.

Ray and Flower's SuperLink start daemons that start daemons, in sessions of their own, so neither a process group nor
the tree of parents finds them all. What they inherit is the working directory and the environment: every process whose
working directory or ``FLWR_HOME`` lies in the private directory belongs to the place. Both are needed: a process may go
elsewhere, and Ray's workers overwrite their environment with a title.

The clean-up is done by a small guard process that waits for the end of its standard input. It therefore happens in
every case: the run ended, it failed, Ctrl-C, SIGTERM, and also when the process that made the place was killed with
SIGKILL. The guard is this very file run as a script, which is why only the standard library is imported here.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TERMINATE_GRACE_SECONDS = 2.0  # seconds between SIGTERM and SIGKILL
MAX_TERMINATE_SECONDS = 10.0  # after which a process that survives even SIGKILL (it waits for a dead disk) is given up


@dataclass
class ProcessSandbox:
    """A private directory and the processes that were started in it; made by `process_sandbox`."""

    path: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The folder for Flower's state."""
        return self.path / "home"

    @property
    def work(self) -> Path:
        """The neutral, empty working directory of the processes."""
        return self.path / "work"

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdout: IO[str] | int
    ) -> subprocess.Popen[str]:
        """Start a command; both its outputs go to ``stdout``.

        It gets a session of its own, so that Ctrl-C in the terminal reaches only the owner of the place.
        """
        process = subprocess.Popen(
            command,
            env={**environment, "FLWR_HOME": str(self.home)},
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@contextmanager
def process_sandbox() -> Iterator[ProcessSandbox]:
    """Make a place; at the end of the block its processes have ended and its directory is gone.

    The directory lies in ``/tmp`` or where ``RAY_TMPDIR`` says, under a short name, because Ray makes Unix sockets
    below it, whose paths are limited to 107 bytes.
    """
    directory = tempfile.mkdtemp(prefix="fssl-", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
    sandbox = ProcessSandbox(Path(directory).resolve())
    # -I -S: neither the environment nor site-packages can change what the guard does, and it starts in 20 ms.
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(sandbox.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        sandbox.home.mkdir()
        sandbox.work.mkdir()
        yield sandbox
    finally:
        guard.communicate()  # ends its standard input and waits for it
        for process in sandbox.processes:
            process.wait()


def sandbox_pids(sandbox: Path, *, spared_group: int | None = None) -> set[int]:
    """Return the ids of all processes that belong to the place at this path, whoever their parents are.

    ``spared_group``: process group of the owner, whose members belong to the place only if they themselves say so.
    """
    if sys.platform == "linux":
        return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_in(entry, sandbox)}
    # macOS tells no working directories; a process that has lost its environment still has its process group.
    listing = subprocess.run(["ps", "-axwwE", "-o", "pid=,pgid=,command="], capture_output=True, errors="replace")
    rows = [line.split() for line in listing.stdout.splitlines()]
    marked = {row[0]: row[1] for row in rows if f"FLWR_HOME={sandbox / 'home'}" in row}
    groups = set(marked.values()) - {str(spared_group)}
    return {int(row[0]) for row in rows if row[0] in marked or row[1] in groups}


def _is_in(entry: Path, sandbox: Path) -> bool:
    try:
        if sandbox in (entry / "cwd").readlink().parents:
            return True
        return f"FLWR_HOME={sandbox / 'home'}" in (entry / "environ").read_text(errors="replace").split("\0")
    except OSError:  # it has ended, or belongs to another user
        return False


def terminate(sandbox: Path, *, spared_group: int) -> None:
    """End the processes of a place: SIGTERM, and SIGKILL for those that remain after the grace period."""
    start = time.monotonic()
    asked: set[int] = set()
    while (pids := sandbox_pids(sandbox, spared_group=spared_group)) and (
        waited := time.monotonic() - start
    ) < MAX_TERMINATE_SECONDS:
        for pid in pids if waited > TERMINATE_GRACE_SECONDS else pids - asked:
            try:
                os.kill(pid, signal.SIGKILL if waited > TERMINATE_GRACE_SECONDS else signal.SIGTERM)
            except ProcessLookupError:
                continue
        asked |= pids
        time.sleep(0.05)


def run_guard(path: Path) -> None:
    """Wait, as the guard, until the standard input ends; end the processes of the place and remove it."""
    owner = os.getpgid(os.getppid())
    sys.stdin.buffer.read()
    terminate(path, spared_group=owner)
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    run_guard(Path(sys.argv[1]))
