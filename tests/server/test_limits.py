"""Timeouts, queue limits, order of service, and invalid requests, while other requests run."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from jaxinfer.server.routes import generation
from jaxinfer.server.service.endpoint import json_response
from kit.raw_http import RawClient, Reply, get, post
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.watched_executor import WatchedExecutor, watched_engine

ROUTE = "/v1/completions"
SHORT = {"prompt": "hello", "max_tokens": 4}
LONG = {"prompt": "hello", "max_tokens": 2000}
MANY = 100_000

type Watched = tuple[Serving, WatchedExecutor]


# timeouts


@pytest.mark.parametrize(
    ("settings", "fields", "param"),
    [
        ({}, {"timeout": 0.5}, "timeout"),
        ({"request_timeout": 0.5}, {}, None),
        ({"request_timeout": 0.5}, {"timeout": 60}, None),
        ({"request_timeout": 60}, {"timeout": 0.5}, "timeout"),
    ],
    ids=["asked", "allowed", "allowed less", "asked less"],
)
def test_a_deadline(settings: dict[str, Any], fields: dict[str, Any], param: str | None) -> None:
    engine, _ = watched_engine(2, step_seconds=0.005)  # the stream begins long before the deadline
    with serving(engine, **settings) as server, ExitStack() as stack:
        clients = [  # two run, two wait
            stack.enter_context(RawClient(server.port)).post(ROUTE, **LONG, **fields, stream=stream)
            for stream in (True, False, False, False)
        ]
        events, *wholes = clients[0].reply().events, *(client.reply() for client in clients[1:])
        assert events[0]["choices"][0]["text"]
        for error in (events[-1]["error"], *(whole.error for whole in wholes)):
            assert error["code"] == "deadline_exceeded" and error["param"] == param
            assert "0.5 s" in error["message"] and error["type"] == "timeout_error"
        assert [whole.status for whole in wholes] == [408] * 3
        assert {whole.headers["x-should-retry"] for whole in wholes} == {"false"}
        server.wait_until_idle()
        assert server.engine.stats().num_generated_tokens < 1000
        assert post(server.port, ROUTE, **SHORT).status == 200


def test_a_deadline_frees_the_pages_of_a_reader_that_does_not_come() -> None:
    engine, executor = watched_engine(2, max_model_len=4096)
    name = "m" * 20_000  # the first events fill all buffers
    with (
        serving(engine, send_buffer=8192, served_model_name=(name,)) as server,
        RawClient(server.port, receive_buffer=4096) as client,
    ):
        client.post(ROUTE, prompt="a", max_tokens=4000, stream=True, timeout=0.3).wait()
        wait_until(lambda: not server.engine.has_work, "it is out of the engine")
        assert len(executor.plans) < 4000 and not server.engine.stats().num_live_pages
        assert client.reply().events[-1]["error"]["code"] == "deadline_exceeded"


# queues


def test_requests_beyond_the_limit_are_refused_exactly() -> None:
    engine, executor = watched_engine(4)
    with serving(engine, max_num_queued_reqs=3) as server, ExitStack() as stack:
        with executor.held():
            asked = [stack.enter_context(RawClient(server.port)) for _ in range(7)]
            for number, client in enumerate(asked):
                client.post(ROUTE, **SHORT)
                wait_until(lambda n=number: server.service.client.num_open == n + 1, "it is in")
            for _ in range(2):
                refused = post(server.port, ROUTE, **SHORT)
                assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
                assert refused.error["type"] == "rate_limit_error"
                assert refused.error["code"] == "queue_full" and " 3 " in refused.error["message"]
        assert [client.reply().status for client in asked] == [200] * 7
        assert post(server.port, ROUTE, **SHORT).status == 200


def test_prompt_tokens_beyond_the_limit_are_refused_exactly() -> None:
    engine, executor = watched_engine(1)
    prompt = [7] * 10
    with serving(engine, max_num_queued_tokens=25) as server, ExitStack() as stack:
        with executor.held():
            asked = [stack.enter_context(RawClient(server.port)) for _ in range(3)]
            for number, client in enumerate(asked):
                client.post(ROUTE, prompt=prompt, max_tokens=4)
                wait_until(lambda n=number: server.service.client.num_open == n + 1, "it is in")
                if not number:  # a running request does not count
                    wait_until(lambda: bool(executor.plans), "it runs")
            refused = post(server.port, ROUTE, prompt=prompt, max_tokens=4)
            assert refused.status == 429 and "prompt tokens" in refused.error["message"]
            last = stack.enter_context(RawClient(server.port))
            last.post(ROUTE, prompt=prompt[:5], max_tokens=4)
            wait_until(lambda: server.service.client.num_open == 4, "five more have room")
        assert {client.reply().status for client in (*asked, last)} == {200}


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_an_idle_server_refuses_no_request(limit: str) -> None:
    engine, executor = watched_engine(2)
    with serving(engine, **{limit: 0}) as server:
        for _ in range(3):  # more prompts than slots: they could not be accepted otherwise
            assert post(server.port, ROUTE, prompt=["hello"] * 8, max_tokens=4).status == 200
        with executor.held(), RawClient(server.port) as first, RawClient(server.port) as second:
            first.post(ROUTE, **SHORT)
            second.post(ROUTE, **SHORT)
            wait_until(lambda: server.service.client.num_open == 2, "all slots are taken")
            assert post(server.port, ROUTE, **SHORT).status == 429


def test_lower_priority_numbers_are_served_first() -> None:
    engine, executor = watched_engine(1)
    with serving(engine) as server, ExitStack() as stack:
        with executor.held():
            for number, priority in enumerate((0, 5, -1, 5, 2)):
                client = stack.enter_context(RawClient(server.port))
                client.post(ROUTE, **SHORT, priority=priority)
                wait_until(lambda n=number: server.service.client.num_open == n + 1, "it is in")
        wait_until(lambda: not server.engine.has_work, "all are done")
    order = list(dict.fromkeys(row.request_id for plan in executor.plans for row in plan.rows))
    assert order == ["0", "2", "4", "1", "3"]


def test_a_salt_separates_cached_prefixes(watched: Watched) -> None:
    server, _ = watched

    def cached(**fields: Any) -> int:
        usage = post(server.port, ROUTE, prompt=[9] * 40, max_tokens=2, **fields).json["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert [cached(), cached()] == [0, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, 32]


def test_a_long_prompt_delays_decoding_by_one_chunk_at_most() -> None:
    engine, executor = watched_engine(4, chunk=32)
    with serving(engine) as server, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(3)]
        for client in clients:
            client.post(ROUTE, **LONG, stream=True).wait()
        wait_until(lambda: len(executor.plans[-1].decodes) == 3, "three decode")
        start = len(executor.plans)
        assert post(server.port, ROUTE, prompt=[9] * 320, max_tokens=1).status == 200
        plans = [plan for plan in executor.plans[start:] if plan.prefills]
    assert len(plans) == 10
    for plan in plans:
        assert len(plan.decodes) == 3
        assert sum(row.num_scheduled_tokens for row in plan.prefills) <= 32


# invalid requests


def _json(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


BAD = {
    "no JSON": (b'{"prompt": ', 400, None),
    "no object": (b"[1, 2]", 400, None),
    "empty": (b"", 400, None),
    "no prompt": (b"{}", 400, "prompt"),
    "null prompt": (b'{"prompt": null}', 400, "prompt"),
    "empty list": (_json(prompt=[]), 400, "prompt"),
    "empty ids": (_json(prompt=[[]]), 400, "prompt"),
    "mixed list": (_json(prompt=["a", 1]), 400, "prompt"),
    "strange ids": (_json(prompt=[1, 99_999]), 400, "prompt"),
    "negative ids": (_json(prompt=[1, -1]), 400, "prompt"),
    "huge ids": (_json(prompt=[10**30]), 400, "prompt"),
    "wrong type": (_json(max_tokens="4"), 400, "max_tokens"),
    "wrong inner type": (_json(logit_bias={"a": 1}), 400, "logit_bias"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', 400, "temperature"),
    "1e999": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "negative": (_json(max_tokens=-1), 400, "max_tokens"),
    "huge": (_json(max_tokens=10**30), 400, "max_tokens"),
    "huge seed": (_json(seed=10**30), 400, "seed"),
    "many completions": (_json(n=MANY), 400, "n"),
    "many prompts": (_json(prompt=["a"] * MANY), 400, "prompt"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, None),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400, "prompt"),
    "duplicate keys": (b'{"prompt": "a", "n": 1, "n": 0}', 400, "n"),
    "10,000 stop strings": (_json(stop=["a"] * 10_000), 400, "stop"),
    "a long stop string": (_json(stop="a" * MANY), 400, "stop"),
    "100,000 biases": (_json(logit_bias={str(i): 1 for i in range(MANY)}), 400, "logit_bias"),
    "deep JSON": (b'{"prompt": ' + b"[" * MANY, 400, None),
    "deep and whole": (b'{"prompt": ' + b"[" * MANY + b"]" * MANY + b"}", 400, None),
    "deep unknown": (b'{"prompt": "a", "x": ' + b'{"a":' * MANY, 400, None),
    "beyond the context": (_json(prompt=[1] * 20_000), 400, "prompt"),
    "5 MB of text": (_json(prompt="a" * 5_000_000), 400, "prompt"),
    "9 MB": (_json(prompt="a" * 9_000_000), 413, None),
    "unknown model": (_json(model="gpt-5"), 404, "model"),
    "unsupported": (_json(logits_processors=["a"]), 400, "logits_processors"),
    "contradiction": (_json(stream_options={}), 400, "stream_options"),
}


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[Serving, RawClient]]:
    """A server with a key and a long stream, which must not be disturbed."""
    engine, _ = watched_engine(2, step_seconds=0.01, max_model_len=20_000)
    with serving(engine, api_key=("secret",)) as server, RawClient(server.port) as client:
        body = json.dumps({"prompt": "hello", "max_tokens": 19_000, "stream": True}).encode()
        client.post_body(ROUTE, body, "authorization: Bearer secret").wait()
        yield server, client
        server.loop.call_soon_threadsafe(server.service.stop_all)
        choices = [event["choices"][0] for event in client.reply().events]
    assert choices[-1]["finish_reason"] == "abort"
    text = "".join(choice["text"] for choice in choices)
    assert text == ("fghijklmnopqrstuvwxyzabcde" * 1000)[: len(text)]


def refused(server: Serving, body: bytes, *headers: str, path: str = ROUTE) -> Reply:
    """The response, which arrives soon and does not close the stream."""
    start = time.monotonic()
    with RawClient(server.port) as client:
        reply = client.post_body(path, body, "authorization: Bearer secret", *headers).reply()
    assert time.monotonic() - start < 2
    assert reply.headers["content-type"] == "application/json" and "x-request-id" in reply.headers
    return reply


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_body(busy: tuple[Serving, RawClient], case: str) -> None:
    body, status, param = BAD[case]
    reply = refused(busy[0], body)
    assert reply.status == status, reply
    found = reply.error["param"]
    assert (found or "").partition("[")[0].partition(".")[0] == (param or ""), reply.error
    assert len(reply.body) < 1000


HEAVY = {
    "prompts": b'{"prompt": [' + b"[1]," * 1_500_000 + b"[1]]}",
    "texts": _json(prompt=["hello there " * 180] * 2000),
}


@pytest.mark.parametrize("case", HEAVY)
def test_heavy_bodies_do_not_hold_up_the_loop(case: str) -> None:
    engine, _ = watched_engine()
    with serving(engine) as server:
        beats: list[float] = []

        async def beat() -> None:
            while True:
                beats.append(time.monotonic())
                await asyncio.sleep(0.002)

        beating = asyncio.run_coroutine_threadsafe(beat(), server.loop)
        start = time.monotonic()
        with RawClient(server.port) as client:
            client.post_body(ROUTE, HEAVY[case]).reply()
        seconds = time.monotonic() - start
        beating.cancel()
    longest = max(after - before for before, after in itertools.pairwise(beats))
    assert longest < max(0.5 * seconds, 0.25), (longest, seconds)


def test_long_answers_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[bool] = []

    def noting(value: object) -> Any:
        writers.append(threading.current_thread().name == "test-server")
        return json_response(value)

    monkeypatch.setattr(generation, "json_response", noting)
    engine, _ = watched_engine()
    with serving(engine) as server:
        for max_tokens in (4, 2 * generation.INLINE_TOKENS):
            answer = post(
                server.port, ROUTE, prompt="hello", max_tokens=max_tokens, ignore_eos=True
            )
            assert answer.json["usage"]["completion_tokens"] == max_tokens
    assert writers == [True, False]  # whether in the loop's thread


def test_a_chunked_body_beyond_the_limit(busy: tuple[Serving, RawClient]) -> None:
    server, _ = busy
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer secret\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with RawClient(server.port) as client:
        reply = client.send(head.encode() + chunk * 10 + b"0\r\n\r\n").reply()
    assert reply.status == 413 and reply.error["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("headers", "path", "status", "code"),
    [
        (("authorization: Bearer wrong",), ROUTE, 401, "invalid_api_key"),
        (("authorization: secret",), ROUTE, 401, "invalid_api_key"),
        (("authorization: ",), "/nowhere", 401, "invalid_api_key"),
        (("content-type: text/plain",), ROUTE, 415, "unsupported_media_type"),
        ((), "/v1/nothing", 404, "not_found"),
        ((), "/v1/models", 405, "method_not_allowed"),
    ],
    ids=["wrong key", "no scheme", "no key", "media type", "route", "method"],
)
def test_an_invalid_head(
    busy: tuple[Serving, RawClient], headers: tuple[str, ...], path: str, status: int, code: str
) -> None:
    reply = refused(busy[0], _json(), *headers, path=path)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_a_huge_header(busy: tuple[Serving, RawClient]) -> None:
    with RawClient(busy[0].port) as client:
        reply = client.post_body(ROUTE, _json(), f"x-padding: {'a' * 200_000}").reply()
    assert (reply.status, reply.error["code"]) == (431, "head_too_large")


def test_no_http(busy: tuple[Serving, RawClient]) -> None:
    with RawClient(busy[0].port) as client:
        reply = client.send(b"\x16\x03\x01 hello\r\n\r\n").reply()
    assert (reply.status, reply.error["code"]) == (400, "invalid_http")


def test_health_needs_no_key(busy: tuple[Serving, RawClient]) -> None:
    port = busy[0].port
    assert get(port, "/health").status == get(port, "/ready").status == 200
    assert get(port, "/metrics").status == 401
