"""ASGI layers in front of the app: request id, access log, connections, hosts, CORS, API key, body.

None of them buffers responses, so streams and disconnects pass through unchanged.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.core.server_config import ServerConfig, is_address
from jaxinfer.server.http.buffered import BufferedBytes, RequestBytes
from jaxinfer.server.http.errors import ApiError, is_anthropic
from jaxinfer.server.http.keys import Keys
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.http.protocol import BYTES, LINGER_SECONDS, OVER_LIMIT, too_many_bytes

OPEN_PATHS = ("/health", "/ping", "/ready")  # for health checks by load balancers, without a key
# polled every few seconds, so their access is logged at debug level
QUIET_PATHS = (*OPEN_PATHS, "/metrics")
_PORT = re.compile(":[0-9]*$")  # at the end of a Host header
_SAFE_REQUEST_ID = re.compile("[ -~]{1,128}")  # printable ASCII


# called with the method and status of each refused request
type OnRefusal = Callable[[str, int], None]


def guarded(
    app: ASGIApp,
    config: ServerConfig,
    log: EventLog,
    keys: Keys | None,
    on_refusal: OnRefusal = lambda method, status: None,
    open_paths: Sequence[str] = OPEN_PATHS,
    takes_body: Callable[[str, str], bool] = lambda method, path: True,
) -> ASGIApp:
    """The app behind all layers. Without ``keys`` requests need none.

    From the outside in: request id and access log, connections, hosts, CORS, API key, body. CORS
    is outside the key check because browsers send preflight requests without a key. ``open_paths``
    need no key. Only requests with a method and path that ``takes_body`` have their body read.
    uvicorn is set up so that every scope is one of HTTP. The request id is in
    ``scope["state"]["request_id"]`` and in the response's ``X-Request-Id``. Also in that state: the
    salt and the name of the request's key, if it has some, as ``key_salt`` and ``key_name``; and as
    ``client`` a text that tells its sender from others, by key or address.
    """
    probes = frozenset(config.root_path + path for path in OPEN_PATHS)
    app = BodyLimits(app, config.max_body_bytes, config.body_timeout, takes_body, on_refusal)
    if keys is not None:
        paths = frozenset(config.root_path + path for path in open_paths)
        app = ApiKeyRequired(app, keys, paths, on_refusal)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if (hosts := config.checked_hosts) is not None:
        app = AllowedHosts(app, hosts, probes, on_refusal)
    app = ConnectionLimit(app, probes, on_refusal)
    access_log = None if config.disable_uvicorn_access_log else log
    return WithRequestId(app, access_log, config.root_path)


@dataclass(eq=False)
class WithRequestId:
    """Sets the request id and the path of the route, and writes the access log after the response.

    Slashes at the end of the path are removed here, so that later layers see the route's path;
    only the route ``/`` has one.
    """

    app: ASGIApp
    log: EventLog | None
    root_path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        scope = {**scope, "path": f"{path}/" if path == self.root_path else path}
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        address = scope.get("client")
        scope["state"].setdefault("client", address[0] if address else "a socket without address")
        status = 0  # stays 0 if no response was started
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if is_anthropic(scope):
                    headers.append((b"request-id", request_id.encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            request_bytes(scope).discard()
            self._log_access(scope, request_id, status, time.perf_counter() - start)

    def _log_access(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if self.log is None:
            return
        path = scope["path"].removeprefix(self.root_path)
        write = self.log.debug if path in QUIET_PATHS else self.log.info
        client, state = scope.get("client"), scope["state"]
        write(
            "access",
            request_id=request_id,
            client=client[0] if client else None,
            **({"key": state["key_name"]} if "key_name" in state else {}),
            method=scope["method"],
            path=path,
            status=status,
            seconds=round(seconds, 6),
        )


def wrong_key(which: str = "API") -> ApiError:
    """The error for a request without a valid key."""
    return ApiError(
        401,
        f"the {which} key is missing or wrong; send it as `Authorization: Bearer KEY` or "
        "`x-api-key: KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class ApiKeyRequired:
    """Refuses requests without a valid API key, also on unknown paths; open paths need none."""

    def __init__(
        self, app: ASGIApp, keys: Keys, open_paths: Set[str], on_refusal: OnRefusal
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._keys.find(Headers(scope=scope))
        if key is not None:
            scope["state"] |= {"key_salt": key.salt, "client": f"key {key.salt}"}
            if key.name:
                scope["state"]["key_name"] = key.name
        if key is not None or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
        else:
            self._on_refusal(scope["method"], 401)
            await answer_unread(wrong_key().response(scope), scope, receive, send)


@dataclass(eq=False)
class ConnectionLimit:
    """Refuses requests of connections beyond the limit, but no health checks."""

    app: ASGIApp
    probes: Set[str]
    on_refusal: OnRefusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if OVER_LIMIT not in scope["state"] or scope["path"] in self.probes:
            await self.app(scope, receive, send)
            return
        self.on_refusal(scope["method"], 503)
        refused = ApiError(
            503,
            "as many connections are open as are allowed (--max-connections); try again later",
            code="too_many_connections",
            headers={"Retry-After": "1"},
        )
        await answer_unread(refused.response(scope), scope, receive, send)


@dataclass(eq=False)
class AllowedHosts:
    """Refuses requests with another name in their Host header; see ``ServerConfig``.

    An address is no name that a page can have, so health checks and programs may use any.
    """

    app: ASGIApp
    hosts: Sequence[str]  # *.example.com: every name below it
    probes: Set[str]
    on_refusal: OnRefusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).getlist("host")
        if scope["path"] in self.probes or all(map(self._allows, given)):
            await self.app(scope, receive, send)
            return
        self.on_refusal(scope["method"], 403)
        refused = ApiError(
            403,
            f"{given[-1][:200]!r} is not a name of this server; if it is one, start it with "
            "--allowed-hosts and that name",
            code="host_not_allowed",
        )
        await answer_unread(refused.response(scope), scope, receive, send)

    def _allows(self, given: str) -> bool:
        name = _PORT.sub("", given).strip("[]").rstrip(".").lower()
        if not name or name == "localhost" or name.endswith(".localhost") or is_address(name):
            return True
        return any(
            name.endswith(host[1:].lower()) if host.startswith("*.") else name == host.lower()
            for host in self.hosts
        )


@dataclass(eq=False)
class BodyLimits:
    """Reads the whole body before the app runs, within limits of size and time."""

    app: ASGIApp
    max_bytes: int
    seconds: float  # for the whole body, so that a slow client does not hold memory longer
    takes_body: Callable[[str, str], bool]
    on_refusal: OnRefusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.takes_body(scope["method"], scope["path"]):
            await answer_unread(self.app, scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):  # nothing here keeps the body
                replay = _replaying(await self._read(scope, receive), receive)
        except ClientDisconnect:
            return
        except TimeoutError:
            self.on_refusal(scope["method"], 408)
            too_slow = ApiError(
                408,
                f"the request's body did not arrive within {self.seconds:g} s (--body-timeout)",
                code="request_timeout",
                headers={"Connection": "close"},
            )
            await too_slow.response(scope)(scope, receive, send)
        except ApiError as refused:
            self.on_refusal(scope["method"], refused.status)
            # its traceback would keep what has been read of the body
            response = refused.with_traceback(None).response(scope)
            await answer_unread(response, scope, receive, send, has_body=True)
        else:
            await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body; raises ``ApiError`` if it is too large."""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise self._too_large()
        received = bytearray()
        while await self._read_part(scope, receive, received):
            pass
        return bytes(received)

    async def _read_part(self, scope: Scope, receive: Receive, received: bytearray) -> bool:
        """Read a part of the body, which is not kept; True if more follows."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if (held := request_bytes(scope)).refused:
            raise too_many_bytes(held.max_total)
        received += message.get("body", b"")
        if len(received) > self.max_bytes:
            raise self._too_large()
        return message.get("more_body", False)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request's body is larger than {self.max_bytes} bytes; send less, or start the "
            "server with a larger --max-body-bytes",
            code="request_too_large",
        )


async def answer_unread(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, has_body: bool | None = None
) -> None:
    """Run an app that does not read the request's body, for which the body is empty.

    If there is a body (None: if the head announces one), the connection is closed after the
    response. Until then the body is read and dropped for some seconds: otherwise the kernel resets
    the connection and the client does not get the response.
    """
    if has_body is None:
        head = Headers(scope=scope)
        has_body = head.get("content-length", "0") != "0" or "transfer-encoding" in head
    if not has_body:
        await app(scope, receive, send)
        return

    async def send_unended(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    request_bytes(scope).discard()
    await app(scope, _replaying(b"", receive), send_unended)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await _continues(receive):
                pass
    await send({"type": "http.response.body", "body": b""})


async def _continues(receive: Receive) -> bool:
    """Read and drop a part of the body; True if more follows."""
    message = await receive()
    return message["type"] == "http.request" and message.get("more_body", False)


def request_bytes(scope: Scope) -> RequestBytes:
    """The bytes of a request; those of one that came over no connection are not counted."""
    state = scope.setdefault("state", {})
    if BYTES not in state:
        state[BYTES] = RequestBytes(BufferedBytes(0))
    found: RequestBytes = state[BYTES]
    return found


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the whole body once, then the messages of ``receive``."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def _request_id(given: str | None) -> str:
    """The client's id if it is safe to return and log, else a new one."""
    return given if given and _SAFE_REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"
