"""The layers in front of the app, each with an app that records the requests that reach it."""

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.core.log import JsonLines
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http import guard
from jaxinfer.server.http.guard import BodyLimits, guarded
from jaxinfer.server.http.keys import api_keys
from jaxinfer.server.http.log import LOGGER, EventLog
from jaxinfer.server.routes.app import ROUTES, create_app
from jaxinfer.server.service.service import Service


class Echo:
    """Responds with the size of the body after reading it all; records the requests."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message["body"])
            more = message.get("more_body", False)
        text = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})


def ask(
    config: ServerConfig,
    method: str = "GET",
    path: str = "/v1/models",
    app: Any = None,
    **more: Any,
) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(
            app or guarded(Echo(), config, EventLog(), api_keys(config))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(asked())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# the API key

KEYS = ServerConfig(api_key=("first", "second"))


@pytest.mark.parametrize(
    "path", [*(route.path for route in ROUTES if not route.is_admin), "/nowhere"]
)
def test_every_route_needs_the_key(path: str) -> None:
    """The app's own table; its service is not loaded, so a request that passes the key gets 503."""
    app = create_app(Service(KEYS, EventLog()))
    method = next((one.method for one in ROUTES if one.path == path), "GET")
    response = ask(KEYS, method, path, app=app)
    if path in ("/health", "/ping", "/ready"):
        assert response.status_code == 503
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "invalid_api_key" in response.text
    for headers in ({"Authorization": "Bearer second"}, {"x-api-key": "second"}):
        assert ask(KEYS, method, path, app=app, headers=headers).status_code != 401


WRONG = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer third",
    "Bearer firs",
    "Bearer firstsecond",
    "Basic first",
    "first",
    "Bearer caf\u00e9",
    "Bearer \u00a0first",
    "Bearer first\u0085",
]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_keys(given: str) -> None:
    key = given.removeprefix("Bearer ").encode("latin-1")
    for headers in ({"Authorization": given.encode("latin-1")}, {"x-api-key": key + b"x"}):
        assert ask(KEYS, headers=headers).status_code == 401


@pytest.mark.parametrize("given", ["Bearer first", "bearer second", "Bearer  first "])
def test_right_keys(given: str) -> None:
    assert ask(KEYS, headers={"Authorization": given}).status_code == 200


@pytest.mark.parametrize("path", ["//health", "/ready/x", "/pings", "/", "/v1/models?x=/health"])
def test_only_exact_paths_are_open(path: str) -> None:
    assert ask(KEYS, path=path).status_code == 401


@pytest.mark.parametrize(
    "path", ["/health%0a", "/pause%0A", "/pause%0d", "/pause%0a/", "/v1/responses/a/cancel%0a"]
)
def test_a_path_with_a_line_feed_is_unknown(path: str) -> None:
    config = ServerConfig(admin_api_key=("admin",))
    app = create_app(Service(config, EventLog()))
    for method in ("GET", "POST"):
        response = ask(config, method, path, app=app, headers={"Authorization": "Bearer admin"})
        assert response.status_code == 404


@pytest.mark.parametrize("path", ["/health/", "/ready//", "/ping/"])
def test_a_slash_at_the_end_closes_nothing(path: str) -> None:
    assert ask(KEYS, path=path).status_code == 200


def test_open_paths_below_a_root_path() -> None:
    config = ServerConfig(api_key=("k",), root_path="/llm")
    assert ask(config, path="/llm/health").status_code == 200
    assert ask(config, path="/llm/v1/models").status_code == 401


# CORS

PREFLIGHT = {"Origin": "https://a.b", "Access-Control-Request-Method": "POST"}


def test_cors_is_closed_by_default() -> None:
    response = ask(ServerConfig(), "OPTIONS", headers=PREFLIGHT)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_preflight_needs_no_key() -> None:
    config = ServerConfig(api_key=("k",), allowed_origins=("https://a.b",))
    preflight = ask(config, "OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.b"
    refused = ask(config, headers={"Origin": "https://a.b"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.b"
    other = ask(config, "OPTIONS", headers={**PREFLIGHT, "Origin": "https://evil"})
    assert "access-control-allow-origin" not in other.headers


# request ids and the access log


@pytest.mark.parametrize("given", ["abc", "a b", "x" * 128])
def test_a_sane_request_id_is_kept(given: str) -> None:
    echo = Echo()
    app = guarded(echo, ServerConfig(), EventLog(), None)
    response = ask(ServerConfig(), app=app, headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given
    assert echo.scopes[0]["state"]["request_id"] == given


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a\tb", b"caf\xe9"])
def test_an_unsafe_request_id_is_replaced(given: bytes) -> None:
    response = ask(ServerConfig(), headers={"X-Request-Id": given})
    assert re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The output of the server's logger."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_access_lines(lines: io.StringIO) -> None:
    ask(KEYS, headers={"X-Request-Id": "mine"})
    ask(KEYS, path="/health")
    [line] = map(json.loads, lines.getvalue().splitlines())
    assert line["event"] == "access"
    assert (line["request_id"], line["method"], line["path"]) == ("mine", "GET", "/v1/models")
    assert line["status"] == 401
    ask(ServerConfig(disable_uvicorn_access_log=True))
    assert lines.getvalue().count("\n") == 1


# bodies


async def chunks(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


SMALL = ServerConfig(max_body_bytes=1000)


def test_a_body_within_the_limit_arrives_whole() -> None:
    assert ask(SMALL, "POST", content=b"x" * 1000).text == "1000"
    assert ask(SMALL, "POST", content=chunks(10, 100)).text == "1000"
    assert ask(SMALL, "POST").text == "0"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_larger_one_is_413(chunked: bool) -> None:
    echo = Echo()
    app = guarded(echo, SMALL, EventLog(), None)
    content = chunks(11, 100) if chunked else b"x" * 1001
    response = ask(SMALL, "POST", app=app, content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"
    assert not echo.scopes


class Body:
    """A client's body, chunk by chunk, and the response to it."""

    def __init__(self, *messages: Message, gap: float = 0.0) -> None:
        self.left = list(messages)
        self.gap = gap
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await asyncio.sleep(self.gap)
        return self.left.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def run(self, app: Any, **headers: str) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": raw}
        asyncio.run(app(scope, self.receive, self.send))


def limited(app: Any, max_bytes: int, seconds: float = 60.0) -> BodyLimits:
    return BodyLimits(
        app, max_bytes, seconds, lambda method, path: True, lambda method, status: None
    )


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_slow_body_is_408() -> None:
    body = Body(*[part(b"x")] * 100, gap=0.02)
    echo = Echo()
    body.run(limited(echo, 1000, seconds=0.1))
    assert body.sent[0]["status"] == 408
    assert len(body.left) > 80
    assert not echo.scopes


def test_the_rest_of_a_refused_body_is_read_after_the_answer() -> None:
    body = Body(*[part(b"x" * 600)] * 9, part(b"", more=False))
    body.run(limited(Echo(), 1000))
    assert [message.get("status") for message in body.sent] == [413, None, None]
    assert [message.get("more_body") for message in body.sent[1:]] == [True, None]
    assert not body.left


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.1)
    body = Body(*[part(b"x" * 600)] * 100, gap=0.02)
    body.run(limited(Echo(), 1000), content_length="60000")
    assert body.sent[0]["status"] == 413
    assert len(body.left) > 80


def test_a_body_that_ends_early_does_not_reach_the_app() -> None:
    echo = Echo()
    body = Body(part(b"x"), {"type": "http.disconnect"})
    body.run(limited(echo, 1000))
    assert body.sent == []
    assert not echo.scopes


def test_a_disconnect_after_the_body_is_passed_on() -> None:
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])

    Body(part(b"ab"), part(b"c", more=False), {"type": "http.disconnect"}).run(limited(app, 9))
    assert seen == [part(b"abc", more=False), {"type": "http.disconnect"}]


def test_refusals_of_a_guard_are_reported() -> None:
    told: list[tuple[str, int]] = []
    config = ServerConfig(api_key=("secret",), max_body_bytes=10)
    app = guarded(
        Echo(), config, EventLog(), api_keys(config), lambda *refusal: told.append(refusal)
    )
    ask(config, app=app)
    key = {"Authorization": "Bearer secret"}
    ask(config, "POST", app=app, headers=key, content=b"x" * 11)
    assert ask(config, "POST", app=app, headers=key, content=b"x").status_code == 200
    assert told == [("GET", 401), ("POST", 413)]
