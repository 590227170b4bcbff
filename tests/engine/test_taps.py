"""Requests that read or steer activations get what ``forward`` gives; others keep every bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError, RequestError
from jaxinfer.core.limits import Limits
from jaxinfer.core.points import canonical
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.outputs import CompletionOutput
from jaxinfer.engine.requests.points import tap_bytes
from jaxinfer.exec.step.points import points_named
from jaxinfer.models.base import forward
from kit.engines import engine_of, run, tiny_engine, tiny_executor, tiny_limits, tokens
from kit.tiny_models import tiny_model

MODEL, PARAMS = tiny_model("llama")
NAMES = ("embed", "layers.0.resid_post", "layers.1.z", "layers.1.mlp_post", "final_norm")
POINT, WIDE = "layers.0.resid_post", "layers.1.mlp_post"
LIMITS = tiny_limits(points=points_named(NAMES, MODEL.config))
LONG, SHORT = tuple(range(3, 73)), tuple(range(90, 101))  # three chunks, and one
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
VECTOR = np.random.default_rng(0).normal(size=32).astype(np.float32) * 6
STEER = {"point": POINT, "vector": VECTOR, "scale": 0.5}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(LIMITS)


def engine_with(**changes: Any) -> Engine:
    """An engine with other limits that no executable depends on."""
    return tiny_engine(replace(LIMITS, **changes))


def steered(params: SamplingParams = GREEDY, **changes: Any) -> SamplingParams:
    return replace(params, steer=[STEER | changes])


@jax.jit
def _forward(ids: jax.Array, added: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return forward(MODEL, PARAMS, ids, NAMES, {POINT: lambda x: x + added})  # type: ignore[no-any-return]


def check(prompt: Sequence[int], answer: CompletionOutput, added: Any, taps: Sequence[str]) -> None:
    """A greedy answer and its taps are those of ``forward`` with the same edit."""
    ids = np.zeros(96, np.int32)  # one length, so that it is compiled once
    count = len(prompt) + len(answer.token_ids) - 1
    ids[: count + 1] = [*prompt, *answer.token_ids]
    logits, found = _forward(jnp.asarray(ids), jnp.asarray(added, jnp.float32))
    assert logits[len(prompt) - 1 : count].argmax(-1).tolist() == answer.token_ids
    assert list(answer.taps or {}) == list(taps)
    for name in taps:
        assert answer.taps is not None and answer.taps[name].dtype == np.float32
        expected = found[canonical(name)][:count]
        np.testing.assert_allclose(answer.taps[name], expected, atol=1e-4, err_msg=name)


def test_taps_of_chunks_decode_rows_and_several_answers_are_those_of_forward(
    engine: Engine,
) -> None:
    taps = (*NAMES[:4], "ln_final.hook_normalized", "blocks.1.attn.hook_z")
    long, short, plain = run(
        engine,
        [LONG, SHORT, SHORT],
        [replace(GREEDY, taps=taps), replace(GREEDY, n=2, taps=[POINT]), GREEDY],
    )
    check(LONG, long.outputs[0], np.zeros(32), taps)
    for answer in short.outputs:
        check(SHORT, answer, np.zeros(32), [POINT])
    check(SHORT, plain.outputs[0], np.zeros(32), [])


def test_a_steered_row_is_forward_with_that_edit(engine: Engine) -> None:
    engine.steering.set("direction", VECTOR * 2)
    several = replace(
        GREEDY,
        taps=[POINT],
        steer=[{"point": POINT, "name": "direction", "scale": -1}, STEER],
    )
    by_name, both = run(engine, [LONG, SHORT], [several, steered(replace(GREEDY, taps=NAMES))])
    check(LONG, by_name.outputs[0], -1.5 * VECTOR, [POINT])
    check(SHORT, both.outputs[0], 0.5 * VECTOR, NAMES)
    assert tokens([both]) != tokens(run(engine, [SHORT], GREEDY))


def test_neighbours_of_a_steered_row_keep_every_bit(engine: Engine) -> None:
    """All prompts are scored, so that with and without steering the same shapes run."""
    scored = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    drawn = replace(scored, temperature=0.8, seed=5)
    before = run(engine, [LONG, SHORT, SHORT], [scored, drawn, scored])
    after = run(engine, [LONG, SHORT, SHORT], [scored, drawn, steered(scored)])
    for one, other in zip(before[:2], after[:2], strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs
    assert before[2].outputs[0].logprobs != after[2].outputs[0].logprobs


def test_a_plain_request_after_a_steered_one_in_its_slot_is_plain(engine: Engine) -> None:
    """The slot still has the vectors, and a tapped step reads them only for steered rows."""
    run(engine, [SHORT], steered())
    (tapped,) = run(engine, [LONG], replace(GREEDY, taps=[POINT]))
    check(LONG, tapped.outputs[0], np.zeros(32), [POINT])


def test_steered_pages_are_reused_only_by_the_same_steering() -> None:
    engine = engine_with()
    given = (steered(), GREEDY, steered(scale=0.25), steered(), replace(GREEDY, taps=[POINT]))
    outputs = [run(engine, [LONG], one)[0] for one in given]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 68, 0]
    added = (0.5, 0.0, 0.25, 0.5, 0.0)
    for output, params, scale in zip(outputs, given, added, strict=True):
        check(LONG, output.outputs[0], scale * VECTOR, params.taps)


def test_preempted_requests_return_each_token_once() -> None:
    longer = replace(GREEDY, max_tokens=20, taps=[POINT])
    engine = engine_with(num_pages=(40,))
    prompts = [LONG[:50], LONG[20:65], LONG[5:40]]
    outputs = run(engine, prompts, [longer, steered(longer), longer])
    assert engine.stats().num_preemptions > 0
    for prompt, output, scale in zip(prompts, outputs, (0.0, 0.5, 0.0), strict=True):
        check(prompt, output.outputs[0], scale * VECTOR, [POINT])


def test_steering_after_the_memory_of_steps_was_given_up() -> None:
    executor = tiny_executor(LIMITS)
    engine = engine_of(executor, LIMITS)
    params = steered(replace(GREEDY, taps=[POINT]))
    (before,) = run(engine, [SHORT], params)
    engine.reset_prefix_cache()
    executor.free_state()
    executor.make_state()
    (after,) = run(engine, [SHORT], params)
    check(SHORT, after.outputs[0], 0.5 * VECTOR, [POINT])
    assert tokens([after]) == tokens([before])


def test_steps_without_tapped_or_steered_rows_are_the_plain_executables() -> None:
    executor = tiny_executor(LIMITS)
    launched: list[bool] = []
    launch: Callable[..., Any] = executor.launch
    executor.launch = lambda plan: launched.append(bool(plan.bucket.variants)) or launch(plan)  # type: ignore[method-assign,func-returns-value]
    engine = engine_of(executor, LIMITS)
    run(engine, [LONG, SHORT], GREEDY)
    assert launched and not any(launched)
    launched.clear()
    run(engine, [LONG, SHORT], [replace(GREEDY, max_tokens=12), steered()])
    assert any(launched) and not launched[-1]


def test_llm_and_async_llm(engine: Engine) -> None:
    llm = LLM.of_engine(engine, EngineConfig(), NO_PROGRESS)
    llm.set_steering("mine", VECTOR.tolist())
    named = steered(replace(GREEDY, taps=[POINT]), vector=None, name="mine")
    ids = {"prompt_token_ids": list(SHORT)}
    (output,) = llm.generate([ids], named, use_tqdm=False)
    check(SHORT, output.outputs[0], 0.5 * VECTOR, [POINT])
    llm.set_steering("mine", None)
    with pytest.raises(RequestError, match="prompt 0: steer names the vector 'mine'"):
        llm.generate([ids], named)

    async def streamed() -> None:
        served = AsyncLLM(engine)
        await served.set_steering("mine", jnp.asarray(VECTOR))
        with pytest.raises(RequestError, match="'other' has 3 values, .* have 32"):
            await served.set_steering("other", [1, 2, 3])
        seen = [(one.outputs[0].taps, one) async for one in served.generate(ids, named)]
        assert seen[0][0] is None, "the arrays are made at the end"
        check(SHORT, seen[-1][1].outputs[0], 0.5 * VECTOR, [POINT])
        await served.shutdown()

    asyncio.run(streamed())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taps": ["layers.0.resid"]}, "taps has 'layers.0.resid', .* nearest are layers.0.resid_"),
        ({"taps": ["layers.1.resid_post"]}, r"not among the points of this engine.*--tap-points"),
        ({"taps": [3]}, "taps must hold names of points, got 3"),
        ({"steer": [STEER | {"point": "embd"}]}, "steer has 'embd', .* nearest are embed"),
        (
            {"steer": [STEER | {"vector": [1.0] * 31}]},
            "31 values, and .* has 32",
        ),
        ({"steer": [STEER | {"vector": [[1.0]]}]}, "a list of numbers"),
        ({"steer": [STEER | {"vector": [float("nan")] * 32}]}, "finite in float32"),
        ({"steer": [STEER | {"vector": [1e39] * 32}]}, "finite in float32"),
        ({"steer": [STEER | {"scale": 1e38}]}, "beyond float32; lower the scales"),
        ({"steer": [STEER | {"scale": "2"}]}, "a scale that must be a finite number: '2'"),
        ({"steer": [STEER | {"name": "x"}]}, "a vector, or the name of one, and not both"),
        ({"steer": [{"point": POINT}]}, "a vector, or the name of one, and not both"),
        ({"steer": [{"vector": [1.0]}]}, "needs a point"),
        (
            {"steer": [STEER | {"layer": 3}]},
            "steer has 'layer'; its fields are",
        ),
        ({"steer": [{"point": POINT, "name": "nme"}]}, "'nme', which is not set; the nearest are"),
        ({"steer": [{"point": WIDE, "name": "narrow"}]}, "which has 32 values, .* 48"),
        ({"steer": [4]}, "steer must hold objects of point, vector, name, scale, got 4"),
    ],
)
def test_refused(engine: Engine, fields: dict[str, Any], message: str) -> None:
    engine.steering.set("narrow", VECTOR)
    with pytest.raises(RequestError, match=message):
        engine.check(RequestSpec(SHORT, replace(GREEDY, **fields)))


def test_engines_without_points_name_the_flag() -> None:
    plain = Engine(tiny_executor(tiny_limits()), tiny_limits(), tiny_engine().facts, None)
    for fields in ({"taps": ["embed"]}, {"steer": [STEER]}):
        with pytest.raises(RequestError, match=r"start it with tap_points \(--tap-points\)"):
            plain.check(RequestSpec(SHORT, replace(GREEDY, **fields)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.0.resid_pst"], "'layers.0.resid_pst', which is no point; .* layers.0.resid_post"),
        (["layers.2.z"], "'layers.2.z', which is no point"),
        (["layers.1.q"], "steps that serve do not have; read it with jaxinfer.load"),
        (["layers.*.q"], "steps that serve do not have; read it with jaxinfer.load"),
        (["layers.*.resid"], r"'layers.\*.resid', which matches no point; .* layers.0.resid_"),
    ],
)
def test_points_of_an_engine(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        points_named(names, MODEL.config)


def test_patterns_in_the_points_of_an_engine_and_of_requests(engine: Engine) -> None:
    ends = ["layers.0.resid_post", "layers.1.resid_post"]
    for pattern in ("layers.*.resid_post", "blocks.*.hook_resid_post", "*resid_post"):
        given = EngineConfig(tap_points=[pattern]).tap_points  # type: ignore[arg-type]
        assert given is not None
        assert [p.name for p in points_named(given.split(","), MODEL.config)] == ends
    every = points_named(["all", POINT], MODEL.config)
    assert len(every) == 2 + 2 * 7 and len({p.name for p in every}) == len(every)
    params = [replace(GREEDY, taps="all"), replace(GREEDY, taps=["blocks.*", "*_norm"])]
    whole, some = run(engine, [SHORT, SHORT], params)
    check(SHORT, whole.outputs[0], np.zeros(32), NAMES)
    theirs = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.mlp.hook_post"]
    check(SHORT, some.outputs[0], np.zeros(32), [*theirs, "final_norm"])
    assert tap_bytes(9, 2, params[0], LIMITS) == 10 * sum(p.width for p in LIMITS.points) * 4
    with pytest.raises(RequestError, match=r"taps has '\*.q', which is not among the points"):
        engine.check(RequestSpec(SHORT, replace(GREEDY, taps=["*.q"])))


def test_names_of_the_setting() -> None:
    given = ["blocks.3.hook_resid_post", "embed, layers.3.resid_post"]
    assert EngineConfig(tap_points=given).tap_points == "layers.3.resid_post,embed"  # type: ignore[arg-type]
    for wrong in ("", "a,,b", 3, [None]):
        with pytest.raises(ConfigError, match="tap_points must be names of points"):
            EngineConfig(tap_points=wrong)  # type: ignore[arg-type]


def test_bytes_of_taps() -> None:
    limits: Limits = LIMITS
    params = replace(GREEDY, taps=["blocks.0.hook_resid_post", "layers.1.z"], n=3)
    assert tap_bytes(10, 6, params, limits) == 3 * 15 * (32 + 32) * 4
