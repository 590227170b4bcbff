"""HTTP by hand: clients that disconnect, read slowly, or send invalid bytes.

Owns: ``RawClient``, and reading event streams.
"""

from __future__ import annotations

import io
import json
import select
import socket
import struct
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any, NamedTuple

SECONDS = 30.0  # after which a test stops waiting
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Reply(NamedTuple):
    """A whole response."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in the body; checks its form."""
        assert self.status >= 400, self
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream; checks the framing and ``[DONE]``."""
        assert self.status == 200, self
        frames = self.body.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""], frames[-3:]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


class RawClient:
    """One connection, for one request."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self._taken = b""
        self._socket = socket.socket()
        self._socket.settimeout(SECONDS)
        if receive_buffer is not None:  # before connect, which announces the window
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            self._socket.connect(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> RawClient:
        """Exactly these bytes; a server that closes early is no error here."""
        with suppress(BrokenPipeError, ConnectionResetError):  # its answer is read all the same
            self._socket.sendall(data)
        return self

    def post(self, path: str, **fields: Any) -> RawClient:
        """Send a request; ``reply`` reads the response."""
        return self.post_body(path, json.dumps(fields).encode())

    def post_body(self, path: str, body: bytes, *headers: str) -> RawClient:
        """Send any body; a header given here replaces the usual one."""
        lines = {
            "host": "host: localhost",
            "connection": "connection: close",
            "content-type": "content-type: application/json",
            "content-length": f"content-length: {len(body)}",
        }
        lines |= {line.partition(":")[0].lower(): line for line in headers}
        head = "\r\n".join([f"POST {path} HTTP/1.1", *lines.values(), "", ""])
        return self.send(head.encode("latin-1") + body)

    def get(self, path: str) -> RawClient:
        """Send a GET."""
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        return self.send(head.encode())

    def wait(self) -> RawClient:
        """Return once the response has begun."""
        self._socket.recv(1, socket.MSG_PEEK)
        return self

    @property
    def has_reply(self) -> bool:
        """True if the response has begun, or the connection has ended."""
        return bool(select.select((self._socket,), (), (), 0)[0])

    def read_byte(self) -> None:
        """Read one byte of the response; ``reply`` still returns it."""
        self._taken += self._socket.recv(1)

    def reply(self) -> Reply:
        """The whole response."""
        with HTTPResponse(_Whole(self._taken, self._socket)) as response:  # type: ignore[arg-type]
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read())

    def rest(self) -> bytes:
        """All bytes until the server closes the connection."""
        return b"".join(iter(lambda: self._socket.recv(1 << 16), b""))

    def disconnect(self) -> None:
        """Disconnect at once, like a killed program."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()


def post(port: int, path: str, **fields: Any) -> Reply:
    """A request and its response."""
    with RawClient(port) as client:
        return client.post(path, **fields).reply()


def get(port: int, path: str) -> Reply:
    """A GET and its response."""
    with RawClient(port) as client:
        return client.get(path).reply()


class _Whole:
    """A socket whose first bytes have already been read, for ``HTTPResponse``."""

    def __init__(self, taken: bytes, connection: socket.socket) -> None:
        self._parts = [taken] if taken else []
        self._connection = connection

    def makefile(self, mode: str) -> io.BufferedReader:
        """See ``socket.makefile``."""
        assert mode == "rb"
        parts, connection = self._parts, self._connection

        class Raw(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def readinto(self, buffer: Any) -> int:
                if not parts:
                    return connection.recv_into(buffer)
                data = parts.pop()
                assert len(data) <= len(buffer), "more than a buffer was taken"
                buffer[: len(data)] = data
                return len(data)

        return io.BufferedReader(Raw())
