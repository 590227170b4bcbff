"""Clients that disconnect or read slowly, and engines that fail: no effect on others, no leaks."""

from __future__ import annotations

import asyncio
import json
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxinfer.core.errors import EngineError
from jaxinfer.engine.link.client import Stream
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.link.wire import AbortRequest, Command, Submission
from jaxinfer.engine.requests.outputs import Delta, joined
from jaxinfer.server.api.answer import ChoiceUpdate
from jaxinfer.server.openai.writer import merged_updates
from jaxinfer.server.service.endpoint import Call
from kit.raw_http import SECONDS, RawClient, get, post
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.watched_executor import WatchedExecutor, watched_engine

ROUTE = "/v1/completions"
GREEDY = {"prompt": [5, 9, 12, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": "hello", "max_tokens": 1500}

type Watched = tuple[Serving, WatchedExecutor]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_idle_engine(server: Serving) -> bool:
    """No request runs, waits or holds pages."""
    stats = server.engine.stats()
    return not (stats.num_live_pages or stats.num_running or stats.num_waiting)


def is_idle(server: Serving) -> bool:
    """No request is open or queued in the server either."""
    client = server.service.client
    is_open = client.num_open or client.num_waiting_tokens or client.num_queued()
    return is_idle_engine(server) and not is_open


# clients


def test_500_clients_disconnect() -> None:
    engine, _ = watched_engine(32)
    with serving(engine) as server:
        assert post(server.port, ROUTE, **GREEDY).status == 200
        tasks, files = server.num_tasks(), num_files()
        for _ in range(2):
            clients = [
                RawClient(server.port).post(ROUTE, **LONG, stream=number % 5 != 0)
                for number in range(250)
            ]
            for number, client in enumerate(clients):
                if number % 5 == 1:  # the others have not read a byte
                    client.wait()
                client.disconnect()
        wait_until(lambda: is_idle(server), f"idle: {server.engine.stats()}")
        assert server.service.client.num_queued(32) == 0  # every slot is known to be free
        wait_until(lambda: server.num_tasks() <= tasks, "tasks have ended")
        wait_until(lambda: num_files() <= files, "sockets are closed")
        assert post(server.port, ROUTE, **GREEDY).json["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_disconnected_client_is_in_no_step_after_the_next(
    watched: Watched, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, executor = watched
    noticed: list[int] = []  # steps launched until the engine got the abort
    send = EngineThread.send

    def noting(link: EngineThread, command: Command) -> None:
        if isinstance(command, AbortRequest):
            noticed.append(len(executor.plans))
        send(link, command)

    monkeypatch.setattr(EngineThread, "send", noting)
    with RawClient(server.port) as other:
        leaver = RawClient(server.port).post(ROUTE, **LONG, stream=stream)
        wait_until(lambda: len(executor.plans) > 5, "it runs")
        other.post(ROUTE, **LONG, stream=True).wait()
        leaver.disconnect()
        wait_until(lambda: bool(noticed), "the server noticed")
        wait_until(lambda: len(executor.plans) > noticed[0] + 5, "steps went on")
        for plan in executor.plans[noticed[0] + 1 :]:
            assert [row.request_id for row in plan.rows] == ["1"]
        assert server.engine.stats().num_running == 1
    wait_until(lambda: is_idle(server), "the other one has vanished too")


@pytest.mark.parametrize("delay", [0.0, 0.002], ids=["before", "midway"])
def test_disconnecting_at_any_point_of_a_request(watched: Watched, delay: float) -> None:
    server, _ = watched
    tasks = server.num_tasks()
    head = f"POST {ROUTE} HTTP/1.1\r\ncontent-length: 50\r\ncontent-type: application/json\r\n"
    for end in (10, len(head), len(head) + 2, len(head) + 20):
        client = RawClient(server.port).send(f"{head}\r\n{'{'.ljust(40)}".encode()[:end])
        time.sleep(delay)
        client.disconnect()
    wait_until(lambda: server.num_tasks() <= tasks and is_idle(server), "nothing is left")
    assert post(server.port, ROUTE, **GREEDY).status == 200


def test_requests_of_one_connection_are_answered_in_turn(watched: Watched) -> None:
    server, _ = watched
    body = json.dumps({**GREEDY, "stream": True}).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\ncontent-type: application/json\r\n"
    one = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with RawClient(server.port) as client:
        client.send(one * 2)  # without waiting for the first response
        answers = client.post_body(ROUTE, body).rest().split(b"HTTP/1.1 200")
    assert [answer.count(b"[DONE]") for answer in answers] == [0, 1, 1, 1]
    assert [answer.count(b'"length"') for answer in answers] == [0, 1, 1, 1]
    assert server.engine.stats().num_generated_tokens == 24


def test_200_clients_that_read_one_byte_a_second() -> None:
    engine, _ = watched_engine(202, step_seconds=0.01)
    name = "m" * 32_000  # in every event, so that three of them fill the buffers
    fields = {"prompt": "hello", "max_tokens": 150, "stream": True}
    settings = {"served_model_name": (name,), "max_num_queued_reqs": 0}
    with serving(engine, send_buffer=8192, **settings) as server:
        with ExitStack() as stack:
            slow = [
                stack.enter_context(RawClient(server.port, receive_buffer=4096)) for _ in range(200)
            ]
            for client in slow:
                client.post(ROUTE, **fields)
            wait_until(lambda: server.engine.stats().num_requests == 200, "all are there")
            wait_until(lambda: not server.engine.has_work, "the engine has done its part")
            for _ in range(2):
                for client in slow:
                    client.read_byte()
                time.sleep(1)
            quick = post(server.port, ROUTE, **fields).events
            assert quick[-1]["choices"][0]["finish_reason"] == "length"
            # it has not waited for the others, whose readers are still at the first line
            assert server.service.client.num_open > 190
            # their slots are free nevertheless
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(post, server.port, ROUTE, **GREEDY) for _ in range(8)]
                assert {one.result().status for one in asked} == {200}
            for client in slow:
                events = client.reply().events
                assert len(events) < 150  # the unread updates were joined
                assert sum(len(event["choices"][0]["text"]) for event in events) == 150
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: is_idle(server), "all have their answers")


def test_unread_updates_take_little_memory() -> None:
    async def main() -> int:
        stream = Stream(cast("Any", None), "r", 1, 2, asyncio.Event())
        tracemalloc.start()
        for number in range(20_000):
            stream.put(Delta("r", number % 2, text="word", token_ids=(1000 + number,)))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        deltas = stream.take()
        for index in (0, 1):
            whole = joined([delta for delta in deltas if delta.index == index])
            assert whole.text == "word" * 10_000
            assert whole.token_ids == tuple(range(1000 + index, 21_000, 2))
        return size

    assert asyncio.run(main()) < 20_000 * 64  # bytes; a delta of one token has 250


def test_an_answer_that_is_not_streamed_takes_little_memory() -> None:
    num_tokens = 20_000

    class Answer:
        """Two choices; records the size of the updates before the end."""

        finish_reasons, finished, left, size = (None, None), True, num_tokens, 0

        async def read(self) -> list[ChoiceUpdate]:
            self.left -= 1
            if self.left < 0:
                self.size, _ = tracemalloc.get_traced_memory()
                return []
            number = num_tokens - 1 - self.left
            delta = Delta("r", number % 2, text="word", token_ids=(1000 + number,))
            return [ChoiceUpdate(0, number % 2, delta)]

    async def main() -> int:
        async def receive() -> Any:
            await asyncio.sleep(SECONDS)

        scope = {
            "path": "/",
            "method": "POST",
            "path_params": {},
            "state": {"request_id": "r"},
            "headers": [],
        }
        service, answer = SimpleNamespace(close=lambda _: None), Answer()
        tracemalloc.start()
        updates = await Call(cast("Any", service), scope, receive, b"").updates(cast("Any", answer))
        tracemalloc.stop()
        for choice, update in enumerate(merged_updates(updates)):
            assert update.choice == choice and update.delta.text == "word" * (num_tokens // 2)
            assert update.delta.token_ids == tuple(range(1000 + choice, 1000 + num_tokens, 2))
        return answer.size

    assert asyncio.run(main()) < num_tokens * 64


def test_the_end_does_not_wait_for_slow_readers() -> None:
    engine, executor = watched_engine(4)
    name = "m" * 20_000  # in every event, so that buffers fill quickly
    with (
        serving(engine, send_buffer=8192, served_model_name=(name,)) as server,
        RawClient(server.port, receive_buffer=4096) as client,
    ):
        client.post(ROUTE, **LONG, stream=True).wait()
        wait_until(lambda: len(executor.plans) > 50, "buffers are full")
        server.loop.call_soon_threadsafe(server.service.stop_all)
        wait_until(lambda: is_idle_engine(server), "its pages are free")
        assert len(executor.plans) < 1500 and server.service.client.num_open == 0
        events = client.reply().events
        assert events[-1]["choices"][0]["finish_reason"] == "abort"


def test_all_prompts_of_a_request_or_none(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = watched
    send = EngineThread.send

    def failing(link: EngineThread, command: Command) -> None:
        if isinstance(command, Submission) and command.request_id == "stream-3":
            raise EngineError("the pipe is broken")
        send(link, command)

    monkeypatch.setattr(EngineThread, "send", failing)
    failed = post(server.port, ROUTE, **{**LONG, "prompt": ["a", "b", "c", "d"]})
    assert failed.status == 500 and "pipe" in failed.error["message"]
    wait_until(lambda: is_idle(server), "the first two have left")
    assert server.engine.stats().num_generated_tokens < 1500


# engines


def test_a_step_that_fails_ends_its_own_requests_only(watched: Watched) -> None:
    server, executor = watched
    right = post(server.port, ROUTE, **GREEDY).json["choices"]
    assert right[0]["text"] == "efghijkl"
    executor.failure = ValueError("injected")
    failed = post(server.port, ROUTE, **GREEDY)
    assert failed.status == 500 and "injected" in failed.error["message"]
    assert failed.error["type"] == "server_error"
    with RawClient(server.port) as client:
        client.post(ROUTE, **LONG, stream=True).wait()
        executor.failure = ValueError("injected again")
        events = client.reply().events
    assert events[0]["choices"][0]["text"] and "injected again" in events[-1]["error"]["message"]
    assert get(server.port, "/health").status == get(server.port, "/ready").status == 200
    assert post(server.port, ROUTE, **GREEDY).json["choices"] == right
    wait_until(lambda: is_idle(server), "nothing is left")
    finished = get(server.port, "/stats").json["requests"]["finished"]
    assert (finished["length"], finished["error"], finished["abort"]) == (2, 2, 0)


def test_failures_are_logged(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    server, executor = watched
    caplog.set_level("WARNING")
    executor.failure = ValueError("injected")
    assert post(server.port, ROUTE, **GREEDY).status == 500
    of_engine, of_server = caplog.records
    assert of_engine.name == "jaxinfer.engine" and "injected" in of_engine.message
    assert of_engine.exc_info and isinstance(of_engine.exc_info[1], ValueError)
    assert (of_server.message, of_server.levelname) == ("request_failed", "ERROR")
    fields = vars(of_server)["fields"]
    assert fields["route"] == ROUTE and "injected" in fields["reason"] and fields["request_id"]
    assert post(server.port, ROUTE, prompt="").status == 400
    assert len(caplog.records) == 2  # a client's invalid request is not logged
    executor.failure = EngineError("the device is lost")
    assert post(server.port, ROUTE, **GREEDY).status == 503
    assert [one.levelname for one in caplog.records[2:]] == ["CRITICAL", "ERROR"]


def test_a_lost_device_is_reported_to_all_requests(watched: Watched) -> None:
    server, executor = watched
    with RawClient(server.port) as whole, RawClient(server.port) as stream:
        whole.post(ROUTE, **LONG)
        stream.post(ROUTE, **LONG, stream=True).wait()
        wait_until(lambda: len(executor.plans[-1].rows) == 2, "both run")
        executor.failure = EngineError("the device is lost")
        failed, events = whole.reply(), stream.reply().events
    assert failed.status == 503 and "the device is lost" in failed.error["message"]
    assert events[-1]["error"]["code"] == "engine_dead"
    for path in ("/health", "/ready"):
        assert get(server.port, path).status == 503
    start = time.monotonic()
    refused = post(server.port, ROUTE, **GREEDY)
    assert refused.status == 503 and refused.error["code"] == "engine_dead"
    assert time.monotonic() - start < 2
    assert get(server.port, "/metrics").status == get(server.port, "/v1/models").status == 200
    assert server.service.client.num_open == 0


def test_an_engine_that_hangs() -> None:
    engine, executor = watched_engine()
    with serving(engine, health_timeout=0.2) as server, RawClient(server.port) as client:
        assert post(server.port, ROUTE, **GREEDY).status == 200
        assert get(server.port, "/health").status == 200
        with executor.held():
            start = time.monotonic()
            client.post(ROUTE, **GREEDY)
            wait_until(lambda: get(server.port, "/health").status == 503, "it is noticed")
            assert 0.2 <= time.monotonic() - start < 5
            unhealthy = get(server.port, "/health")
            assert unhealthy.error["code"] == "engine_dead"
            assert "has finished no step for" in unhealthy.error["message"]
            for path in ("/metrics", "/stats", "/version", "/v1/models", "/openapi.json"):
                assert get(server.port, path).status == 200
            assert post(server.port, "/tokenize", prompt="hello").status == 200
        assert client.reply().status == 200
        assert get(server.port, "/health").status == 200
