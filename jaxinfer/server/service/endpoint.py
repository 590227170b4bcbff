"""One HTTP request: ``Call`` is its handler's argument, ``Endpoint`` the handler's ASGI app.

A module of handlers lists them as ``Route``s.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.structured import FIELD
from jaxinfer.engine.link.client import MAX_UNJOINED_DELTAS
from jaxinfer.engine.requests.validate import check_task
from jaxinfer.server.api.answer import Answer, Caller, ChoiceUpdate
from jaxinfer.server.api.fields import AnyRequest, GenerationFields, field_error
from jaxinfer.server.api.parse import parse
from jaxinfer.server.api.structured import with_field
from jaxinfer.server.http.errors import ApiError, error_body
from jaxinfer.server.http.guard import request_bytes
from jaxinfer.server.http.sse import EventStream, on_disconnect
from jaxinfer.server.openai.writer import Writer, merged_updates
from jaxinfer.server.service.service import Service, run_off_loop

CLIENT_GONE = 499  # nginx's status for a request whose client disconnected; only metrics see it
MEDIA_TYPE = "application/json"
WARNING = "x-jaxinfer-warning"  # header of an answer that leaves a part of the request out
MAX_WARNING_CHARACTERS = 1000
INLINE_BYTES = 16384  # of a body that is parsed in the event loop: 100,000 bytes take about 10 ms

type Handler = Callable[[Call], Awaitable[ASGIApp]]


@dataclass(frozen=True, eq=False)
class Route:
    """One method of one path: its handler, and what ``/openapi.json`` says of it.

    All methods of a path have the same handler. ``response`` is a struct, or the media type of
    another body. A route without ``name`` is not in the document.
    """

    method: str
    path: str  # as Starlette writes it
    handler: Handler
    name: str = ""
    summary: str = ""
    response: type[msgspec.Struct] | str | None = None  # None: an empty body
    request: type[AnyRequest] | None = None
    events: tuple[type[msgspec.Struct], ...] = ()  # the data of the events of a stream
    named_events: bool = False  # their names are the types of the data; no [DONE] follows
    has_lines: bool = False  # a stream has lines of ``response``, and is the default
    query: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # parameters with their schemas
    errors: tuple[int, ...] = ()  # besides those of all such routes
    is_admin: bool = False  # exists only with --admin-api-key
    reads_body: bool = False  # also without a documented ``request``

    @property
    def key(self) -> tuple[str, str]:
        """Method and path as ``/openapi.json`` writes it."""
        return self.method, self.path.replace(":path}", "}")

    @property
    def error(self) -> type[msgspec.Struct]:
        """The struct of an error."""
        return error_body(self.path)

    @property
    def takes_body(self) -> bool:
        """True if the route reads a body."""
        return self.request is not None or self.reads_body


class Call:
    """A request whose body has been read."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, body: bytes) -> None:
        self.service = service
        self.method: str = scope["method"]
        self.headers = Headers(scope=scope)
        self.query = QueryParams(scope.get("query_string", b""))
        self.route = scope["path"].removeprefix(scope.get("root_path", ""))
        self.path_parameters: Mapping[str, str] = scope.get("path_params", {})
        self.request_id: str = scope["state"]["request_id"]
        self.caller = Caller.of(scope)
        self.prompt_field = "prompt"  # the field that errors about the prompt name
        self.form_field = FIELD  # the field that errors about the answer's form name
        # gives an error about a field of a chat the name that the field has in this route's request
        self.renamed: Callable[[ApiError], ApiError] = lambda error: error
        self.warnings: list[str] = []
        self._receive = receive
        self._body = body
        self._bytes = request_bytes(scope)
        self.is_small = len(body) <= INLINE_BYTES

    async def parse[T: AnyRequest](self, kind: type[T]) -> T:
        """The request in the body; raises ``ApiError`` naming the invalid field."""
        self._check_media_type()
        strict, body, self._body = self.service.config.strict_fields, self._body, b""
        parsed = await run_off_loop(partial(parse, body, kind, strict=strict), self.is_small)
        self._bytes.release()
        for name in parsed.unknown:
            advice = "--strict-fields refuses such requests"
            self.service.log.warning_once("unknown_field", name, advice=advice)
        for name in parsed.request.named_models:
            self.service.check_model(name)
        if isinstance(parsed.request, GenerationFields):
            check_task(self.service.client.limits, pools=False)
        return parsed.request

    def refuse_hosted(self, found: Sequence[tuple[str, str]]) -> None:
        """Refuse the request if it has tools, or calls of them, that this server does not run, and
        the server is not to leave them out. ``found``: their paths and kinds.
        """
        if not found:
            return
        if not self.service.config.ignore_hosted_tools:
            path, kind = found[0]
            raise field_error(
                f"{path}.type",
                f"{path}.type {kind!r:.60} is run by its maker's servers, not by this one; leave "
                "it out, or start the server with --ignore-hosted-tools, which does so",
            )
        self.warnings.append(f"left out: {', '.join(f'{path} ({kind})' for path, kind in found)}")

    @property
    def has_body(self) -> bool:
        """True if the request's body is not empty."""
        return bool(self._body)

    async def unless_gone[T](self, work: Awaitable[T]) -> T:
        """The result of ``work``, which is cancelled if the client disconnects before its end."""
        task = asyncio.ensure_future(work)
        async with on_disconnect(self._receive, task.cancel):
            await asyncio.wait((task,))
        if task.cancelled():
            raise ApiError(CLIENT_GONE, "the client has gone")
        return task.result()

    async def updates(self, answer: Answer) -> list[ChoiceUpdate]:
        """All updates of an answer until its end; aborts it if the client disconnects."""
        updates: list[ChoiceUpdate] = []
        max_updates = MAX_UNJOINED_DELTAS + 2 * len(answer.finish_reasons)

        def add(more: list[ChoiceUpdate]) -> None:
            nonlocal updates
            updates += more
            if len(updates) > max_updates:  # a token's update takes 300 bytes, joined 10
                updates = merged_updates(updates)

        await self.read_all(answer, add)
        return updates

    async def read_all(self, answer: Answer, take: Callable[[list[ChoiceUpdate]], None]) -> None:
        """Pass all updates of an answer to ``take`` as they come, as ``updates`` does."""
        close = partial(self.service.close, answer)
        try:
            async with on_disconnect(self._receive, close):
                while more := await answer.read():
                    take(more)
        finally:
            close()
        if not answer.finished:
            raise ApiError(CLIENT_GONE, "the client has gone")

    def _check_media_type(self) -> None:
        """Raise ``ApiError`` (415) unless the headers declare uncompressed JSON."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != MEDIA_TYPE:
            raise ApiError(
                415,
                f"the content type must be {MEDIA_TYPE}, got {media_type or 'none'!r}; set the "
                "Content-Type header",
                code="unsupported_media_type",
            )
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(
                415,
                f"the content encoding {coding!r} is not supported; send the body as it is",
                code="unsupported_media_type",
                headers={"Accept-Encoding": "identity"},  # RFC 9110, 12.5.3
            )

    def stream(self, answer: Answer, writer: Writer[Any]) -> ASGIApp:
        """A response that sends the writer's events, or lines, as they come."""
        read, close = partial(writer.next_events, answer), partial(self.service.close, answer)
        ends = (writer.failure, writer.stream_end, writer.stream_type)
        return EventStream(read, close, self.explain, *ends)

    def explain(self, error: Exception) -> ApiError:
        """The error for the client; a server error is logged, an unexpected one with traceback."""
        return self.renamed(self._explained(error))

    def _explained(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        fields = {"request_id": self.request_id, "route": self.route}
        if isinstance(error, JaxinferError):
            api_error = self.service.error(error)
            if re.match(r"prompt(\[|$)", api_error.param or ""):
                api_error.param = f"{self.prompt_field}{(api_error.param or '')[len('prompt') :]}"
            api_error = with_field(api_error, self.form_field)
            if api_error.status >= 500:
                self.service.log.error("request_failed", **fields, reason=api_error.message)
            return api_error
        self.service.log.error("unexpected_error", exception=error, **fields)
        return ApiError(500, "an internal error occurred; the server's log has its request id")


@dataclass(eq=False)
class Endpoint:
    """A handler as an ASGI app."""

    service: Service
    path: str
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        status, call = CLIENT_GONE, None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if call is not None and call.warnings:
                    warning = "; ".join(call.warnings)[:MAX_WARNING_CHARACTERS]
                    header = (WARNING.encode(), warning.encode("ascii", "replace"))
                    message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            whole = await receive()  # the guard has read the body
            call = Call(self.service, scope, receive, whole.pop("body", b""))
            try:
                response = await self.handler(call)
            except Exception as error:
                response = call.explain(error).response(scope)
            await response(scope, receive, send_noted)
        finally:
            self.service.note_response(self.path, scope["method"], status, time.monotonic() - start)


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """200 with a struct or plain value as JSON."""
    return Response(msgspec.json.encode(value), 200, headers, media_type=MEDIA_TYPE)
