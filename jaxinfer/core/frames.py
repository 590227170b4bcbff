"""Messages on a socket between two processes: a message is its length, then its bytes."""

from __future__ import annotations

import socket

_LENGTH_BYTES = 4  # little endian


def send_frame(end: socket.socket, message: bytes) -> None:
    """Send a message; raises ``OSError`` if the peer has closed its end."""
    end.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def read_frame(end: socket.socket) -> bytearray | None:
    """The next message; None if the peer has closed its end before all of it has arrived."""
    head = _read(end, _LENGTH_BYTES)
    return None if head is None else _read(end, int.from_bytes(head, "little"))


def _read(end: socket.socket, size: int) -> bytearray | None:
    """Exactly ``size`` bytes."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        try:
            # one call for the whole frame, since each return to Python waits for the GIL
            count = end.recv_into(view[done:], 0, socket.MSG_WAITALL)
        except OSError:
            return None
        if not count:
            return None
        done += count
    return data
