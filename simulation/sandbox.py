"""A sandbox for foreign processes: all processes started in it end with it, and it leaves no files.

Ray and Flower's SuperLink start daemons in new sessions, so neither a process group nor the process tree contains all
of them. They inherit the working directory and the environment: a process belongs to the sandbox if its working
directory or ``FLWR_HOME`` is inside. Both are needed, because a process may change its directory, and Ray's workers
overwrite their environment with a title.

A guard process waits for the end of its standard input and then cleans up, whether the run ended, failed, or was
killed, even by SIGKILL. The guard is this file run as a script, so it imports only the standard library.
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

TERMINATE_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
MAX_TERMINATE_SECONDS = 10.0  # then processes that survive SIGKILL (waiting for a dead disk) are ignored


@dataclass
class ProcessSandbox:
    """A private directory and the processes started in it; created by `process_sandbox`."""

    path: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """Return the folder for Flower's state."""
        return self.path / "home"

    @property
    def work(self) -> Path:
        """Return the empty working directory of the processes."""
        return self.path / "work"

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdout: IO[str] | int
    ) -> subprocess.Popen[str]:
        """Start a command in a new session, which Ctrl-C does not reach. All output goes to ``stdout``."""
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
    """Yield a sandbox. At the end of the block, its processes have ended and its directory is deleted.

    The directory is in ``/tmp`` or ``RAY_TMPDIR``. Its name is short, because Ray creates Unix sockets in it, whose
    paths are limited to 107 bytes.
    """
    parent = os.environ.get("RAY_TMPDIR") or "/tmp"
    try:
        directory = Path(tempfile.mkdtemp(prefix="fssl-", dir=parent)).resolve()
    except OSError as error:
        from fedssl.errors import InputError  # here: the guard imports only the standard library

        raise InputError(
            f"Ray and Flower cannot write to the folder {parent} ({error.strerror}); set the environment variable "
            "RAY_TMPDIR to another one with a short path"
        ) from error
    sandbox = ProcessSandbox(directory)
    # -I -S: independent of the environment and of site-packages; starts in 20 ms.
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
    """Return the ids of all processes in the sandbox.

    ``spared_group`` is the process group of the owner, whose members count only if their environment matches.
    """
    if sys.platform == "linux":
        return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_in(entry, sandbox)}
    # macOS does not report working directories; a process without its environment still has its process group.
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
    except OSError:  # the process has ended, or belongs to another user
        return False


def terminate(sandbox: Path, *, spared_group: int) -> None:
    """Send SIGTERM to all processes of a sandbox, and SIGKILL after the grace period."""
    start = time.monotonic()
    signaled: set[int] = set()
    while (pids := sandbox_pids(sandbox, spared_group=spared_group)) and (
        waited := time.monotonic() - start
    ) < MAX_TERMINATE_SECONDS:
        for pid in pids if waited > TERMINATE_GRACE_SECONDS else pids - signaled:
            try:
                os.kill(pid, signal.SIGKILL if waited > TERMINATE_GRACE_SECONDS else signal.SIGTERM)
            except ProcessLookupError:
                continue
        signaled |= pids
        time.sleep(0.05)


def run_guard(path: Path) -> None:
    """Wait for the end of standard input, terminate the processes of the sandbox and delete it."""
    owner = os.getpgid(os.getppid())
    sys.stdin.buffer.read()
    terminate(path, spared_group=owner)
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    run_guard(Path(sys.argv[1]))
