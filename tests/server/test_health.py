"""``/health`` judges by the age of the last finished step, and answers at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.link import client as link_client
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from kit.raw_http import RawClient, get, post
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.watched_executor import watched_engine

ROUTE = "/v1/completions"
STEP = 0.25  # seconds
ADMIN = "authorization: Bearer admin"


def health(port: int) -> int:
    """The status."""
    return get(port, "/health").status


def stalled_seconds(server: Serving) -> float:
    """The seconds that the engine tells."""
    asked = server.service.client.stalled_seconds()
    return asyncio.run_coroutine_threadsafe(asked, server.loop).result()


def test_long_prompts_one_after_another_are_healthy() -> None:
    """A step takes longer than the timeout, and the steps of a prompt much longer."""
    engine, executor = watched_engine(2, step_seconds=STEP, chunk=32)
    with serving(engine, health_timeout=0.8 * STEP) as server, RawClient(server.port) as client:
        client.post(ROUTE, prompt=[[n] * 96 for n in range(3)], max_tokens=1)
        for number in range(1, 9):
            wait_until(lambda number=number: len(executor.plans) > number, "a step runs")
            assert health(server.port) == 200
        assert client.reply().status == 200


def test_an_idle_or_paused_engine_is_healthy() -> None:
    with serving(watched_engine(2)[0], health_timeout=0.05, admin_api_key=("admin",)) as server:
        assert post(server.port, ROUTE, prompt="a", max_tokens=4).status == 200
        time.sleep(0.2)
        assert health(server.port) == 200 and stalled_seconds(server) == 0
        with RawClient(server.port) as admin, RawClient(server.port) as held:
            assert admin.post_body("/pause", b"", ADMIN).reply().status == 200
            held.post(ROUTE, prompt="a", max_tokens=4)
            wait_until(lambda: server.service.client.num_open == 1, "it waits")
            time.sleep(0.2)
            assert health(server.port) == 200 and stalled_seconds(server) == 0
            assert not held.has_reply


def test_the_first_step_may_take_time_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_client, "FIRST_TOKEN_SECONDS", 1.0)
    engine, executor = watched_engine(4)
    with serving(engine, health_timeout=0.0) as server, RawClient(server.port) as client:
        with executor.held():
            start = time.monotonic()
            client.post(ROUTE, prompt="a", max_tokens=4)
            wait_until(lambda: bool(executor.plans), "it runs")
            assert health(server.port) == 200  # which waits for no step
            # 3 steps of 68 tokens: 0.4 s
            monkeypatch.setattr(link_client, "FIRST_TOKEN_SECONDS", 0.002)
            wait_until(lambda: health(server.port) == 503, "it has taken too long")
            assert time.monotonic() - start > 0.4
        assert client.reply().status == 200


def test_a_ping_is_answered_while_a_step_runs() -> None:
    engine, executor = watched_engine(2)

    async def main() -> float:
        thread = EngineThread(engine)
        client = EngineClient(thread)
        with executor.held():
            stream = client.open(RequestSpec((1, 2, 3), engine.facts.default_sampling))
            while not executor.plans:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            stalled = await client.stalled_seconds(20)
        stream.close()
        while await client.stalled_seconds(20):  # until it is idle
            await asyncio.sleep(0.01)
        await client.shutdown()
        assert await client.stalled_seconds() == float("inf")
        return stalled

    assert 0.1 <= asyncio.run(asyncio.wait_for(main(), 60)) < 20
