"""OpenAI's batch files: each line is a request, which the app answers in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from jaxinfer.server.http.errors import OLLAMA_PATH, is_below
from jaxinfer.server.routes.app import ROUTES
from jaxinfer.server.routes.direct import call_app

MAX_SHOWN = 200  # characters of a wrong value in a message


class BatchError(msgspec.Struct, frozen=True):
    """Why a line is no request; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int


class BatchResponse(msgspec.Struct, frozen=True):
    """The response to one request, which may be an error."""

    status_code: int
    request_id: str
    body: Raw


class BatchResult(msgspec.Struct, frozen=True):
    """A line of the output: it has a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def succeeded(self) -> bool:
        """True if the response is no error."""
        return self.response is not None and self.response.status_code == HTTPStatus.OK


class _Line(msgspec.Struct, frozen=True):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Raw = Raw(b"")


class _Body(msgspec.Struct, frozen=True):
    stream: Any = UNSET


@dataclass(frozen=True)
class BatchCounts:
    """The requests of a batch; blank lines are none."""

    total: int
    failed: int


class _Refused(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


async def run_batch(
    app: ASGIApp,
    lines: Iterable[bytes],
    write: Callable[[bytes], object],
    *,
    num_at_once: int,
    advance: Callable[[float], None] = lambda amount: None,
) -> BatchCounts:
    """Answer every line of a batch file; ``write`` receives the lines of the output in the order
    of the input.

    A line that is no request becomes a line with an error, and leaves the others unharmed. At most
    ``num_at_once`` requests are open at a time. ``advance`` is called with 1 after each.
    """
    free = asyncio.Semaphore(num_at_once)
    seen: set[str] = set()
    unwritten: deque[asyncio.Task[BatchResult]] = deque()
    total = failed = 0

    async def answer(number: int, line: bytes) -> BatchResult:
        try:
            return await _result(app, number, line, seen)
        finally:
            free.release()
            advance(1)

    async def write_next() -> None:
        nonlocal failed
        result = await unwritten.popleft()
        failed += not result.succeeded
        write(msgspec.json.encode(result) + b"\n")

    async with asyncio.TaskGroup() as group:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            await free.acquire()
            total += 1
            unwritten.append(group.create_task(answer(number, line)))
            while unwritten and unwritten[0].done():
                await write_next()
        while unwritten:
            await write_next()
    return BatchCounts(total, failed)


async def _result(app: ASGIApp, number: int, line: bytes, seen: set[str]) -> BatchResult:
    name, request = f"batch_req_{uuid4().hex}", _Line()
    try:
        request = _decoded(line)
        _check_id(request.custom_id, seen)
        _check(request)
    except _Refused as error:
        custom_id = request.custom_id if isinstance(request.custom_id, str) else None
        found = BatchError(error.code, str(error), error.param, number)
        return BatchResult(name, custom_id, error=found)
    response = await _called(app, request.url, bytes(request.body))
    return BatchResult(name, request.custom_id, response)


def _decoded(line: bytes) -> _Line:
    try:
        return msgspec.json.decode(line, type=_Line)
    except RecursionError:
        raise _Refused("invalid_json_line", "this line is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"this line is not a JSON object in UTF-8: {error}"
        raise _Refused("invalid_json_line", text) from None


def _check_id(given: Any, seen: set[str]) -> None:
    """Raise ``_Refused`` for a ``custom_id`` that names no line, or an earlier one."""
    if not isinstance(given, str) or not given:
        raise _Refused("missing_required_parameter", "custom_id must be text", "custom_id")
    if given in seen:
        shown = given[:MAX_SHOWN]
        message = f"custom_id {shown!r} is the one of an earlier line; give each line its own"
        raise _Refused("duplicate_custom_id", message, "custom_id")
    seen.add(given)


def _check(request: _Line) -> None:
    """Raise ``_Refused`` for a line that names no route, or whose body cannot be in a batch."""
    if request.method != "POST":
        raise _Refused(
            "invalid_method", f"method must be POST, got {request.method!r:.60}", "method"
        )
    # paths with parameters concern one earlier response
    urls = [
        path
        for path in (route.path for route in ROUTES if route.request is not None)
        if "{" not in path
        # those of ollama stream by default
        if not is_below(path, OLLAMA_PATH)
    ]
    if request.url not in urls:
        given = repr(request.url)[:MAX_SHOWN]
        raise _Refused("invalid_url", f"url must be one of {', '.join(urls)}, got {given}", "url")
    if not request.body:
        raise _Refused("missing_required_parameter", "body is required", "body")
    try:
        body = msgspec.json.decode(request.body, type=_Body)
    except msgspec.DecodeError as error:
        raise _Refused("invalid_request", f"body must be an object: {error}", "body") from None
    if body.stream not in (UNSET, None, False):
        message = "body.stream must be false, as a line is one whole response; leave it out"
        raise _Refused("invalid_request", message, "body.stream")


async def _called(app: ASGIApp, path: str, body: bytes) -> BatchResponse:
    """The app's response to a POST of JSON."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await call_app(app, "POST", path, body, send)
    start, *parts = sent
    request_id = Headers(raw=start["headers"])["x-request-id"]
    content = b"".join(part.get("body", b"") for part in parts)
    return BatchResponse(start["status"], request_id, Raw(content))
