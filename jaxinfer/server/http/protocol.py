"""HTTP on one connection: uvicorn's httptools parser, with limits on the request's head.

Owns: the size and time limits of a request's head (and of a chunked body's trailer), and the
response to bytes that are not HTTP. uvicorn limits heads only with h11, which takes twice the time
for each event of a stream (5.0 µs, with httptools 2.6 µs; client included).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxinfer.server.http.errors import ApiError

HEAD_SECONDS = 30.0  # from the connection, or from the head's first byte, to the end of the head


class BoundedHeads(HttpToolsProtocol):
    """Limits the size and the time of a request's head.

    Responds 431 to a head above ``h11_max_incomplete_event_size`` bytes, and closes a connection
    whose head takes longer than ``HEAD_SECONDS``. ``_head_size`` counts the bytes that the parser
    reported, ``_unparsed`` those that it has not yet reported (a name or value without an end). So
    memory stays within the limit plus one read of the socket.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._max_head: int = self.config.h11_max_incomplete_event_size or 0
        self._head_size = 0
        self._unparsed = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; a head must arrive within ``HEAD_SECONDS``."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse unparsed bytes beyond the limit of a head."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._max_head and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = self._unparsed = 0
        if self._head_timer is None:
            self._start_head_timer()

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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Respond with a JSON error and close; uvicorn calls it for all bytes that are not HTTP."""
        if max(self._head_size, self._unparsed) > self._max_head:
            text = f"the request's head is larger than {self._max_head} bytes; shorten its headers"
            error = ApiError(431, text, code="head_too_large")
        else:
            error = ApiError(400, "this is not an HTTP request", code="invalid_http")
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        ) % len(error.body)
        self.transport.write(STATUS_LINE[error.status] + head + error.body)
        self.transport.close()

    def _add_to_head(self, num_bytes: int) -> None:
        self._head_size += num_bytes
        if self._head_size > self._max_head:
            # the parser stops and uvicorn calls send_400_response
            raise ValueError("the head is too large")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
