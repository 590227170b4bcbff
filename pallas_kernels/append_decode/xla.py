"""append_decode in plain XLA: append with the plain op, then ``attend_xla``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.append_decode.attend_xla import attend
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.kv_append.xla import kv_append
from pallas_kernels.lib.numerics import split_heads
from pallas_kernels.lib.page_scales import pools_of
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs
from pallas_kernels.qk_rope_append.xla import qk_rope_append


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    page_size, lens = args.k_pages.shape[1], args.seq_lens
    beside = args.sinks, args.slopes, args.sink_values
    if not args.appends:
        q, pools = args.rotated_queries(), pools_of(args)
        return attend(q, pools, args.page_table, lens, *beside, **args.scores), *pools
    args = args.with_values()
    last = jnp.maximum(lens - 1, 0)
    page = jnp.take_along_axis(args.page_table, (last // page_size)[:, None], axis=1)[:, 0]
    slots = jnp.where(lens > 0, page * page_size + last % page_size, 0)
    new: dict[str, Any] = {**args.pools_by_name, "slot_mapping": slots}
    if args.cos is None or args.sin is None:
        q, k, v = split_heads(args.qkv, args.k_pages.shape[2])
        pools = kv_append(KvAppendArgs(k=k, v=v, **new))
    else:
        rotated = RopeAppendArgs(
            qkv=args.qkv, cos=args.cos, sin=args.sin, qk_norms=args.qk_norms, **new, eps=args.eps
        )
        q, *pools = qk_rope_append(rotated)
    return attend(q, (*pools,), args.page_table, lens, *beside, **args.scores), *pools
