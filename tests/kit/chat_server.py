"""A server of chats on a real socket, whose next responses a test writes byte by byte.

Owns: ``ChatServer``.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MODELS = json.dumps({"data": [{"id": "stub", "max_model_len": 100}]}).encode()
DONE = b"data: [DONE]\n\n"


def event(**delta: Any) -> bytes:
    """An event of a stream with this delta."""
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def ending(reason: str = "stop") -> bytes:
    """The last events of a stream."""
    choices = [{"delta": {}, "finish_reason": reason}]
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    events = ({"choices": choices}, {"choices": [], "usage": usage})
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events) + DONE


def response(
    status: str, body: bytes, media_type: str = "application/json", more: str = ""
) -> bytes:
    """A whole response."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def stream(*pieces: bytes, is_whole: bool = True) -> bytes:
    """A response in chunks, without the end unless it ``is_whole``."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + chunks + (b"0\r\n\r\n" if is_whole else b"")


class ChatServer:
    """Answers the next POSTs with ``responses``, in their order, and then closes."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.models = response("200 OK", MODELS)
        self.responses: list[bytes] = []
        self.heads: list[str] = []  # of the requests
        self.bodies: list[Any] = []  # of the POSTs

    def answer(self, connection: socket.socket) -> None:
        """Answer one request."""
        with connection, connection.makefile("rb") as file:
            head = b"".join(iter(file.readline, b"\r\n")).decode()
            self.heads.append(head)
            if head.startswith("GET"):
                connection.sendall(self.models)
                return
            lengths = [one[15:] for one in head.lower().splitlines() if "content-length" in one]
            self.bodies.append(json.loads(file.read(int(lengths[0]))))
            connection.sendall(self.responses.pop(0))


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """A server until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ChatServer(listener.getsockname()[1])

        def accept() -> None:
            while True:
                try:
                    server.answer(listener.accept()[0])
                except OSError:
                    if listener.fileno() < 0:
                        return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
