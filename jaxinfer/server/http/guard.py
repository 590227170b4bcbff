"""What every request passes on its way in: a label, CORS, the API key, the limits of its body.

Owns: plain ASGI layers around the app and their order. Nothing here buffers answers, so streams and
disconnects pass unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.log import EventLog

OPEN_PATHS = ("/health", "/ping", "/ready")  # what load balancers ask, without a key
QUIET_PATHS = (*OPEN_PATHS, "/metrics")  # asked every few seconds; their access is a debug line
BODY_SECONDS = 60.0  # for the whole body: a client that trickles holds memory no longer
LINGER_SECONDS = 10.0  # a refused body is read this long, so that its client sees the answer
LONGEST_REQUEST_ID = 128  # characters


type Refused = Callable[[str, int], None]  # told the method and status of what a guard refused


def guarded(
    app: ASGIApp,
    config: ServerConfig,
    log: EventLog,
    refused: Refused = lambda method, status: None,
) -> ASGIApp:
    """The app behind all layers: path, label and access log, CORS, key, body, from the outside in.

    CORS stands before the key because browsers send preflights without one. The request's id is in
    ``scope["state"]["request_id"]`` and in the answer's ``X-Request-Id``.
    """
    app = WholeBody(app, config.max_body_bytes, refused=refused)
    if config.api_key:
        app = KeyRequired(app, config.api_key, config.root_path, refused)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    access_log = None if config.disable_uvicorn_access_log else log
    return Unslashed(Labelled(app, access_log, config.root_path))


async def answer_error(send: Send, error: ApiError, *, more_body: bool = False) -> None:
    """Send the error as OpenAI's JSON. ``more_body``: the caller ends the answer itself."""
    body = error.body
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    headers |= error.headers
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


class Unslashed:
    """Takes slashes off the end of a path: all that follows sees the path of the route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class Labelled:
    """Gives the request its id and, once it has been answered, writes the access line."""

    def __init__(self, app: ASGIApp, log: EventLog | None, root_path: str) -> None:
        self._app = app
        self._log = log
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0  # of an answer that never began
        start = time.perf_counter()

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                label = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), label]}
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        finally:
            self._tell(scope, request_id, status, time.perf_counter() - start)

    def _tell(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if self._log is None:
            return
        path = scope["path"].removeprefix(self._root_path)
        write = self._log.debug if path in QUIET_PATHS else self._log.info
        client = scope.get("client")
        write(
            "access",
            request_id=request_id,
            client=client[0] if client else None,
            method=scope["method"],
            path=path,
            status=status,
            seconds=round(seconds, 6),
        )


class KeyRequired:
    """Lets in who knows one of the keys, on all paths but ``OPEN_PATHS``, also unknown ones."""

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], root_path: str, refused: Refused
    ) -> None:
        self._app = app
        self._refused = refused
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths = {root_path + path for path in OPEN_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            self._refused(scope["method"], 401)
            await answer_error(
                send,
                ApiError(
                    401,
                    "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                ),
            )

    def _knows(self, scope: Scope) -> bool:
        """Compares digests in constant time, with every key."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class WholeBody:
    """Reads the body before the app runs, within bounds of size and time, and hands it on whole."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        seconds: float = BODY_SECONDS,
        refused: Refused = lambda method, status: None,
    ) -> None:
        self._app = app
        self._refused = refused
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        incoming = Incoming(receive)
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(Headers(scope=scope), incoming)
        except TimeoutError:
            self._refused(scope["method"], 408)
            await answer_error(send, self._too_slow())
            return
        except ApiError as too_large:
            self._refused(scope["method"], too_large.status)
            await answer_error(send, too_large, more_body=True)
            await incoming.forget_rest()
            await send({"type": "http.response.body", "body": b""})
            return
        if body is not None:
            await self._app(scope, _replaying(body, receive), send)

    async def _read(self, headers: Headers, incoming: Incoming) -> bytes | None:
        """The body, or None when the client has gone; raises ``ApiError`` when it is too large."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        while not incoming.ended:
            parts.append(await incoming.read())
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
        return None if incoming.broken else b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request's body is larger than {self._max_bytes} bytes; send less, or start the "
            "server with a larger --max-body-bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the request's body did not arrive within {self._seconds:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        )


class Incoming:
    """The parts of one body as they come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False
        self.broken = False  # the client went before the end

    async def read(self) -> bytes:
        """The next part; sets ``ended`` with the last one."""
        message = await self._receive()
        self.broken = message["type"] != "http.request"
        self.ended = self.broken or not message.get("more_body", False)
        return message.get("body", b"")

    async def forget_rest(self) -> None:
        """Take the rest off the wire; else the kernel resets the connection, answer and all."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.ended:
                    await self.read()
        except TimeoutError:
            return


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the whole body once, then what comes after it."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def _request_id(given: str | None) -> str:
    """The client's id if it is safe to echo and log, else a new one."""
    if given and len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return f"req-{uuid4().hex}"
