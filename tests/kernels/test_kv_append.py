"""kv_append writes donated pools in place, by itself and before attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_decode.attend_xla import attend
from pallas_kernels.kv_append.api import KvAppendArgs, kv_append
from pallas_kernels.kv_append.xla import written
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill

TOKENS, POOL = (4, 3, 64), (512, 16, 3, 64)
POOL_BYTES = 4 * 512 * 16 * 3 * 64


def _args(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> KvAppendArgs:
    return KvAppendArgs(k=k, v=v, k_pages=k_pages, v_pages=v_pages, slot_mapping=slots)


def _decode(q: jax.Array, *pools: jax.Array) -> jax.Array:
    table = jnp.zeros((4, 8), jnp.int32)
    return attend(q, pools, table, jnp.ones(4, jnp.int32), scale=1.0)


def _prefill(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> jax.Array:
    args = PrefillArgs(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=jnp.zeros((1, 8), jnp.int32),
        seq_lens=jnp.full(1, 4, jnp.int32),
        query_start_loc=jnp.array([0, 4], jnp.int32),
        scale=1.0,
    )
    return paged_prefill(args)


@pytest.mark.parametrize("read", [None, _decode, _prefill], ids=["alone", "decode", "prefill"])
def test_in_place(read) -> None:
    @partial(jax.jit, donate_argnums=(2, 3))
    def step(k, v, k_pages, v_pages, slots):
        pools = kv_append(_args(k, v, k_pages, v_pages, slots))
        return pools, read(k, *pools) if read else None

    token, pool = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (TOKENS, POOL))
    slots = jax.ShapeDtypeStruct(TOKENS[:1], jnp.int32)
    compiled = step.lower(token, token, pool, pool, slots).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES // 4, "the compiled step holds a copy of a pool"
    assert f"f32[{','.join(map(str, POOL))}]{{3,2,1,0}} copy(" not in compiled.as_text()


def test_values_take_the_dtype_of_the_pages() -> None:
    k = jnp.full((1, 2, 8), 1 / 3, jnp.float32)
    pages = jnp.zeros((2, 4, 2, 8), jnp.bfloat16)
    k_pages, _ = kv_append(_args(k, k, pages, pages, jnp.array([6])))
    assert k_pages.dtype == jnp.bfloat16
    assert (k_pages[1, 2] == jnp.bfloat16(1 / 3)).all()


def test_padding_is_not_written() -> None:
    """XLA's kernel for GPUs takes slots to be different: equal ones wait for each other."""
    pages, slots = jnp.full((3, 2, 4), 7, jnp.bfloat16), jnp.array([0, 3, 1, 0, 4], jnp.int32)
    new = jnp.arange(20, dtype=jnp.float32).reshape(5, 4)
    out = np.asarray(written(pages, new, slots), np.float32)
    assert (out[0] == 7).all() and (out[2, 1] == 7).all()
    np.testing.assert_array_equal(out[[1, 2], [1, 0]], new[jnp.array([1, 4])])
    traced = jax.jit(written).trace(pages, new, slots)
    assert "unique_indices = true" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "slots", "message"),
    [
        pytest.param((4, 3, 64), (4, 3, 32), 4, "K and V differ", id="v_head_dim"),
        pytest.param((4, 2, 64), (4, 2, 64), 4, "do not fit pages", id="kv_heads"),
        pytest.param((4, 3, 64), (4, 3, 64), 5, "do not fit pages", id="slot_count"),
    ],
)
def test_arguments_that_do_not_fit(k_shape, v_shape, slots, message) -> None:
    pages = jnp.zeros((2, 16, 3, 64))
    with pytest.raises(ValueError, match=message):
        kv_append(
            _args(jnp.zeros(k_shape), jnp.zeros(v_shape), pages, pages, jnp.zeros(slots, int))
        )
