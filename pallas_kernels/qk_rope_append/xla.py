"""qk_rope_append in plain XLA: norm, rotation and one scatter per pool."""

from __future__ import annotations

import jax

from pallas_kernels.kv_append.xla import kv_append
from pallas_kernels.lib.numerics import split_and_rotate
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs


@jax.jit  # one trace serves every layer of a step
def qk_rope_append(
    args: RopeAppendArgs,
) -> tuple[jax.Array, ...]:  # [T, N, H] and the pools
    """See ``qk_rope_append.api``."""
    args = args.with_values()
    rotation, num_kv_heads = (args.cos, args.sin, args.qk_norms), args.k_pages.shape[2]
    q, k, v = split_and_rotate(args.qkv, *rotation, num_kv_heads, args.eps)
    return q, *kv_append(args.appended(k, v))
