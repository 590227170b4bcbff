"""What clients may make the server hold: bodies that no route reads, bytes of requests that are not
whole, connections, pipelined requests, headers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from bench.held_connections import CASES, Case, measured
from jaxinfer.server.http import buffered, guard, protocol
from jaxinfer.server.http.buffered import UNCOUNTED_BYTES, BufferedBytes, RequestBytes
from jaxinfer.server.http.protocol import PIPELINED_BYTES
from jaxinfer.server.routes.app import ROUTES
from kit.raw_http import RawClient, get, post
from kit.server import Serving, serving
from kit.server_process import SIM_SERVE, server_process, sim_arguments, wait_until
from kit.watched_executor import watched_engine

ROUTE = "/v1/completions"
KEY = "authorization: Bearer secret"
SHORT = {"prompt": "hello", "max_tokens": 2}
MIB = 1 << 20


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def total(server: Serving) -> int:
    """The bytes that the server counts now."""
    return server.buffered.num_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """A server with keys and all routes."""
    settings = {"api_key": ("secret",), "admin_api_key": ("admin",), "max_buffered_bytes": MIB}
    with serving(watched_engine()[0], **settings) as running:
        yield running
        wait_until(lambda: not total(running), "nothing is counted any more")


# bodies that no route reads

UNREAD = [
    *(("GET", path) for path in ("/health", "/ready", "/", "/ui/page.js", "/metrics", "/nowhere")),
    *(("POST", path) for path in ("/ping", "/nowhere", "/v1/models", "/resume", "/sleep")),
    *(("DELETE", "/v1/responses/x"), ("POST", "/v1/responses/x/cancel")),
    *(("OPTIONS", ROUTE), ("PUT", ROUTE), ("HEAD", "/health")),
]
ANNOUNCED = {
    "length": "content-length: 8388608",
    "chunks": "transfer-encoding: chunked",
}


@pytest.mark.parametrize("announced", ANNOUNCED)
@pytest.mark.parametrize(("method", "path"), UNREAD)
def test_a_body_that_no_route_reads(
    server: Serving, method: str, path: str, announced: str
) -> None:
    """It is answered before the body arrives, and then the connection is closed."""
    for key in (KEY, "x-nothing: 1"):
        with RawClient(server.port) as client:
            client.send(head(method, path, ANNOUNCED[announced], key))
            reply = client.reply()
            assert reply.status in (200, 401, 404, 405), reply
            assert reply.headers["connection"] == "close"
            client.send(b"x" * 100_000)
            assert total(server) == 0


def test_every_route_is_known_to_take_a_body_or_none() -> None:
    posts = [route for route in ROUTES if route.method == "POST"]
    without = {"/ping", "/resume", "/sleep", "/wake_up", "/v1/responses/{response_id}/cancel"}
    assert {route.path for route in posts if not route.takes_body} == without


@pytest.mark.parametrize("path", [ROUTE, "/v1/messages", "/tokenize", "/pause"])
def test_a_wrong_key_is_refused_before_the_body(server: Serving, path: str) -> None:
    with RawClient(server.port) as client:
        client.send(head("POST", path, "content-length: 1000", "authorization: Bearer wrong"))
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (401, "close")


def test_a_refused_client_is_not_told_to_continue(server: Serving) -> None:
    with RawClient(server.port) as client:
        client.send(head("POST", ROUTE, "content-length: 1000", "expect: 100-continue"))
        assert client.reply().status == 401
    with RawClient(server.port) as client:
        more = ("expect: 100-continue", "connection: close", KEY)
        client.send(head("POST", ROUTE, "content-length: 2", *more))
        client.wait()
        client.send(b"{}")
        assert client.rest().startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 415")


def test_a_body_after_the_answer_is_not_awaited_for_ever(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (guard, protocol):
        monkeypatch.setattr(module, "LINGER_SECONDS", 0.2)
    start = time.monotonic()
    with RawClient(server.port) as client:
        client.send(head("POST", "/ping", "content-length: 1000")).send(b"x" * 10)
        assert b"200 OK" in client.rest()  # until the server closes
    assert 0.2 <= time.monotonic() - start < 5


def test_an_answered_preflight_with_a_body_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.2)
    with serving(watched_engine()[0], allowed_origins=("https://a.b",)) as server:
        preflight = ("origin: https://a.b", "access-control-request-method: POST")
        with RawClient(server.port) as client:
            client.send(head("OPTIONS", ROUTE, "content-length: 1000", *preflight)).send(b"x")
            assert b"200 OK" in client.rest()


# bytes of all requests


def upload(size: int, *, whole: int) -> bytes:
    """A request with the first ``size`` bytes of its body of ``whole``."""
    length = f"content-length: {whole}"
    return head("POST", ROUTE, length, KEY, "content-type: application/json") + b" " * size


def test_bytes_beyond_the_limit_are_refused_and_short_requests_are_not(server: Serving) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(RawClient(server.port)) for _ in range(6)]
        for client in slow[:4]:
            client.send(upload(MIB // 4, whole=MIB))
        wait_until(lambda: total(server) > MIB * 0.9, "they are counted")
        for client in slow[4:]:
            client.send(upload(MIB // 4, whole=MIB))
            reply = client.reply()
            assert (reply.status, reply.error["code"]) == (503, "too_many_bytes")
            assert reply.headers["retry-after"] == "1" and reply.headers["connection"] == "close"
        assert MIB * 0.9 < total(server) <= MIB
        with RawClient(server.port) as short:
            body = b'{"prompt": "hello", "max_tokens": 2}' + b" " * (UNCOUNTED_BYTES - 1000)
            assert short.post_body(ROUTE, body, KEY).reply().status == 200
        for client in slow:
            client.disconnect()
    wait_until(lambda: not total(server), "they are not counted any more")


def test_a_request_is_counted_until_it_is_parsed() -> None:
    engine, executor = watched_engine()
    with serving(engine, max_buffered_bytes=MIB) as server, ExitStack() as stack:
        with executor.held():
            body = b'{"prompt": "hello", "max_tokens": 2}' + b" " * (MIB // 2)
            clients = [stack.enter_context(RawClient(server.port)) for _ in range(4)]
            for number, client in enumerate(clients):
                client.post_body(ROUTE, body)
                wait_until(lambda n=number: server.service.client.num_open == n + 1, "it is open")
            assert total(server) == 0
        assert {client.reply().status for client in clients} == {200}


def test_pipelined_requests_are_counted() -> None:
    """Each takes memory that is much more than its bytes, while it waits for those before it."""
    engine, executor = watched_engine()
    body = b'{"prompt": "hello", "max_tokens": 2}'
    first = head("POST", ROUTE, f"content-length: {len(body)}", "content-type: application/json")
    first, next_one = first + body, head("GET", "/health")
    with serving(engine, max_buffered_bytes=MIB) as server, ExitStack() as stack:
        with executor.held():
            client = stack.enter_context(RawClient(server.port))
            client.send(first + next_one * 100)
            wait_until(lambda: total(server) >= 100 * PIPELINED_BYTES, "they are counted")
            with RawClient(server.port) as other:
                other.send(first + next_one * 1000)
                assert other.reply().error["code"] == "too_many_bytes"
            wait_until(lambda: total(server) <= 120 * PIPELINED_BYTES, "only those of one")
        client.send(head("GET", "/health", "connection: close"))
        assert client.rest().count(b"HTTP/1.1 200 OK") == 102
        wait_until(lambda: not total(server), "they are not counted any more")


@pytest.mark.parametrize("is_stream", [b"false", b"true"])
def test_who_leaves_with_requests_in_the_pipeline_is_noticed(is_stream: bytes) -> None:
    engine, executor = watched_engine()
    body = b'{"prompt": "hello", "max_tokens": 2, "stream": %s}' % is_stream
    with serving(engine) as server, executor.held():
        with RawClient(server.port) as client:
            client.post_body(ROUTE, body, "connection: keep-alive").send(head("GET", "/health"))
            wait_until(lambda: server.service.client.num_open == 1, "it is open")
        wait_until(lambda: server.service.client.num_open == 0, "it is aborted")


def test_bytes_that_are_not_http_do_not_become_a_part_of_a_stream() -> None:
    engine, executor = watched_engine()
    body = b'{"prompt": "hello", "max_tokens": 50, "stream": true}'
    with serving(engine) as server, RawClient(server.port) as client:
        client.post_body(ROUTE, body, "connection: keep-alive").send(head("GET", "/health")).wait()
        with executor.held():
            said = client.send(b"\x16\x03\x01 hello\r\n\r\n").rest()
            wait_until(lambda: server.service.client.num_open == 0, "it is aborted")
    assert said.startswith(b"HTTP/1.1 200 ") and b"invalid_http" not in said


def test_headers_are_limited_in_number(server: Serving) -> None:
    for count, status in ((protocol.MAX_HEADERS - 2, 200), (protocol.MAX_HEADERS + 1, 431)):
        with RawClient(server.port) as client:
            client.send(head("GET", "/health", *["a:b"] * count))
            reply = client.reply()
            assert reply.status == status
    assert reply.error["code"] == "head_too_large" and "headers" in reply.error["message"]


@pytest.mark.parametrize("key", [KEY, "x-nothing: 1"])
def test_tiny_chunks_are_limited_in_number(server: Serving, key: str) -> None:
    """Each takes the parser as long as a large one, also after the answer."""
    chunked = head("POST", ROUTE, "transfer-encoding: chunked", key, "content-type: text/plain")
    few = b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n"
    with RawClient(server.port) as client:
        assert client.send(chunked + few).reply().status == (415 if key is KEY else 401)
    with RawClient(server.port) as client:
        answer = client.send(chunked + b"1\r\nx\r\n" * 200_000).rest()
        assert answer.startswith(b"HTTP/1.1 4") and answer.count(b"HTTP/1.1") == 1
    large = (b"200\r\n" + b" " * 512 + b"\r\n") * 1800 + b"0\r\n\r\n"
    with RawClient(server.port) as client:
        assert client.send(chunked + large).reply().status == (415 if key is KEY else 401)


@pytest.mark.parametrize(
    "framing",
    [
        ("content-length: 2", "transfer-encoding: chunked"),
        ("content-length: 2", "content-length: 3"),
        ("content-length: -1",),
        ("content-length: 0x2",),
        ("transfer-encoding: gzip",),
        ("transfer-encoding: chunked, identity",),
    ],
)
def test_ambiguous_bodies_are_no_http(server: Serving, framing: tuple[str, ...]) -> None:
    with RawClient(server.port) as client:
        client.send(head("POST", ROUTE, KEY, *framing) + b"{}")
        assert client.reply().status == 400


def test_an_upgrade_is_answered_as_http(server: Serving) -> None:
    with RawClient(server.port) as client:
        upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
        client.send(head("GET", "/health", *upgrade))
        assert client.reply().status == 200


@pytest.mark.parametrize("framing", ["content-length: 40", "transfer-encoding: chunked"])
def test_a_body_after_an_upgrade_is_no_request(server: Serving, framing: str) -> None:
    """The parser takes it for another protocol, and after that what follows for a request."""
    with RawClient(server.port) as client:
        client.send(head("POST", ROUTE, framing, KEY, "connection: upgrade", "upgrade: h2c"))
        said = client.send(head("GET", "/version", "connection: close", KEY)).rest()
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1
    assert b"upgrade_with_body" in said


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (head("GET", "/health", *["a:b"] * (protocol.MAX_HEADERS + 1)), "head_too_large"),
        (head("GET", f"/{'x' * 70_000}"), "head_too_large"),
        (b"\x16\x03\x01 hello\r\n\r\n", "invalid_http"),
    ],
    ids=["headers", "path", "TLS"],
)
def test_a_client_that_sends_on_after_an_error_can_read_it(
    server: Serving, first: bytes, code: str
) -> None:
    """A socket closed with bytes unread resets the connection."""
    with RawClient(server.port) as client:
        said = client.send(first + b"x" * (1 << 20)).rest()
    assert said.startswith(b"HTTP/1.1 4") and said.count(b"HTTP/1.1 ") == 1
    assert code.encode() in said


def test_a_client_that_never_stops_sending_is_cut_off(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REFUSED_SECONDS", 0.2)
    with RawClient(server.port) as client:
        client.send(b"no HTTP\r\n\r\n").wait()
        wait_until(lambda: server.num_connections == 1, "it is open")
        wait_until(lambda: server.num_connections == 0, "it is closed")


# connections


def test_connections_beyond_the_limit_get_an_error_and_health_checks_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "RESERVED_CONNECTIONS", 2)
    monkeypatch.setattr(protocol, "REFUSED_SECONDS", 0.5)
    with serving(watched_engine()[0], max_connections=3) as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawClient(server.port))
        wait_until(lambda: server.num_connections == 3, "they are open")
        for path in ("/health", "/ready", "/ping"):
            reply = get(server.port, path)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        refused = post(server.port, ROUTE, **SHORT)
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close" and refused.headers["x-request-id"]
        with RawClient(server.port) as silent, RawClient(server.port) as other:
            wait_until(lambda: server.num_connections == 5, "the reserve is used up")
            with RawClient(server.port) as last, suppress(ConnectionResetError):
                assert last.rest() == b""
            assert not (silent.has_reply or other.has_reply)
            assert silent.rest() == other.rest() == b""  # closed after REFUSED_SECONDS
    with serving(watched_engine()[0], max_connections=3) as server:
        assert post(server.port, ROUTE, **SHORT).status == 200


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the clients
@pytest.mark.parametrize("key", [(), ("--api-key", "secret")], ids=["no key", "a key"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_1000_connections_hold_under_100_mib(case: Case, key: tuple[str, ...]) -> None:
    command = (*SIM_SERVE, *sim_arguments(0.0), "--disable-uvicorn-access-log", *key)
    with server_process(*command) as server:
        found = asyncio.run(measured(case, server.pid, server.port, 1000))
        assert found["growth_mib"] < 100 and found["left_mib"] < 40, found
        assert get(server.port, "/health").status == 200


# the counter


def test_counted_bytes() -> None:
    pool = BufferedBytes(100)
    one, other = RequestBytes(pool, uncounted=10), RequestBytes(pool, uncounted=10)
    assert one.add(10) and pool.num_bytes == 0
    assert one.add(5) and one.add(60) and pool.num_bytes == 65
    assert other.add(45) and pool.num_bytes == 100
    assert not other.add(1) and other.refused and not one.refused
    assert pool.num_bytes == 65
    assert not other.add(1) and one.add(35) and pool.num_bytes == 100
    one.release()
    other.release()
    one.discard()
    assert pool.num_bytes == 0 and not one.add(1) and not one.refused


def test_the_heap_is_trimmed_after_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered, "TRIMMED_BYTES", 50)
    monkeypatch.setattr(buffered, "TRIM_SECONDS", 0.01)
    calls: list[int] = []

    async def main() -> None:
        pool = BufferedBytes(100, lambda: calls.append(pool.num_bytes))
        for size, expected in ((20, 0), (30, 1), (40, 1), (100, 2)):
            for _ in range(2):
                pool.receive(size // 2)
            await asyncio.sleep(0.05)
            assert len(calls) == expected

    asyncio.run(main())


def test_run_batch_counts_nothing(server: Serving) -> None:
    """Its requests come over no connection."""
    scope: dict[str, Any] = {}
    held = guard.request_bytes(scope)
    assert guard.request_bytes(scope) is held and held.add(1)
