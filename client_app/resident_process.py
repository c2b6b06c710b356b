"""The resident process of a device, which handles the messages of one SuperNode, one at a time.

It keeps torch, the composed settings, the images and the model between messages. It ends with its supervisor, when its
socket is removed (`client_app.resident_client` starts another), and after some time without a message. A training
whose ClientApp has ended, or which a newer message supersedes, is abandoned at the next step: a SuperNode processes one
message at a time, so nobody waits for the reply to the older one.
"""

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from client_app.resident_folder import Supervisor, frame_header, receive_frame, send_frame
from fedssl.logs import log

_POLL_SECONDS = 1.0  # between two checks of the supervisor and the socket
_BACKLOG = 8

Handler = Callable[[Callable[[], bytearray], Callable[[], None]], tuple[bytes, bytes]]


class Abandoned(BaseException):
    """The ClientApp does not wait for the reply; not an error that a handler may turn into a reply."""


def main(argv: Sequence[str]) -> None:
    """Listen at the socket until the process ends; the arguments are those of `client_app.resident_client`."""
    path, supervisor, idle_seconds = Path(argv[1]), Supervisor(int(argv[2]), argv[3]), float(argv[4])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        inode = path.stat().st_ino
        listener.listen(_BACKLOG)

        def end(*_: Any) -> None:
            """End at once, also during training: files are written atomically, and the ClientApp sees the end."""
            if _inode(path) == inode:
                path.unlink(missing_ok=True)
            if not supervisor.is_alive():
                with suppress(OSError):
                    path.with_name("lock").unlink(missing_ok=True)
                    path.parent.rmdir()
            os._exit(0)

        def watch() -> None:
            while supervisor.is_alive() and _inode(path) == inode:
                time.sleep(_POLL_SECONDS)
            end()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup
                signal.signal(number, end)
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")  # to the SuperNode's log
        log.setLevel(logging.INFO)
        threading.Thread(target=watch, daemon=True).start()
        serve(listener, load_handler(), idle_seconds=idle_seconds)
        end()


def load_handler() -> Handler:
    """Return the function that receives a context and a message, and returns the reply and the context's state."""
    from client_app import handlers  # slow import
    from fedssl.flower_internals import (
        content_to_bytes,
        context_from_bytes,
        drop_content,
        message_from_bytes,
        message_to_bytes,
    )
    from fedssl.machine.process import return_freed_memory

    def handle(receive: Callable[[], bytearray], on_step_start: Callable[[], None]) -> tuple[bytes, bytes]:
        context, message = context_from_bytes(receive()), message_from_bytes(receive())
        try:
            answer = handlers.handle(message, context, on_step_start=on_step_start)
            drop_content(message)
            return_freed_memory()  # of training, before the update is serialized
            reply = message_to_bytes(answer)
        except Exception as error:  # for example a reply that is too long
            reply = message_to_bytes(handlers.failure_reply(message, context, error))
        return reply, content_to_bytes(context.state)

    return handle


def serve(listener: socket.socket, handle: Handler, *, idle_seconds: float) -> None:
    """Handle the messages of one connection after the other, until there was none for ``idle_seconds``."""
    from fedssl.machine.process import return_freed_memory  # slow import

    while select.select([listener], [], [], idle_seconds)[0]:
        connection, _ = listener.accept()
        with connection:
            try:
                _answer(connection, listener, handle)
            except Abandoned as reason:
                log.warning("training was abandoned: %s", reason)
            except (OSError, EOFError):
                log.warning("a reply was not sent: its ClientApp has ended")
        return_freed_memory()


def _answer(connection: socket.socket, listener: socket.socket, handle: Handler) -> None:
    send_frame(connection, b"")  # accepted
    for data in handle(lambda: receive_frame(connection), lambda: _check_wanted(connection, listener)):
        _send_unless_superseded(connection, listener, data)


def _check_wanted(connection: socket.socket, listener: socket.socket) -> None:
    """Raise `Abandoned` if the ClientApp has closed the connection, or another one is waiting."""
    readable, _, _ = select.select([connection, listener], [], [], 0)
    if connection in readable:  # a ClientApp sends nothing after its message
        raise Abandoned("its ClientApp has ended")
    if listener in readable:
        raise Abandoned("a newer message has arrived")


def _send_unless_superseded(connection: socket.socket, listener: socket.socket, data: bytes) -> None:
    """Send a frame; raises `Abandoned` if the ClientApp does not read and another one is waiting."""
    for part in (frame_header(data), data):
        rest = memoryview(part)
        while rest:
            readable, writable, _ = select.select([listener], [connection], [])
            if writable:
                with suppress(BlockingIOError):
                    rest = rest[connection.send(rest, socket.MSG_DONTWAIT) :]
            elif readable:
                raise Abandoned("a newer message has arrived")


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_ino
    return None
