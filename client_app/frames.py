"""Frames: byte strings over a local socket, each after its length. Both ends belong to the same user."""

import socket

_LENGTH_BYTES = 8


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
