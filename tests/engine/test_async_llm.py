"""The streaming API: concurrent answers, aborted generators, failures, shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.api.async_llm import AsyncLLM
from jaxinfer.engine.loop.processor import SequenceProcessor
from kit.engines import run, tiny_engine, tokens
from kit.server_process import wait_until

PROMPTS = [[5 + i, 9, 12 + i] for i in range(10)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

type Scenario = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


def with_llm(scenario: Scenario) -> None:
    async def main() -> None:
        llm = AsyncLLM(tiny_engine())
        try:
            await asyncio.wait_for(scenario(llm), 60)
        finally:
            await llm.shutdown()

    asyncio.run(main())


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    last = None
    async for output in llm.generate(prompt, params):
        last = output
    assert last is not None and last.finished
    return last.outputs[0].token_ids


def test_concurrent_answers_equal_the_offline_ones() -> None:
    expected = [one[0] for one in tokens(run(tiny_engine(), PROMPTS, GREEDY))]

    async def scenario(llm: AsyncLLM) -> None:
        answers = await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))
        assert answers == expected
        assert llm.stats().num_late_compiles == 0

    with_llm(scenario)


def test_deltas_add_up() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        from jaxinfer.engine.requests.prompts import parse_prompts

        params = SamplingParams(n=2, seed=3, max_tokens=10, ignore_eos=True)
        (prompt,) = parse_prompts("hi", llm.engine.tokenizer)
        parts: dict[int, str] = {0: "", 1: ""}
        async for delta in llm.stream(RequestSpec(prompt.token_ids, params)):
            parts[delta.index] += delta.text
        outputs = [output async for output in llm.generate("hi", params)]
        assert [completion.text for completion in outputs[-1].outputs] == [parts[0], parts[1]]

    with_llm(scenario)


def test_closing_or_cancelling_a_generator_aborts_its_request() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate([1, 2, 3], LONG)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(answer(llm, [4, 5, 6], LONG))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        expected = await answer(llm, PROMPTS[0])
        while llm.engine.has_work:
            await asyncio.sleep(0.01)
        loop = llm.engine._loop  # pyright: ignore[reportPrivateUsage]
        assert loop.state.num_free_pages == llm.engine.limits.num_usable_pages
        assert len(expected) == 10

    with_llm(scenario)


def raising(*_: object) -> None:
    raise ValueError("surprise")


def test_a_request_id_may_be_used_again_at_once() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        expected = await answer(llm, PROMPTS[0])
        first = llm.generate(PROMPTS[1], LONG, request_id="x")
        await anext(first)
        await first.aclose()
        last = None
        async for output in llm.generate(PROMPTS[0], GREEDY, request_id="x"):
            last = output
        assert last is not None and last.request_id == "x"
        assert last.outputs[0].token_ids == expected

    with_llm(scenario)


def test_a_loop_that_closes_without_shutdown_prints_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def main() -> AsyncLLM:
        llm = AsyncLLM(tiny_engine())
        async for _ in llm.generate([1, 2], LONG):
            break
        return llm

    llm = asyncio.run(main())
    wait_until(lambda: not llm.engine.has_work, "the request ends")
    assert llm.alive
    assert "Traceback" not in capfd.readouterr().err


def test_invalid_requests_raise_and_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(answer(llm, PROMPTS[0]))
        with pytest.raises(RequestError, match="empty"):
            await answer(llm, [])
        with pytest.raises(RequestError, match="vocabulary"):
            await answer(llm, [1, 2, 99999])
        for salt in (5, "\ud800"):
            with pytest.raises(RequestError, match="cache_salt"):
                await anext(llm.generate([1], GREEDY, cache_salt=salt))  # type: ignore[arg-type]
        while not llm.stats().num_requests:  # the engine has the good one
            await asyncio.sleep(0.01)
        monkeypatch.setattr(SequenceProcessor, "__init__", raising)
        with pytest.raises(RequestError, match="unusable: surprise"):
            await answer(llm, [1, 2])
        monkeypatch.undo()
        assert len(await good) == 10
        assert len(await answer(llm, PROMPTS[1])) == 10

    with_llm(scenario)


def test_shutdown_ends_open_streams() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate([1, 2, 3], LONG)
        await anext(stream)
        assert llm.alive
        await llm.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            async for _ in stream:
                pass
        assert not llm.alive
        with pytest.raises(EngineError, match="shut down"):
            await answer(llm, [1])

    with_llm(scenario)


def test_a_broken_engine_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        iterating, both_are_sent = threading.Event(), threading.Event()

        def broken(events: object) -> None:
            iterating.set()
            both_are_sent.wait(30)
            raise ValueError("scheduler bug")

        loop = llm.engine._loop  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(loop, "iterate", broken)
        first = asyncio.create_task(answer(llm, [1, 2]))
        while not iterating.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(answer(llm, [1, 2]))
        while llm._thread._inbox.empty():
            await asyncio.sleep(0.001)
        both_are_sent.set()
        for task in (first, second):
            with pytest.raises(EngineError, match="the engine stopped: scheduler bug"):
                await task
        assert not llm.alive
        with pytest.raises(EngineError, match="scheduler bug"):
            await answer(llm, [1, 2])

    with_llm(scenario)
