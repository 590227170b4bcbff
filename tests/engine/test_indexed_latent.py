"""The pages of an indexer's keys, which short contexts do not have. Families with an indexer are
served in ``test_latent``.
"""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from engine.test_latent import GREEDY, LIMITS, PROMPTS
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.registry import build_model
from kit.engines import compiled_for, dense_greedy, engine_of, run
from kit.tiny_models import tiny_config, tiny_model


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
