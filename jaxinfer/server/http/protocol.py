"""HTTP on one connection: uvicorn's httptools parser, with limits on what a client may send.

Owns: the limits of a request's head (and of a chunked body's trailer) in size, number of headers
and time, of bytes that wait for a handler, pipelined requests included, and of connections; and the
response to bytes that are not HTTP. uvicorn limits heads only with h11, which takes twice the time
for each event of a stream (5.0 µs, with httptools 2.6 µs; client included).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from jaxinfer.server.http.buffered import BufferedBytes, RequestBytes
from jaxinfer.server.http.errors import ApiError

HEAD_SECONDS = 30.0  # from the connection, or from the head's first byte, to the end of the head
# the same for connections beyond the limit, and for what a client still sends after bytes that are
# not HTTP; the longest time for a body after the response
REFUSED_SECONDS = 2.0
LINGER_SECONDS = 10.0
MAX_HEADERS = 128  # a header takes some 200 bytes of memory besides its text
# Pieces of a body, such as chunks: each takes the parser 1 us, and 1 byte of a body takes 6 as a
# chunk. More are allowed if they have this many bytes on average.
MAX_PIECES, PIECE_BYTES = 2048, 256
PIPELINED_BYTES = 4096  # about the memory of a request that waits for the responses before it
BODY_HEADERS = (b"content-length", b"transfer-encoding")  # one of them announces a body
RESERVED_CONNECTIONS = 64  # beyond the limit: they get health checks and errors
# entries of a scope's state
BYTES, OVER_LIMIT = "request_bytes", "over_connection_limit"


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits that all connections of a server share."""

    buffered: BufferedBytes
    max_connections: int


class BoundedHttp(HttpToolsProtocol):
    """Limits what a client may send, and how long it may take.

    Responds 431 to a head above ``h11_max_incomplete_event_size`` bytes or ``MAX_HEADERS``, and
    closes a connection whose head takes longer than ``HEAD_SECONDS``. ``_head_size`` counts the
    bytes that the parser reported, ``_unparsed`` those that it has not yet reported (a name or
    value without an end). So memory stays within the limit plus one read of the socket.

    A request's bytes are counted (``RequestBytes``); a body beyond the limit is dropped, and the
    app, which finds that in the scope's state, refuses the request. The app also refuses requests
    of connections beyond the limit; those beyond a reserve are closed at once.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._max_head: int = self.config.h11_max_incomplete_event_size or 0
        self._head_size = 0
        self._unparsed = 0
        self._body_size = self._num_pieces = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._over_limit = False
        self._is_ended = False  # an error ended the connection; what arrives now is dropped
        self._bytes = RequestBytes(limits.buffered)  # of the request that is read
        # that the app runs; ``cycle`` is of the last request, which may wait in the pipeline
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; a head must arrive within ``HEAD_SECONDS``."""
        super().connection_made(transport)
        excess = len(self.connections) - self._limits.max_connections
        self._over_limit = excess > 0
        if excess > RESERVED_CONNECTIONS:
            transport.abort()
        else:
            self._start_head_timer(REFUSED_SECONDS if self._over_limit else HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._bytes.discard()
        for cycle, _ in self.pipeline:
            cast("Any", cycle.scope)["state"][BYTES].discard()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse unparsed bytes beyond the limit of a head."""
        if self._is_closing:
            return
        self._unparsed += len(data)
        self._limits.buffered.receive(len(data))
        super().data_received(data)
        if self.pipeline and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # or it is not seen that the client leaves
        if self._unparsed > self._max_head and not self._is_closing:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = self._unparsed = self._body_size = self._num_pieces = 0
        waits = self.cycle is not None and not self.cycle.response_complete
        if waits:  # it is counted from its first byte on
            self._bytes = RequestBytes(self._limits.buffered, uncounted=0)
        else:
            self._bytes = RequestBytes(self._limits.buffered)
        cast("Any", self.scope)["state"][BYTES] = self._bytes
        if waits and not self._bytes.add(PIPELINED_BYTES):
            raise ValueError("too many bytes")
        if self._head_timer is None:
            self._start_head_timer(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer of a chunked body."""
        self._add_to_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the app starts."""
        self._unparsed = 0
        self._stop_head_timer()
        if self._has_upgraded_body:
            raise ValueError("the parser does not read the body")
        if self._over_limit:
            cast("Any", self.scope)["state"][OVER_LIMIT] = True
        super().on_headers_complete()
        if self._over_limit:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._num_pieces += 1
        self._body_size += len(body)
        if self._num_pieces > MAX_PIECES + self._body_size // PIECE_BYTES:
            raise ValueError("too many pieces")
        if self._bytes.add(len(body)):
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.message_event.set()  # the app sees that the body is refused

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.pipeline:  # and its sender may never end it
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Respond with a JSON error and close; uvicorn calls it for all bytes that are not HTTP.

        If a response has begun, its rest is lost.
        """
        self._disconnect()
        last = self._running
        if last and last.response_started and (last.more_body or not last.response_complete):
            self._end()
            return
        error = self._parser_error()
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        ) % len(error.body)
        self.transport.write(STATUS_LINE[error.status] + head + error.body)
        self._end()

    def _end(self) -> None:
        """End the connection after the bytes already written.

        A socket closed while its client still sends resets the connection, and the client may lose
        the response (RFC 9112, section 9.6). So only the sending side is closed, until the client
        closes or ``REFUSED_SECONDS`` have passed. TLS cannot do that: there it stays open.
        """
        self._is_ended = True
        self._stop_head_timer()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS, self.transport.close)

    @property
    def _is_closing(self) -> bool:
        return self._is_ended or self.transport.is_closing()

    def _parser_error(self) -> ApiError:
        if self._num_pieces > MAX_PIECES:
            text = f"the body's {self._num_pieces} chunks are too small; send larger ones"
            return ApiError(413, text, code="chunks_too_small")
        if self._bytes.refused:
            return too_many_bytes(self._limits.buffered.max_bytes)
        if max(self._head_size, self._unparsed) > self._max_head:
            text = f"the request's head is larger than {self._max_head} bytes; shorten its headers"
            return ApiError(431, text, code="head_too_large")
        if len(self.headers or ()) >= MAX_HEADERS:
            text = f"the request has more than {MAX_HEADERS} headers; send fewer"
            return ApiError(431, text, code="head_too_large")
        if self._has_upgraded_body:
            text = "the request has a body and the header Upgrade; leave the header out"
            return ApiError(400, text, code="upgrade_with_body")
        return ApiError(400, "this is not an HTTP request", code="invalid_http")

    @property
    def _has_upgraded_body(self) -> bool:
        """True if the request's body would be left to another protocol, and then be parsed as the
        next request.
        """
        names = {name for name, value in self.headers or () if value != b"0"}
        upgrades: bool = cast("Any", self.parser).should_upgrade()
        return upgrades and not names.isdisjoint(BODY_HEADERS)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect(self) -> None:
        """Tell the app that the client gets no more of the response."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _add_to_head(self, num_bytes: int) -> None:
        self._head_size += num_bytes
        in_head = self._head_timer is not None  # else it is a trailer
        if (
            self._head_size > self._max_head
            or len(self.headers) >= MAX_HEADERS
            or (in_head and not self._bytes.add(num_bytes))
        ):
            # the parser stops and uvicorn calls send_400_response
            raise ValueError("the head is too large")

    def _start_head_timer(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def too_many_bytes(limit: int) -> ApiError:
    """The error for a request whose bytes are too many together with those of others."""
    return ApiError(
        503,
        f"requests that have not arrived whole have {limit} bytes, as many as are allowed "
        "(--max-buffered-bytes); try again later",
        code="too_many_bytes",
        headers={"Retry-After": "1"},
    )
