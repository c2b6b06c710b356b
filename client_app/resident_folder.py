"""Where the resident process of a device listens, its frames, and the process with which it ends.

``RUNTIME/fedssl-UID/PID-START/`` is the folder of one supervisor, the process that starts the ClientApps of a
SuperNode: its id, and its start time, because ids are reused. It contains ``lock``, held while a resident process is
started, and one socket, named after the app and the node's configuration. Only the user can enter ``fedssl-UID``.
RUNTIME is ``$XDG_RUNTIME_DIR`` or the folder of temporary files. The device's ``state-path`` is not used, because it
may be on a file system without sockets, and the path of a socket is limited.

Frames are byte strings over the socket, each after its length. Both ends belong to the same user.
"""

import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedssl.atomic_files import process_exists

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 103 (macOS) or 107 (Linux)
SOCKET_NAME_LENGTH = 16
_LENGTH_BYTES = 8  # of the length of a frame


def frame_header(data: bytes) -> bytes:
    """Return what precedes the bytes of a frame."""
    return len(data).to_bytes(_LENGTH_BYTES, "big")


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send one frame."""
    connection.sendall(frame_header(data))
    connection.sendall(data)


def receive_frame(connection: socket.socket) -> bytearray:
    """Return the next frame; raises `EOFError` if the other end has closed the connection."""
    return _receive(connection, int.from_bytes(_receive(connection, _LENGTH_BYTES), "big"))


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError("the other end has closed the connection")
        rest = rest[received:]
    return data


@dataclass(frozen=True)
class Supervisor:
    """A process by its id and its start time, which is empty on systems without ``/proc``."""

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> "Supervisor":
        return cls(pid, _state_and_start(pid)[1])

    @property
    def name(self) -> str:
        return f"{self.pid}-{self.start}"

    def is_alive(self) -> bool:
        if not self.start:
            return process_exists(self.pid)
        state, start = _state_and_start(self.pid)
        return start == self.start and state not in "ZX"  # not a zombie


def supervisor_folder(supervisor: Supervisor) -> Path:
    """Create the folder of a supervisor and return it; raises `OSError` if another user could enter it.

    Folders of supervisors that have ended are removed.
    """
    private = _runtime_folder() / f"fedssl-{os.getuid()}"
    with suppress(FileExistsError):
        private.mkdir(mode=0o700)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{private} must be a folder of this user with mode 700; remove it or set XDG_RUNTIME_DIR to such a folder"
        )
    for entry in private.iterdir():
        pid, _, start = entry.name.partition("-")
        if pid.isdigit() and not Supervisor(int(pid), start).is_alive():
            shutil.rmtree(entry, ignore_errors=True)
    folder = private / supervisor.name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _runtime_folder() -> Path:
    """Return the first folder that exists and whose path is short enough for a socket."""
    configured = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in ([Path(configured)] if _is_own_folder(configured) else []) + [Path(tempfile.gettempdir())]:
        longest = folder / f"fedssl-{os.getuid()}" / ("9" * 20) / ("f" * SOCKET_NAME_LENGTH)
        if len(os.fsencode(longest)) <= MAX_SOCKET_PATH:
            return folder
    return Path("/tmp")


def _is_own_folder(path: str) -> bool:
    try:
        return bool(path) and Path(path).is_absolute() and Path(path).stat().st_uid == os.getuid()
    except OSError:
        return False


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start time in clock ticks, "X" and "" if there is none or no ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", ""
    fields = text.rpartition(")")[2].split()  # the name of the program, in parentheses, may contain anything
    return fields[0], fields[19]
