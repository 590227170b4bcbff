"""The gated delta rule beside features of an engine that other tests try on attention alone."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.points import points_named
from jaxinfer.models import forward
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import by_path, nested
from kit.engines import compiled_for, engine_of, run, tiny_limits
from kit.stream_family import adapted, merged
from kit.tiny_models import VOCAB_SIZE, tiny_model

MODEL, PARAMS = tiny_model("qwen3_5")
WIDTH = MODEL.config.hidden_size
NAMES = ("layers.0.z", "layers.0.resid_post", "final_norm")  # layer 0 has the delta rule
POINT = NAMES[1]
VECTOR = np.random.default_rng(0).normal(size=WIDTH).astype(np.float32) * 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LENGTH = 224


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB_SIZE - 2, length).tolist())


def engine_with(model: Model, params: Params, names: tuple[str, ...] = ()) -> Engine:
    limits = replace(
        tiny_limits(
            max_num_seqs=3,
            max_num_batched_tokens=128,
            num_pages=200,
            max_model_len=256,
            groups=model.state.groups,
            points=points_named(names, model.config),
        ),
        num_snapshots=6,
        align=model.state.align,
    )
    program = Program(model, limits)
    executor = Executor(program, compiled_for(program, extras=False), params, *init_state(program))
    return engine_of(executor, limits)


@jax.jit
def _forward(params: Params, ids: jax.Array, added: jax.Array) -> Any:
    return forward(MODEL, params, ids, NAMES, {POINT: lambda x: x + added})


def check(
    prompt: tuple[int, ...], answer: Any, *, scale: float = 0.0, params: Params = PARAMS
) -> None:
    """A greedy answer and its taps are those of ``forward`` with the same edit."""
    ids, count = np.zeros(LENGTH, np.int32), len(prompt) + len(answer.token_ids) - 1
    ids[: count + 1] = [*prompt, *answer.token_ids]
    logits, found = _forward(params, jnp.asarray(ids), jnp.asarray(scale * VECTOR))
    assert logits[len(prompt) - 1 : count].argmax(-1).tolist() == answer.token_ids
    for name, taps in (answer.taps or {}).items():
        np.testing.assert_allclose(taps, found[name][:count], atol=2e-4, err_msg=name)


def test_taps_and_steering_of_chunks_prefixes_and_decode_rows() -> None:
    engine = engine_with(MODEL, PARAMS, NAMES)
    tapped = replace(GREEDY, taps=list(NAMES))
    steered = replace(tapped, steer=[{"point": POINT, "vector": VECTOR}])
    long, short = prompt_of(190, 1), prompt_of(70, 2)
    outputs = run(engine, [long, short, short], [tapped, steered, GREEDY])
    for prompt, output, scale in zip((long, short, short), outputs, (0, 1, 0), strict=True):
        check(prompt, output.outputs[0], scale=scale)
    again = run(engine, [short, short], [GREEDY, replace(steered, taps=None)])
    assert [output.num_cached_tokens for output in again] == [64, 64]  # each from its own state
    for output, scale in zip(again, (0, 1), strict=True):
        check(short, output.outputs[0], scale=scale)


def test_adapters_beside_the_weights_of_the_delta_rule() -> None:
    names, specs = ("/qkvz", "/ba", "/o"), MODEL.family.param_specs
    family = replaced(
        MODEL.family,
        param_specs=lambda config: tuple(
            one for spec in specs(config) for one in adapted(spec, names)
        ),
    )
    model = replaced(MODEL, family=family)
    rng, leaves = np.random.default_rng(3), by_path(PARAMS)
    for path, array in model.arrays.items():
        if path not in leaves and not path.endswith("/base"):
            leaves[path] = jnp.asarray(rng.normal(size=array.shape) / 4, jnp.float32)
    for path in [path for path in leaves if path.endswith(names)]:
        leaves[f"{path}/base"] = leaves.pop(path)
    params, prompts = nested(leaves), [prompt_of(129, 4), prompt_of(20, 5)]
    outputs = run(engine_with(model, params), prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(prompt, output.outputs[0], params=merged(params))


def test_what_others_left_in_memory_reaches_no_new_sequence() -> None:
    """Not even NaN, of a sequence whose logits were not finite: in its slot, pages or snapshots."""
    engine = engine_with(MODEL, PARAMS)
    arrays = engine._loop._executor._arrays  # type: ignore[attr-defined]
    arrays.state = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), arrays.state)
    prompts = [prompt_of(length, 7) for length in (190, 129, 70, 1)]
    for prompt, output in zip(prompts, run(engine, prompts, GREEDY), strict=True):
        check(prompt, output.outputs[0])
