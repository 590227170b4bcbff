"""Families with an indexer are served: contexts of several times the tokens that it chooses."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from msgspec.structs import replace

from engine.test_latent import GREEDY, LIMITS, PROMPTS
from jaxinfer.core.limits import Limits
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.registry import build_model
from kit.engines import compiled_for, dense_greedy, engine_of, run
from kit.tiny_models import tiny_config, tiny_model

FAMILIES = (
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("deepseek_v32", "axk2", "mistral_large4", "hy_v4")
    ),
    "glm_moe_dsa",
    "minimax_m3",
)
FEW_PAGES = 20  # of each pool, of the 37 that the prompts and their answers fill


def limits(name: str, num_pages: int = LIMITS.num_pages[0]) -> Limits:
    """Those of ``test_latent`` with a pool of latents and one of the indexer's keys."""
    groups = tiny_model(name)[0].state.groups
    return replace(LIMITS, groups=groups, num_pages=(num_pages,) * len(groups))


@cache
def expected(name: str) -> list[tuple[int, ...]]:
    return dense_greedy(*tiny_model(name), PROMPTS, 12)


@cache
def executables(name: str) -> tuple[Program, Executables]:
    program = Program(tiny_model(name)[0], limits(name))
    return program, compiled_for(program, extras=False)


def engine(name: str, num_pages: int = LIMITS.num_pages[0]) -> Engine:
    """The scheduler has ``num_pages``; steps are compiled for the most."""
    program, compiled = executables(name)
    executor = Executor(program, compiled, tiny_model(name)[1], *init_state(program))
    return engine_of(executor, limits(name, num_pages))


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_chunked_and_from_cached_pages(name: str) -> None:
    """Chunks of 16 tokens beside decode rows, then the same prompts from the pages of the first."""
    served = engine(name)
    for _ in range(2):
        outputs = run(served, PROMPTS, GREEDY)
        assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)
    assert [one.num_cached_tokens for one in outputs] == [36, 32, 0]
    assert served.stats().num_live_pages == 0


def test_pages_of_the_indexer() -> None:
    """Layers with an indexer have a key a token in a pool of its own, which is counted."""
    state = tiny_model("glm_moe_dsa")[0].state  # 1 of 3 layers has an indexer
    assert state.bytes_per_entry == (3 * 4 * (16 + 8), 4 * 16)
    assert [entry.name for entry in state.arrays] == ["latent", "index_key", "latent", "latent"]
    assert state.pools == (0, 1, 0, 0)
    assert [layer.follows for layer in state.layers] == [(), (("chosen", 0),), (("chosen", 0),)]
    # a prompt step is not split between a layer and one that follows it
    assert [state.border_before(layer) for layer in range(4)] == [0, 0, 0, 3]


def test_pages_of_the_indexer_of_blocks() -> None:
    """Keys and values of all layers are in one pool, the keys of indexers of some in another."""
    state = tiny_model("minimax_m3")[0].state  # 2 of 3 layers have an indexer
    assert state.bytes_per_entry == (3 * 4 * 2 * 2 * 16, 2 * 4 * 12)
    assert [state.layers[i].groups for i in range(3)] == [(0,), (0, 1), (0, 1)]


BLOCKS = tiny_config("minimax_m3")["sparse_attention_config"]
MANY = {  # chosen: 64 tokens
    "glm_moe_dsa": {"index_topk": 64},
    "minimax_m3": {
        "sparse_attention_config": {**BLOCKS, "sparse_block_size": 16, "sparse_topk_blocks": 4}
    },
}


@pytest.mark.parametrize("name", MANY)
def test_contexts_within_the_chosen_number_have_no_indexer(name: str) -> None:
    """All tokens are chosen: the steps are those of other attention, without pages of keys."""
    config = {**tiny_config(name), **MANY[name]}
    model, params = build_model(config, "float32", 65), tiny_model(name)[1]
    short = dataclasses.replace(model, config=model.config.for_context(64))
    assert short.state.bytes_per_entry == model.state.bytes_per_entry[:1]
    program = Program(short, replace(LIMITS, groups=short.state.groups, max_model_len=64))
    compiled = compiled_for(program, extras=False)
    executor = Executor(program, compiled, params, *init_state(program))
    outputs = run(engine_of(executor, program.limits), PROMPTS, GREEDY)
    found = [tuple(one.outputs[0].token_ids) for one in outputs]
    assert found == dense_greedy(model, params, PROMPTS, 12)


@pytest.mark.parametrize("name", FAMILIES)
def test_alone(name: str) -> None:
    outputs = run(engine(name), PROMPTS, GREEDY, together=False)
    assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_preempted(name: str) -> None:
    served = engine(name, FEW_PAGES)
    outputs = run(served, PROMPTS, GREEDY)
    assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)
    assert served.stats().num_preemptions > 0
