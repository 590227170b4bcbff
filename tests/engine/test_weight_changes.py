"""Weights that change, and an engine that sleeps, while requests are open."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxinfer
from jaxinfer import LLM, AsyncLLM, LanguageModel, RequestOutput, SamplingParams
from jaxinfer.core.errors import ArgumentError, EngineError
from jaxinfer.engine.requests.outputs import Delta, WeightSpan, joined
from kit.brake import Brake
from kit.served_weights import (
    GREEDY,
    PROMPT,
    check_served,
    with_larger_down,
)


def with_async(folder: Path, settings: dict[str, Any], scenario: Any) -> None:
    async def main() -> None:
        llm = await AsyncLLM.create(str(folder), **settings)
        try:
            await asyncio.wait_for(scenario(llm), 60)
        finally:
            await llm.shutdown()

    asyncio.run(main())


async def answer(llm: AsyncLLM, params: SamplingParams = GREEDY) -> RequestOutput:
    last = None
    async for output in llm.generate(PROMPT, params):
        last = output
    assert last is not None and last.finished
    return last


async def started(llm: AsyncLLM, params: SamplingParams) -> asyncio.Task[RequestOutput]:
    """A request that has drawn a token, and does not end before the next command."""
    drawn, brake = asyncio.Event(), Brake(llm.engine, llm._thread)
    brake.close()

    async def run() -> RequestOutput:
        last = None
        async for output in llm.generate(PROMPT, params):
            drawn.set()
            last = output
        assert last is not None
        return last

    task = asyncio.create_task(run())
    await drawn.wait()
    brake.arm()
    return task


LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)


def test_new_weights_wait_for_open_requests_and_later_ones_wait_for_them(
    folder: Path, settings: dict[str, Any]
) -> None:
    first = jaxinfer.load(str(folder), **settings)
    changed = first.with_params(with_larger_down(first.params))

    async def scenario(llm: AsyncLLM) -> None:
        alone = await answer(llm, LONG)
        open_one = await started(llm, LONG)
        update = asyncio.create_task(llm.update_weights(changed.params))
        while not llm._thread._changes and not update.done():
            await asyncio.sleep(0.001)
        check_served([await answer(llm)], changed)  # it came after the change
        await update
        ended = await open_one
        assert ended.outputs[0].token_ids == alone.outputs[0].token_ids
        assert ended.outputs[0].finish_reason == "length"
        check_served([await answer(llm)], changed, cached=32)
        assert llm.model.params["layers_0"]["down"] is changed.params["layers_0"]["down"]
        with pytest.raises(ArgumentError, match="params have no embed"):
            await llm.update_weights({})
        assert await llm.reset_prefix_cache() is True
        check_served([await answer(llm)], changed)

    with_async(folder, settings, scenario)


def test_new_weights_may_abort_open_requests(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        open_one = await started(llm, LONG)
        changed = llm.model.with_params(with_larger_down(llm.model.params))
        await llm.update_weights(changed.params, mode="abort")
        assert (await open_one).outputs[0].finish_reason == "abort"
        check_served([await answer(llm)], changed)
        with pytest.raises(ArgumentError, match="mode must be 'wait', 'abort' or 'keep', got 'no'"):
            await llm.update_weights(changed.params, mode="no")  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="no engine of its own"):
            llm.model.generate(PROMPT)

    with_async(folder, settings, scenario)


def test_a_change_fails_when_the_engine_has_ended(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = llm.model.params
        await llm.shutdown()
        with pytest.raises(EngineError, match="the engine is shut down"):
            await llm.update_weights(params)

    with_async(folder, settings, scenario)


def test_a_pause_holds_requests_and_forgets_those_that_are_given_up(
    folder: Path, settings: dict[str, Any]
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        expected = (await answer(llm)).outputs[0].token_ids
        await llm.pause_generation()
        before = llm.stats().num_requests
        given_up, held = (asyncio.create_task(answer(llm)) for _ in range(2))
        await llm.reset_prefix_cache()
        assert not held.done() and llm.stats().num_requests == before
        given_up.cancel()
        await asyncio.sleep(0.05)
        await llm.resume_generation()
        assert (await held).outputs[0].token_ids == expected
        assert llm.stats().num_requests == before + 1
        with pytest.raises(ArgumentError, match="mode must be"):
            await llm.pause_generation(mode="no")  # type: ignore[arg-type]

    with_async(folder, settings, scenario)


def test_a_change_that_is_given_up_is_not_made(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        before = llm.model.params
        open_one = await started(llm, LONG)
        changed = with_larger_down(before)
        change = asyncio.create_task(llm.update_weights(changed))
        while not llm._thread._changes and not open_one.done():
            await asyncio.sleep(0.001)
        change.cancel()
        await open_one
        if change.cancelled() or not change.done():
            check_served([await answer(llm)], llm.model, cached=32)
            assert llm.model.params is before
        await llm.shutdown()

    with_async(folder, settings, scenario)


def check_spans(output: RequestOutput, models: list[LanguageModel]) -> None:
    """Each token's logprob is the one by the weights of its version, over the whole text so far."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    ids = [*PROMPT, *completion.token_ids]
    spans = completion.weight_versions
    assert [span.version for span in spans] == list(range(len(models)))
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(completion.token_ids)
    for span in spans:
        logits = models[span.version].forward(ids)
        for i in range(span.start, span.end):
            token = completion.token_ids[i]
            row = jax.nn.log_softmax(logits[len(PROMPT) + i - 1])
            assert token == int(row.argmax())
            assert completion.logprobs[i][token].logprob == pytest.approx(
                float(row[token]), abs=1e-4
            )


def test_spans_of_joined_deltas() -> None:
    versions = (0, 0, 1, 1, 0)
    spans = [WeightSpan(version, at, at + 1) for at, version in enumerate(versions)]
    deltas = [Delta("a", 0, token_ids=(9,), weight_versions=(span,)) for span in spans]
    whole = joined([joined(deltas[:1]), joined(deltas[1:4]), Delta("a", 0, text="b"), deltas[4]])
    assert whole.weight_versions == (WeightSpan(0, 0, 2), WeightSpan(1, 2, 4), WeightSpan(0, 4, 5))


def test_open_requests_may_go_on_with_new_weights(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = llm.model
        changed = first.with_params(with_larger_down(first.params))
        open_one, waiting = [await started(llm, LONG) for _ in range(2)]
        await llm.update_weights(changed.params, mode="keep")
        for one in (open_one, waiting):
            output = await one
            assert output.outputs[0].finish_reason == "length"
            check_spans(output, [first, changed])
        assert llm.stats().num_preemptions == 2 and llm.stats().weight_version == 1
        again = (await answer(llm)).outputs[0]
        assert again.weight_versions == [WeightSpan(1, 0, 6)]

    with_async(folder, settings, scenario)


def test_a_pause_may_keep_requests_open(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = llm.model
        changed = first.with_params(with_larger_down(first.params))
        alone = (await answer(llm, LONG)).outputs[0].token_ids
        open_one = await started(llm, LONG)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused() and not open_one.done()
        drawn = llm.stats().num_generated_tokens
        held = asyncio.create_task(answer(llm))
        await asyncio.sleep(0.1)
        assert llm.stats().num_generated_tokens == drawn and llm.stats().num_running == 1
        await llm.resume_generation()
        assert (await open_one).outputs[0].token_ids == alone
        await held
        assert llm.stats().num_preemptions == 0  # with the KV that it had
        open_one = await started(llm, LONG)
        await llm.pause_generation(mode="keep")
        await llm.update_weights(changed.params)  # does not wait for what is paused
        await llm.resume_generation()
        check_spans(await open_one, [first, changed])
        open_one = await started(llm, LONG)
        await llm.pause_generation(mode="keep")
        await llm.reset_prefix_cache(mode="abort")
        await llm.resume_generation()
        assert (await open_one).outputs[0].finish_reason == "abort"

    with_async(folder, settings, scenario)


def test_requests_wait_for_a_sleeping_engine(folder: Path, settings: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        alone = (await answer(llm, LONG)).outputs[0].token_ids
        params = llm.model.params
        kept = await started(llm, LONG)
        await llm.sleep(mode="keep")
        assert await llm.is_sleeping() and not kept.done()
        held = asyncio.create_task(answer(llm, LONG))
        await llm.wake_up(["kv_cache"])
        await asyncio.sleep(0.05)
        assert await llm.is_sleeping() and not held.done()
        await llm.wake_up(["weights"])
        for one in (kept, held):
            assert (await one).outputs[0].token_ids == alone
        aborted = await started(llm, LONG)
        await llm.sleep(level=2)
        assert (await aborted).outputs[0].finish_reason == "abort"
        await llm.wake_up()
        held = asyncio.create_task(answer(llm, LONG))
        await asyncio.sleep(0.05)
        assert await llm.is_sleeping() and not held.done()
        await llm.update_weights(params)
        assert (await held).outputs[0].token_ids == alone
        with pytest.raises(ArgumentError, match="level must be 1 or 2, got 3"):
            await llm.sleep(level=3)

    with_async(folder, settings, scenario)


def test_a_sleeping_engine_gives_its_memory_back(folder: Path, settings: dict[str, Any]) -> None:
    others = jax.live_arrays()  # of other tests, kept until the end
    known = {id(array) for array in others}
    llm = LLM(str(folder), **settings)

    def live() -> int:
        gc.collect()  # building an engine leaves cycles with arrays
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)

    before, expected = live(), llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    weights = sum(array.nbytes for array in jax.tree.leaves(llm.model.params))
    pages = sum(array.nbytes for array in llm._engine._loop._executor._arrays.state)
    llm.sleep()
    assert before - live() >= pages  # a CPU's weights are in host memory
    with pytest.raises(EngineError, match="the engine sleeps without its weights and kv_cache"):
        llm.generate([PROMPT], GREEDY)
    with pytest.raises(EngineError, match="the weights sleep"):
        _ = llm.model
    with pytest.raises(ArgumentError, match="tags must be of weights, kv_cache, got 'kv'"):
        llm.wake_up(["kv"])
    llm.wake_up()
    # ``before`` may include arrays of the build that are freed later
    assert not llm.is_sleeping() and pages + weights <= live() <= before
    output = llm.generate([PROMPT], GREEDY)[0]
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
    params = jax.device_get(llm.model.params)
    llm.sleep(level=2)
    assert before - live() >= pages + weights
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    llm.update_weights(params)
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping()
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    assert llm.stats().num_late_compiles == 0
    with pytest.raises(ArgumentError, match="level must be 1 or 2, got 0"):
        llm.sleep(0)
