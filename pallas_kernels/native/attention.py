"""append_decode, paged_prefill and qk_rope_append by the native library, in float32.

XLA's versions are loops over rows and blocks: some 1,000 instructions of HLO for each layer of a
step, which take most of its compilation and of its memory, and one thread.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.kv_append.xla import kv_append, last_slots
from pallas_kernels.lib.numerics import split_heads
from pallas_kernels.native.library import ATTENTION, ROPE_APPEND, call, missing
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs

LANES, MOST = 16, 512  # head_dim is a multiple of the one, up to the other: ``attend.inc``


def _supports(queries: jax.Array, pages: jax.Array) -> str | None:
    """Why the kernels cannot run with these arrays, or None."""
    if (reason := missing()) is not None:
        return reason
    if queries.dtype != jnp.float32 or pages.dtype != jnp.float32:
        return f"tokens are {queries.dtype} and pages {pages.dtype}, not float32"
    if pages.shape[3] % LANES or pages.shape[3] > MOST:
        return f"head_dim {pages.shape[3]} is not a multiple of {LANES} up to {MOST}"
    return None


def _unfit(args: DecodeArgs | PrefillArgs) -> str | None:
    """Why the kernels lack a call's softmax, or None."""
    if args.root:
        return "scores have a bias of square roots"
    return None if args.sink_values is None else "sinks have values"


def rope_append_supports(args: RopeAppendArgs) -> str | None:
    """Why ``qk_rope_append`` cannot run, or None."""
    return _supports(args.qkv, args.k_pages)


def append_decode_supports(args: DecodeArgs) -> str | None:
    """Why ``append_decode`` cannot run, or None."""
    return _unfit(args) or _supports(args.qkv, args.k_pages)


def prefill_supports(args: PrefillArgs) -> str | None:
    """Why ``paged_prefill`` cannot run, or None."""
    return _unfit(args) or _supports(args.q, args.k_pages)


def _append(
    qkv: jax.Array,  # [T, N + 2K, H]
    cos: jax.Array,  # float32[T, H / 2]
    sin: jax.Array,  # float32[T, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    where: tuple[jax.Array, jax.Array, jax.Array],  # slots, or page table and lengths
    eps: float,
) -> Any:  # [T, N, H] and the pools
    tokens, heads, head_dim = qkv.shape
    q = jax.ShapeDtypeStruct((tokens, heads - 2 * k_pages.shape[2], head_dim), jnp.float32)
    pools = (jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in (k_pages, v_pages))
    arrays = (qkv, cos, sin, qk_norms, k_pages, v_pages, *where)
    aliases = {4: 1, 5: 2}
    return call(
        ROPE_APPEND, (q, *pools), *arrays, eps=np.float32(eps), input_output_aliases=aliases
    )


def attend(args: PrefillArgs, value_dim: int | None = None) -> jax.Array:  # [T, N, H]
    """Attention of prompts, or without starts of rows with one token each.

    ``value_dim``: the first components of values that count (None: all).
    """
    rows = (args.page_table, args.seq_lens, args.query_start_loc)
    sinks = None if args.sinks is None else args.sinks.astype(jnp.float32)
    scores = {"scale": np.float32(args.scale), "cap": np.float32(args.cap or 0)}
    result = jax.ShapeDtypeStruct((*args.q.shape[:2], value_dim or args.q.shape[2]), args.q.dtype)
    arrays = (args.q, args.k_pages, args.v_pages, *rows, sinks, args.slopes)
    return call(ATTENTION, result, *arrays, **scores, window=np.int64(args.window or 0))


def nothing() -> jax.Array:  # int32[0]
    """An array that stands for none: of rows without starts, or tokens without slots."""
    return jnp.zeros(0, jnp.int32)


def qk_rope_append(
    args: RopeAppendArgs,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, H] and the pools
    """See ``qk_rope_append.api``."""
    args = args.with_values(fixed=True)
    where = (args.slot_mapping, jnp.zeros((0, 0), jnp.int32), nothing())
    rotation, pools = (args.cos, args.sin, args.qk_norms), (args.k_pages, args.v_pages)
    return tuple(_append(args.qkv, *rotation, *pools, where, args.eps))


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, H] and the pools
    """See ``append_decode.api``."""
    if not args.appends:
        pools = (args.k_pages, args.v_pages)
        return attend(_of_rows(args, args.rotated_queries(), *pools)), *pools
    args = args.with_values(fixed=True)
    pools, context = (args.k_pages, args.v_pages), (args.page_table, args.seq_lens)
    if args.cos is None or args.sin is None:
        q, k, v = split_heads(args.qkv, args.k_pages.shape[2])
        slots = last_slots(*context, page_size=args.k_pages.shape[1])
        new = KvAppendArgs(k=k, v=v, slot_mapping=slots, **args.pools_by_name)
        pools = kv_append(new)
    else:
        rotation, where = (args.cos, args.sin, args.qk_norms), (nothing(), *context)
        q, *pools = _append(args.qkv, *rotation, *pools, where, args.eps)
    return attend(_of_rows(args, q, *pools)), *pools


def _of_rows(
    args: DecodeArgs,
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
) -> PrefillArgs:
    """The attention of decode rows, which have no starts."""
    return PrefillArgs(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=args.page_table,
        seq_lens=args.seq_lens,
        query_start_loc=nothing(),
        sinks=args.sinks,
        slopes=args.slopes,
        scale=args.scale,
        window=args.window,
        cap=args.cap,
    )


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    return attend(args)
