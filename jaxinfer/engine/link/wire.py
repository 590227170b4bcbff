"""Messages between a server's process and its engine's process.

Owns: the records that cross, their form as bytes (msgpack, each frame behind its length), and
``Channel``, which sends without ever making the sender wait.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from jaxinfer.core import errors
from jaxinfer.core.config import EngineConfig, Limits
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.engine.facts import ModelFacts
from jaxinfer.engine.link.commands import Leave, Ping, Stop, Submission
from jaxinfer.engine.news import EngineStats, News
from jaxinfer.text.tokenizer_config import TokenizerSpec

_LENGTH_BYTES = 4  # before each frame, little endian


class Build(msgspec.Struct, frozen=True, tag=True):
    """To the engine, first: what to build. ``progress``: whether to show it on stderr."""

    config: EngineConfig
    progress: bool


class Planned(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what the server can prepare itself for, long before it is ready."""

    limits: Limits
    tokenizer: TokenizerSpec | None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: requests are answered from now on."""

    facts: ModelFacts
    stats: EngineStats


class Told(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a turn's news."""

    news: News


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: one request failed. ``kind`` is a class of ``core.errors``."""

    request_id: str
    kind: str
    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """From the engine: its loop has read a ``Ping``."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine, last: it could not be built, or has ended, and why."""

    kind: str
    message: str


type ToEngine = Build | Submission | Leave | Ping | Stop
type FromEngine = Planned | Ready | Told | Refused | Pong | Failed


def failed(error: JaxinferError) -> Failed:
    """The error as a message."""
    return Failed(type(error).__name__, str(error))


def refused(request_id: str, error: JaxinferError) -> Refused:
    """One request's error as a message."""
    return Refused(request_id, type(error).__name__, str(error))


def error_of(message: Failed | Refused) -> JaxinferError:
    """The error that a message stands for: the same class, the same text."""
    kind = getattr(errors, message.kind, EngineError)
    return kind(message.message)


class Channel[Sent, Received]:
    """One end of a socket. Sending is queued for a thread of its own; receiving blocks.

    A peer that has gone shows as the end of ``messages``; what is sent to it is lost.
    """

    def __init__(self, end: socket.socket, received: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="jaxinfer-wire", daemon=True)
        self._writer.start()

    def send(self, message: Sent) -> None:
        """Send soon; returns at once. Raises ``ValueError`` for text that has no UTF-8 form."""
        self._frames.put(self._encoder.encode(message))

    def messages(self) -> Generator[Received]:
        """Everything that arrives, until the peer has gone."""
        while (head := self._read(_LENGTH_BYTES)) is not None:
            frame = self._read(int.from_bytes(head, "little"))
            if frame is None:
                return
            yield self._decoder.decode(frame)

    def flush(self) -> None:
        """Return when all that was sent is on its way, or the peer has gone. Send no more."""
        self._frames.put(None)
        self._writer.join()

    def hang_up(self) -> None:
        """Close the socket, sent or not; ``messages`` ends at both sides."""
        with suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self.flush()
        self._socket.close()

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
            except OSError:
                return  # the peer has gone: the reader sees that too

    def _read(self, size: int) -> bytearray | None:
        """Exactly ``size`` bytes; None when the peer has gone before."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                # the whole frame in one call: each return to Python waits for the GIL
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except OSError:
                return None
            if not count:
                return None
            done += count
        return data


def server_end(end: socket.socket) -> Channel[ToEngine, FromEngine]:
    """The server's side of a channel."""
    return Channel(end, FromEngine)


def engine_end(end: socket.socket) -> Channel[FromEngine, ToEngine]:
    """The engine's side of a channel."""
    return Channel(end, ToEngine)
