"""A streaming HTTP client that takes little CPU: one asyncio protocol on uvicorn's HTTP parser.

Owns: connections, server-sent events of the OpenAI routes and their times of arrival.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from jaxinfer.core.errors import BenchError

DONE = b"[DONE]"
REQUEST_SECONDS = 6 * 3600.0  # that an answer may take, as in vLLM's client
GET_SECONDS = 30.0
NO_TEXT = "the answer has no text"


class ClientError(BenchError):
    """The server cannot be reached, or its response is not HTTP."""


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def is_empty(self) -> bool:
        """True if it has nothing that was generated."""
        return not (self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """True if it has nothing that was generated."""
        message = self.delta or self.message
        return not (self.token_ids or self.text) and (message is None or message.is_empty)

    @property
    def is_head(self) -> bool:
        """True if it only names the role of a chat's answer, which some servers send at once."""
        delta = self.delta
        return delta is not None and bool(delta.role) and self.is_empty and not self.finish_reason


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    """The fields that are read of a completion, a chat completion, and the chunks of both."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; times are ``time.perf_counter`` seconds."""

    start: float
    times: list[float] = field(default_factory=list)  # of the chunks that carry a choice
    closed: float = 0.0  # when a last chunk without text said why the answer ended
    queued: float = 0.0  # seconds that the request waited in this process before ``start``
    text: list[str] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by choice, where listed
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, where the server says so
    finished: bool = False  # whether a chunk said why the answer ended
    status: int = 0
    body: bytes = b""  # of an answer that is not a stream
    error: str = ""
    end: float = 0.0  # when the response had been read, or had failed

    @property
    def ttft(self) -> float:
        """Seconds until the first chunk."""
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds until the last chunk that carries a choice."""
        return max(self.times[-1], self.closed) - self.start

    @property
    def is_counted(self) -> bool:
        """True if the server told how many tokens there are."""
        return bool(self.prompt_tokens or self.output_tokens)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def take(self, data: bytes, now: float) -> None:
        """Read one chunk of the stream, or the whole body of a plain answer."""
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            self.error = f"unreadable chunk {data[:200]!r}: {error}"
            return
        if chunk.error:
            self.error = msgspec.json.encode(chunk.error).decode()
        choices = chunk.choices or ()
        if choices and not choices[0].is_head:
            self._take_choice(choices[0], now)
        for choice in choices:
            if choice.token_ids:
                self.token_ids.setdefault(choice.index, []).extend(choice.token_ids)
        if (usage := chunk.usage) is not None:
            self.prompt_tokens = usage.prompt_tokens or 0
            self.output_tokens = usage.completion_tokens or 0
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _take_choice(self, choice: _Choice, now: float) -> None:
        if choice.finish_reason:
            self.finished = True
            if choice.is_empty and self.times:
                # No text came with it: as a gap it would be one of nearly 0, or of an end token.
                self.closed = now
                return
        self.times.append(now)
        message = choice.delta or choice.message
        self.text.append((message.content if message else choice.text) or "")


class _Connection(asyncio.Protocol):
    """One keep-alive connection; carries one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.open = False
        self.answered = False  # whether any byte of the current response has arrived
        self.reusable = False
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of asyncio, TLS or uvloop
        self.open = True

    def send(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        """Write a request; the future is done when its response has been read to the end."""
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)  # calls the methods ``on_...``
        self._headers: dict[bytes, bytes] = {}
        self._head_read = self._streams = self._done_seen = self.answered = False
        self._body = bytearray()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._answer is None:
            self.close()  # no request is open
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ClientError(f"the server's answer is not HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answer is None:
            return
        if self._head_read and not self._headers.keys() & {b"content-length", b"transfer-encoding"}:
            self._now = time.perf_counter()
            self.on_message_complete()  # a body that ends with the connection
        else:
            reason = exc or "closed by the server"
            self._finish(ClientError(f"the connection ended before the answer did ({reason})"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._head_read = True
        # of a refusal the whole body is the reason
        is_done = self._parser.get_status_code() == 200
        self._streams = is_done and self._is_of_type(b"text/event-stream")
        self.reusable = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._streams and self._answer is not None:
            self._read_events(self._answer)

    def on_message_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        answer.status, answer.body = status, bytes(self._body)
        if status != 200:
            answer.error = f"HTTP {status}: {answer.body[:500].decode(errors='replace')}"
        elif self._is_of_type(b"application/json"):
            answer.take(answer.body, self._now)
        elif self._streams:
            self._body += b"\n\n"  # some servers leave out the last empty line
            self._read_events(answer)
            # transformers ends with the counts, others with the reason
            ended = self._done_seen or answer.output_tokens or answer.finished
            if not ended and not answer.error:
                answer.error = "the stream ended without [DONE]"
        elif answer.body:
            kind = self._headers.get(b"content-type", b"no type").decode(errors="replace")
            answer.error = f"the answer is of {kind}, which is neither JSON nor a stream of events"
        self._finish(None)

    def _is_of_type(self, media_type: bytes) -> bool:
        return self._headers.get(b"content-type", b"").lower().startswith(media_type)

    def _read_events(self, answer: Answer) -> None:
        """Read the complete events of the body: lines, of which the last is empty."""
        if b"\r" in self._body:  # JSON has none that is not escaped
            self._body = self._body.replace(b"\r\n", b"\n")
        *events, rest = self._body.split(b"\n\n")
        self._body = rest
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:  # as nearly all are
                name, data = b"", bytes(event[5:]).strip()
            else:
                name, data = event_of(bytes(event))
            if data == DONE:
                self._done_seen = True
            elif data:
                answer.take(data, self._now)
                if name == b"error" and not answer.error:
                    answer.error = data.decode(errors="replace")

    def _finish(self, error: ClientError | None) -> None:
        self._answer = None
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
            self.close()


def event_of(lines: bytes) -> tuple[bytes, bytes]:
    """The name and the data of a server-sent event; comments and other fields are left out."""
    name, data = b"", list[bytes]()
    for line in lines.split(b"\n"):
        field_name, _, value = line.partition(b":")
        if field_name == b"data":
            data.append(value.strip())
        elif field_name == b"event":
            name = value.strip()
    return name, b"\n".join(data)


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Client:
    """Requests to one server over as many kept-alive connections as are in use at once.

    ``seconds``: what an answer may take at most, from the request to its end. ``insecure``: do not
    check the server's certificate.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = REQUEST_SECONDS,
        insecure: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        self._host, self._seconds = parts.hostname, seconds
        self._authority = f"[{self._host}]" if ":" in self._host else self._host
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = _tls(insecure) if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, seconds: float | None = None) -> Answer:
        """Send JSON and read the answer to its end; failures of the request are in ``error``.

        ``seconds``: what this one may take, if less than others.
        """
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        most = self._seconds if seconds is None else min(seconds, self._seconds)
        return await self._exchange(f"POST {self._root}{path}", head, body, most)

    async def get(self, path: str, seconds: float = GET_SECONDS) -> Answer:
        """Read a plain answer: its ``status`` and ``body``."""
        return await self._exchange(f"GET {self._root}{path}", "", b"", seconds)

    async def _exchange(self, line: str, head: str, body: bytes, seconds: float) -> Answer:
        where = f"{self._authority}:{self._port}"
        request = (f"{line} HTTP/1.1\r\nHost: {where}\r\n{self._headers}{head}\r\n").encode() + body
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(seconds):
                await self._exchange_for(request, answer)
        except TimeoutError:
            answer.error = f"the server did not answer in {seconds:g} s"
        finally:
            answer.end = time.perf_counter()
        return answer

    async def _exchange_for(self, request: bytes, answer: Answer) -> None:
        """Send a request over an idle or a new connection and fill in its answer."""
        while True:
            reused = bool(self._idle)
            try:
                connection = self._idle.pop() if reused else await self._connect()
                if not connection.open:
                    continue
                try:
                    await connection.send(request, answer)
                except asyncio.CancelledError:
                    connection.close()
                    raise
                except ClientError:
                    if reused and not connection.answered:
                        continue  # the server has just closed an idle connection
                    raise
            except (ClientError, OSError) as error:
                answer.error = str(error) or type(error).__name__
                return
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return connection

    def close(self) -> None:
        """Close the connections that no request uses."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
