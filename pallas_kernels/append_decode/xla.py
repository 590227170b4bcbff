"""append_decode in plain XLA: append with the plain op, then ``attend_xla``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.append_decode.attend_xla import attend
from pallas_kernels.kv_append.xla import kv_append
from pallas_kernels.numerics import split_heads
from pallas_kernels.qk_rope_append.xla import qk_rope_append


def append_decode(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    sinks: jax.Array | None = None,  # [N]
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    del arrivals  # for kernels that split a row
    page_size = k_pages.shape[1]
    last = jnp.maximum(seq_lens - 1, 0)
    page = jnp.take_along_axis(page_table, (last // page_size)[:, None], axis=1)[:, 0]
    slots = jnp.where(seq_lens > 0, page * page_size + last % page_size, 0)
    if cos is None or sin is None:
        q, k, v = split_heads(qkv, k_pages.shape[2])
        pools = kv_append(k, v, k_pages, v_pages, slots)
    else:
        q, *pools = qk_rope_append(qkv, cos, sin, qk_norms, k_pages, v_pages, slots, eps=eps)
    out = attend(q, *pools, page_table, seq_lens, sinks, scale=scale, window=window)
    return out, pools[0], pools[1]
