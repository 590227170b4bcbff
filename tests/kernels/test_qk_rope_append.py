"""qk_rope_append writes donated pools in place; errors for bad arguments."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.append_decode.attend_xla import attend
from pallas_kernels.qk_rope_append.api import RopeAppendArgs, qk_rope_append

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 4, 9, 3, 64
POOL = (512, 16, KV_HEADS, HEAD_DIM)
POOL_BYTES = 4 * 512 * 16 * KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no_norms"])
def test_in_place_in_front_of_attention(norms: bool) -> None:
    @partial(jax.jit, donate_argnums=(3, 4))
    def step(qkv, cos, qk_norms, k_pages, v_pages, slots):
        rotation = {"cos": cos, "sin": cos, "qk_norms": qk_norms if norms else None}
        pages = {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": slots}
        q, *pools = qk_rope_append(RopeAppendArgs(qkv=qkv, **rotation, **pages, eps=1e-6))
        table, lens = jnp.zeros((TOKENS, 8), jnp.int32), jnp.ones(TOKENS, jnp.int32)
        return pools, attend(q, (*pools,), table, lens, scale=1.0)

    qkv = jnp.zeros((TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM))
    cos, weights = jnp.zeros((TOKENS, HEAD_DIM // 2)), jnp.ones((2, HEAD_DIM))
    pool = jax.ShapeDtypeStruct(POOL, jnp.float32)
    slots = jnp.zeros(TOKENS, jnp.int32)
    memory = step.lower(qkv, cos, weights, pool, pool, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES // 4, "the compiled step holds a copy of a pool"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"qkv": (4, 6, 64)}, "heads .* do not fit pages", id="no_queries"),
        pytest.param({"qkv": (4, 15, 32)}, "heads .* do not fit pages", id="head_dim"),
        pytest.param({"cos": (4, 64)}, "do not fit 4 tokens of head_dim 64", id="angles"),
        pytest.param({"slot_mapping": (5,)}, "do not fit 4 tokens", id="slots"),
        pytest.param({"qk_norms": (64,)}, "are not two of head_dim 64", id="norms"),
        pytest.param({"v_pages": (2, 8, 3, 64)}, "k_pages .* and v_pages .* differ", id="pools"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, tuple[int, ...]], message: str) -> None:
    sizes = {"qkv": (4, 15, 64), "cos": (4, 32), "sin": (4, 32), "qk_norms": (2, 64)}
    sizes |= {"k_pages": (2, 16, 3, 64), "v_pages": (2, 16, 3, 64), "slot_mapping": (4,)}
    arrays = {name: jnp.zeros(size) for name, size in (sizes | change).items()}
    with pytest.raises(ValueError, match=message):
        qk_rope_append(RopeAppendArgs(**arrays, eps=1e-6))
