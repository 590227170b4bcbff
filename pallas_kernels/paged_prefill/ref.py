"""The definition of paged_prefill: each query attends as a decode row of its own position."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.append_decode.attend_ref import attend
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.page_scales import pools_of

# Without splits a tile's CTAs walk through all keys alone: of Qwen3-4B's layers one CTA for each of
# the 8 kv heads, 0.35 ms for 16,384 keys (H200). An engine's buckets for what a prefix hit leaves
# have up to this many tokens, most of them padding; with more, the tiles of prompts fill the GPU.
FEW_TOKENS = 256
MAX_PARTS = 4  # CTAs that divide a head's columns of values


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillArgs:
    """The arguments of ``paged_prefill``; all but the rows are as in ``attend_ref.attend``."""

    q: jax.Array  # [T, N, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    page_table: jax.Array  # int32[R, M]
    seq_lens: jax.Array  # int32[R]
    query_start_loc: jax.Array  # int32[R + 1]
    sinks: jax.Array | None = None  # [N], with values [T, N]
    k_scales: jax.Array | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: jax.Array | None = None  # float32[P, S, K]
    slopes: jax.Array | None = None  # float32[N]
    sink_values: jax.Array | None = None  # [T, N, H]
    scale: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    cap: float | None = field(default=None, metadata=STATIC)
    root: bool = field(default=False, metadata=STATIC)


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """The query i positions before its row's end sees all of the context but the last i tokens."""
    index = jnp.arange(args.q.shape[0])
    row = jnp.searchsorted(args.query_start_loc, index, side="right") - 1
    real = index < args.query_start_loc[-1]
    row = jnp.where(real, row, 0)
    before_end = jnp.asarray(args.query_start_loc)[row + 1] - 1 - index
    seen = jnp.where(real, jnp.asarray(args.seq_lens)[row] - before_end, 0)
    table = jnp.asarray(args.page_table)[row]
    static = {"scale": args.scale, "window": args.window, "cap": args.cap, "root": args.root}
    beside = args.sinks, args.slopes, args.sink_values
    return attend(args.q, pools_of(args), table, seen, *beside, **static)
