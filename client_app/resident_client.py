"""Forward a message to the device's resident process, and start that process if there is none.

A resident process belongs to one supervisor (`client_app.resident_folder`), one version of the app and one
configuration of the node. For any other a new process is started, and the old one ends, because its socket is removed.
The process of `client_app.resident_process` is a child of the first ClientApp, and inherits working directory,
environment, process group and log from the SuperNode. This module imports no torch, see `client_app.app`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from client_app.resident_folder import SOCKET_NAME_LENGTH, Supervisor, receive_frame, send_frame, supervisor_folder
from fedssl.digests import identity
from fedssl.flower_internals import content_from_bytes, context_to_bytes, message_from_bytes, message_to_bytes
from fedssl.locks import lock
from fedssl.wire.device import code_fingerprint, installed_versions

IDLE_SECONDS = 1800.0  # without a message, after which the resident process ends and frees its memory

_POLL_SECONDS = 0.02
_EXIT_SECONDS = 2.0  # within which a process that closed its connection has ended
_ATTEMPTS = 3  # a process that ends for lack of messages may close a connection that it has not accepted
# With the `sys.path` of the ClientApp, the same code and packages are imported. -P: not those in the working directory.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.load(sys.stdin); from client_app.resident_process import main; main(sys.argv)"
)


class ResidentProcessError(Exception):
    """The resident process has failed: one sentence for the server, without information on the device."""


def forward(
    message: Message, context: Context, *, supervisor: Supervisor | None = None, idle_seconds: float = IDLE_SECONDS
) -> Message:
    """Return the reply of the resident process, and set the state in the context as it left it.

    ``supervisor`` is the process with which the resident process ends, by default the parent of this process. The
    message loses its content. Raises `ResidentProcessError`.
    """
    connection, process = _connect(context.node_config, supervisor or Supervisor.of(os.getppid()), idle_seconds)
    with connection:
        try:
            send_frame(connection, context_to_bytes(context))
            send_frame(connection, message_to_bytes(message))
            reply = message_from_bytes(receive_frame(connection))
            context.state = content_from_bytes(receive_frame(connection))
        except (OSError, EOFError) as error:
            raise ResidentProcessError(death_reason(_exit_code(process))) from error
    return reply


def process_name(node_config: Mapping[str, Any]) -> str:
    """Return the name of the socket: a digest of the app, its imports, their versions and the node's configuration.

    It covers the settings in ``config-dir``, because a process reads them once.
    """
    folder = node_config.get("config-dir")
    files = sorted(Path(str(folder)).expanduser().rglob("*.yaml")) if folder else []
    settings = {str(file): identity(file.read_bytes()) for file in files}
    parts = [sys.executable, sys.path, code_fingerprint(), dict(node_config), settings, installed_versions()]
    return identity(json.dumps(parts, sort_keys=True).encode())[:SOCKET_NAME_LENGTH]


def death_reason(exit_code: int | None) -> str:
    """Return why there is no reply: a sentence for an exit code as of `subprocess.Popen`, None if it is unknown."""
    if exit_code is None:
        return "the training process of the device ended before its reply; perhaps it was killed for lack of memory"
    if exit_code >= 0:
        return "the training process of the device has failed; see the log of the device"
    name = signal.Signals(-exit_code).name
    cause = ", perhaps for lack of memory" if name == "SIGKILL" else "; see the log of the device"
    return f"the training process of the device was killed ({name}){cause}"


def _connect(
    node_config: Mapping[str, Any], supervisor: Supervisor, idle_seconds: float
) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a connection that the resident process has accepted, and the process if it was started here."""
    try:
        path = supervisor_folder(supervisor) / process_name(node_config)
        for _ in range(_ATTEMPTS):
            connection, process = _open(path), None
            if connection is None:
                with _lock(path.with_name("lock")):
                    connection = _open(path)  # another ClientApp may have started it meanwhile
                    if connection is None:
                        process = _start(path, supervisor, idle_seconds)
                        connection = _wait(path, process)
            with suppress(OSError, EOFError):
                receive_frame(connection)  # empty, once it is accepted
                return connection, process
            connection.close()
            if process is not None:
                raise ResidentProcessError(death_reason(_exit_code(process)))
    except OSError as error:
        raise ResidentProcessError(
            "the training process of the device could not be started; see the log of the device"
        ) from error
    raise ResidentProcessError(death_reason(None))


def _open(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _start(path: Path, supervisor: Supervisor, idle_seconds: float) -> subprocess.Popen[bytes]:
    """Start the resident process; processes of the same supervisor for other apps or configurations end."""
    for entry in path.parent.iterdir():
        if entry.name != "lock":
            entry.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-c", _PROGRAM, str(path), str(supervisor.pid), supervisor.start]
    process = subprocess.Popen([*command, str(idle_seconds)], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(sys.path).encode())
    return process


def _wait(path: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    """Return a connection to a process that is starting; raises `ResidentProcessError` if it has ended."""
    while process.poll() is None:
        connection = _open(path)
        if connection is not None:
            return connection
        time.sleep(_POLL_SECONDS)
    raise ResidentProcessError(death_reason(process.returncode))


def _exit_code(process: subprocess.Popen[bytes] | None) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return None if process is None else process.wait(_EXIT_SECONDS)
    return None
