"""Gemma 4 through the whole engine: two sizes of heads, and layers without keys of their own.

The tokens are those of the dense form, whatever the engine does with the requests: pages of both
pools are shared, returned behind windows and taken back, and layers that use the keys and values of
an earlier one have no memory.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.memory_plan import step_bound, workspace_bytes
from jaxinfer.exec.compile.program import FIRST, MAX_LAUNCHED_TOKENS, Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models import Model, Params, build_model
from kit.dense import check_tokens, prompt_of
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.tiny_models import random_params, tiny_config, tiny_model

LENGTHS = (1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 513)
LONGEST = 560
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
NAMES = ("gemma4", "gemma4_all")
PREFIX = 32  # tokens: the end of a chunk, where the pages of windows are held


@cache
def executables(name: str) -> tuple[Program, Executables]:
    model, _ = tiny_model(name)
    limits = tiny_limits(
        max_num_seqs=3,
        max_num_batched_tokens=32,
        num_pages=400,
        max_model_len=LONGEST,
        groups=model.state.groups,
    )
    buckets = (Bucket(3), Bucket(0, 32, 3), Bucket(3, 32, 3, scores=True))
    program = Program(model, replace(limits, buckets=buckets))
    return program, compiled_for(program, extras=False)


def engine(name: str, pages: tuple[int, ...] | None = None, *, overlap: bool = True) -> Engine:
    program, compiled = executables(name)
    executor = Executor(program, compiled, tiny_model(name)[1], *init_state(program))
    limits = program.limits if pages is None else replace(program.limits, num_pages=pages)
    return engine_of(executor, limits, overlap=overlap)


def check(name: str, served: Engine, prompts: list[list[int]], params: SamplingParams) -> list[int]:
    return check_tokens(name, served, prompts, params, LONGEST)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("name", NAMES)
def test_batched_and_chunked(name: str, overlap: bool) -> None:
    """The longest prompts have four chunks, next to decode rows."""
    served = engine(name, overlap=overlap)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    assert not any(check(name, served, prompts, GREEDY))


@pytest.mark.parametrize("name", NAMES)
def test_answers_pass_windows_and_prefixes_are_reused(name: str) -> None:
    served = engine(name)
    check(name, served, [prompt_of(43)], LONG)
    assert check(name, served, [prompt_of(42), prompt_of(90)], LONG) == [PREFIX] * 2


@pytest.mark.parametrize("pool", range(2))
def test_preempted_sequences_draw_the_same_tokens(pool: int) -> None:
    """Either pool may be the one without free pages."""
    num_pages = [400, 400]
    num_pages[pool] = (40, 15)[pool]
    served = engine("gemma4_all", tuple(num_pages))
    check("gemma4_all", served, [prompt_of(50, 5), prompt_of(40, 6), prompt_of(30, 7)], LONG)
    assert served.stats().num_preemptions > 0


def test_layers_without_keys_of_their_own_have_no_memory() -> None:
    """The first two of four layers have keys and values, of two sizes of heads in two pools."""
    layout = tiny_model("gemma4_all")[0].state
    assert [(entry.name, entry.shape) for entry in layout.arrays] == [
        *(("k", (4, 8)), ("v", (4, 8)), ("k", (2, 16)), ("v", (2, 16))),
    ]
    own, of = layout.layers[:2], layout.layers[2:]
    assert [(place.of, place.groups, place.arrays) for place in of] == [
        (i, place.groups, place.arrays) for i, place in enumerate(own)
    ]
    assert len(layout.groups) == len(layout.bytes_per_entry) == 2


def model_of(layers: int, shared: int) -> tuple[Model, Params]:
    """Layers of both kinds in turns, of which the last ones use the keys and values of two."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    config = tiny_config("gemma4_all") | {"num_hidden_layers": layers, "layer_types": kinds}
    model = build_model({**config, "num_kv_shared_layers": shared}, "float32")
    return model, random_params(model)


@pytest.mark.parametrize(
    ("layers", "shared"),
    [(4, 2), *(pytest.param(8, shared, marks=pytest.mark.nightly) for shared in (4, 6))],
)
def test_a_split_step_draws_the_same_tokens_in_place(layers: int, shared: int) -> None:
    """Its second part reads keys of the first one, in eight layers of two of them, and makes the
    inputs of its layers again; with six shared layers it has only the last token of each prompt. No
    pool is copied.
    """
    model, params = model_of(layers, shared)
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16, groups=model.state.groups)
    tokens = MAX_LAUNCHED_TOKENS + 16
    steps = Bucket(2), Bucket(0, tokens, 2), Bucket(2, tokens, 2, scores=True)
    limits = replace(limits, buckets=steps)
    program = Program(model, limits, platform="gpu")
    names = [name for name in program.names() if not name.startswith(("extras", "score"))]
    assert any(name.endswith(FIRST) for name in names)
    assert len(program.parts) == 2 and program.parts[1].layers.start == layers // 4
    compiled = {name: program.trace(name).lower().compile() for name in names}
    pools = {",".join(map(str, leaf.shape)) for leaf in program.state()}
    for name in {bucket.name for bucket in limits.buckets} & {*names}:
        copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled[name].as_text() or "")
        assert not pools.intersection(copied), name
    made = Executables(compiled, compiled=0, workspace_bytes=0)
    served = engine_of(Executor(program, made, params, *init_state(program)), limits)
    prompts = [prompt_of(40), prompt_of(9, 3)]
    found = [tuple(one.outputs[0].token_ids) for one in run(served, prompts, GREEDY)]
    assert found == dense_greedy(model, params, prompts, GREEDY.max_tokens or 0)


def test_the_memory_plan_knows_the_inputs_of_layers() -> None:
    """They are wider than everything else in a layer."""
    config = tiny_config("gemma4_all") | {"hidden_size_per_layer_input": 512, "num_experts": 3}
    model = build_model(config, "float32")
    limits = tiny_limits(max_num_seqs=1, max_num_batched_tokens=64, groups=model.state.groups)
    bucket = Bucket(0, 64, 1)
    program = Program(model, replace(limits, buckets=(bucket,)))
    compiled = program.trace(bucket.name).lower().compile()
    assert workspace_bytes(compiled) < step_bound(program, bucket)
    assert step_bound(program, bucket) > 4 * 64 * 4 * 512  # float32[T, L, P]
