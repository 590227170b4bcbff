"""qk_rope_append in plain XLA: norm, rotation and one scatter per pool."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.kv_append.xla import kv_append
from pallas_kernels.numerics import split_and_rotate


@partial(jax.jit, static_argnames="eps")  # one trace serves every layer of a step
def qk_rope_append(
    qkv: jax.Array,  # [T, N + 2K, H]
    cos: jax.Array,  # float32[T, H / 2]
    sin: jax.Array,  # float32[T, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, H] and the pools
    """See ``qk_rope_append.api``."""
    q, k, v = split_and_rotate(qkv, cos, sin, qk_norms, k_pages.shape[2], eps)
    return q, *kv_append(k, v, k_pages, v_pages, slot_mapping)
