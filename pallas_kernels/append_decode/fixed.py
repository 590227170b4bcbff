"""append_decode with fixed bits on a GPU: append, then attention as of a prompt's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.kv_append.triton import kv_append
from pallas_kernels.lib.numerics import split_heads
from pallas_kernels.paged_prefill.fixed.triton import attend_rows
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs
from pallas_kernels.qk_rope_append.triton import qk_rope_append_fixed


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    page_size, lens = args.k_pages.shape[1], args.seq_lens
    last = jnp.maximum(lens - 1, 0)
    page = jnp.take_along_axis(args.page_table, (last // page_size)[:, None], axis=1)[:, 0]
    slots = jnp.where(lens > 0, page * page_size + last % page_size, 0)
    new: dict[str, Any] = {**args.pools_by_name, "slot_mapping": slots}
    if args.cos is None or args.sin is None:
        args = args.with_values(fixed=True)
        q, k, v = split_heads(args.qkv, args.k_pages.shape[2])
        pools = kv_append(KvAppendArgs(k=k, v=v, **new))
    else:
        static = {"eps": args.eps, "values": args.values}
        rotated = RopeAppendArgs(
            qkv=args.qkv, cos=args.cos, sin=args.sin, qk_norms=args.qk_norms, **new, **static
        )
        q, *pools = qk_rope_append_fixed(rotated)
    out = attend_rows(q, replace(args, k_pages=pools[0], v_pages=pools[1]))
    return out, *pools
