"""compressed_attention in Triton: one launch over both kinds of entries, one to merge splits.

A CTA has one token, a tile of its heads, and one split of the entries that it reads: those of its
window, then compressed ones. It reads each once, as the key and as the value of all heads of the
tile, in one loop, which ends where the token's entries do. With few tokens their entries have
several splits (Flash-Decoding: Dao et al., 2023), whose states are merged by other CTAs, each with
a part of one head. Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.compressed_attention import launch
from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.latent_decode.launch import MergeConfig
from pallas_kernels.latent_decode.triton import attend_block
from pallas_kernels.lib.attention_triton import LOG2_E, result_of, slots_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.splits_triton import entries_of_split, store_state
from pallas_kernels.sparse_latent.triton import LOWEST, SCAN, last_chosen, merge_splits, slots_at

NONE, FIRST, CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # compressed entries


@triton.jit
def _attend_split(
    q,  # [T, N, H]
    near,  # [P, S, H]
    near_table,  # int32[B, M]
    rows,  # int32[T]
    last,  # int32[T]
    sinks,  # [N]
    far,  # [P', S', H / pieces]; this and the next two are unused with NONE
    far_table,  # int32[B, M']; CHOSEN: int32[T, K], where the chosen entries are; -1: none
    reads,  # int32[T]: the first entries of the row; unused with CHOSEN
    out,  # [T, N, H]; with splits float32[T, SPLITS, N, H], without the division by l_i
    m_l,  # float32[T, SPLITS, 2, N]: m_i, l_i; unused with one split
    near_width,  # M; this and the next two are not constexpr, so all lengths share a kernel
    far_width,  # M'; CHOSEN: K
    min_keys,  # of a split, if a token has as many
    SCALE: tl.constexpr,  # of scores, times log2(e)
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA
    WIDTH: tl.constexpr,  # H
    WINDOW: tl.constexpr,
    NEAR_SIZE: tl.constexpr,  # entries of a page
    FAR_SIZE: tl.constexpr,
    FAR: tl.constexpr,  # NONE, FIRST or CHOSEN
    SPLITS: tl.constexpr,  # at most
    BLOCK: tl.constexpr,  # entries per loop iteration
    SCAN: tl.constexpr,
):
    # tiles of the same entries run at the same time: all but one read them from the L2 cache
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    passed = tl.load(last + token) + 1
    num_near = tl.minimum(passed, WINDOW)
    num_far = 0
    far_ids = far_table
    if FAR == CHOSEN:
        far_ids = far_table + token * far_width
        num_far = last_chosen(far_ids, 0, far_width, SCAN)
    elif FAR == FIRST:
        far_ids = far_table + row * far_width
        num_far = tl.load(reads + token)
    near_end = tl.cdiv(num_near, BLOCK) * BLOCK  # compressed entries begin with a block
    count = tl.where(num_far > 0, near_end + num_far, num_near)
    in_heads = heads < NUM_HEADS
    states = m_l + token * (SPLITS * 2 * NUM_HEADS)
    splits = tl.maximum(tl.minimum(tl.cdiv(count, min_keys), SPLITS), 1)
    per_split, used = entries_of_split(count, splits, BLOCK)
    if split >= used:  # nothing reads its accumulator
        at_m = states + split * 2 * NUM_HEADS + heads
        tl.store(at_m, tl.full((HEADS,), LOWEST, tl.float32), mask=in_heads)
        tl.store(at_m + NUM_HEADS, tl.zeros((HEADS,), tl.float32), mask=in_heads)
        return
    start = split * per_split
    end = tl.minimum(start + per_split, count)

    components = tl.arange(0, WIDTH)
    inside = in_heads[:, None]
    at_head = heads[:, None] * WIDTH + components[None, :]
    query = tl.load(q + token * NUM_HEADS * WIDTH + at_head, mask=inside, other=0.0)
    counts = in_heads & (split == 0)  # a sink counts once
    sink = tl.load(sinks + heads, mask=counts, other=0.0).to(tl.float32) * LOG2_E
    m_i = tl.where(counts, sink, LOWEST)
    l_i = tl.where(counts, 1.0, 0.0)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    near_ids = near_table + row * near_width
    blocks = tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK):
        # a block is of one kind, so one load reads it, and the next one crosses no end of a loop
        is_near = first < near_end
        index = first + blocks
        seen = index < tl.where(is_near, num_near, end)
        if FAR == NONE:
            pool = near
            slot = slots_of(near_ids, passed - num_near + index, seen, NEAR_SIZE, True)
        else:
            pool = tl.where(is_near, near, far)
            ids = tl.where(is_near, near_ids, far_ids)
            at = index + tl.where(is_near, passed - num_near, -near_end)
            page = tl.where(is_near, at // NEAR_SIZE, at // FAR_SIZE)
            slot = tl.load(ids + page, mask=seen, other=-1)
            if FAR == CHOSEN:  # whose FAR_SIZE is 1
                seen = slot >= 0
            slot = slot.to(tl.int64) * tl.where(is_near, NEAR_SIZE, FAR_SIZE)
            slot += tl.where(is_near, at % NEAR_SIZE, at % FAR_SIZE)
        at_entry = (pool + slot * WIDTH)[:, None] + components[None, :]
        entries = tl.load(at_entry, mask=seen[:, None], other=0.0)
        m_i, l_i, acc = attend_block(query, None, entries, None, seen, m_i, l_i, acc, SCALE)

    if SPLITS == 1:
        mean = result_of(l_i, acc).to(out.dtype.element_ty)
        tl.store(out + token * NUM_HEADS * WIDTH + at_head, mean, mask=inside)
    else:
        accs = out + token * (SPLITS * NUM_HEADS * WIDTH)
        store_state(
            accs,
            states,
            split,
            heads,
            components,
            in_heads,
            inside,
            m_i,
            l_i,
            acc,
            NUM_HEADS,
            WIDTH,
        )


def compressed_attention(args: CompressedAttentionArgs) -> jax.Array:  # [T, N, H]
    """See ``compressed_attention.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: CompressedAttentionArgs
) -> jax.Array:  # [T, N, H]
    """``compressed_attention`` with a given configuration."""
    (tokens, heads, width), splits = args.q.shape, config.splits
    table_rows = min(len(table) for table in (args.page_table, args.far_table) if table is not None)
    rows = jnp.clip(args.rows, 0, table_rows - 1)
    far, far_size = _far(args, rows)
    kind = NONE if args.reads is None else CHOSEN if args.has_choice else FIRST
    sizes: dict[str, Any] = {"NUM_HEADS": heads, "SPLITS": splits}
    partials = jax.ShapeDtypeStruct((tokens, splits, heads, width), jnp.float32)
    states = jax.ShapeDtypeStruct((tokens, splits, 2, heads) if splits > 1 else (1,), jnp.float32)
    out, m_l = jt.triton_call(
        args.q,
        args.pages,
        args.page_table,
        rows,
        args.last,
        args.sinks,
        *far,
        kernel=_attend_split,
        out_type=(
            partials if splits > 1 else jax.ShapeDtypeStruct(args.q.shape, args.q.dtype),
            states,
        ),
        grid=(-(-heads // config.heads), splits, tokens),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        near_width=args.page_table.shape[1],
        far_width=far[1].shape[1],
        min_keys=config.min_keys,
        SCALE=args.scale * math.log2(math.e),
        HEADS=config.heads,
        WIDTH=width,
        WINDOW=args.window,
        NEAR_SIZE=args.pages.shape[1],
        FAR_SIZE=far_size,
        FAR=kind.value,
        BLOCK=config.block,
        SCAN=SCAN,
        **sizes,
    )
    if splits == 1:
        return out
    merge = MergeConfig.of(splits, width)
    return jt.triton_call(
        out,
        m_l,
        kernel=merge_splits,
        out_type=jax.ShapeDtypeStruct(args.q.shape, args.q.dtype),
        grid=(heads, width // merge.components, tokens),
        num_warps=4,
        num_stages=1,
        RANK=width,
        TILE=power_of_two(splits),
        COMPONENTS=merge.components,
        **sizes,
    )


def _far(
    args: CompressedAttentionArgs,
    rows: jax.Array,  # int32[T]
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], int]:
    """The arrays of compressed entries as the kernel takes them, and the entries of a page
    (of slots 1); of calls without compressed entries any arrays.
    """
    pages, table, reads = args.far_pages, args.far_table, args.reads
    if pages is None or table is None or reads is None:
        return (args.pages, args.page_table, rows), 1
    if args.has_choice:
        slots = slots_at(table, pages.shape[1], rows, reads)
        return (pages, slots, rows), 1
    return (pages, table, reads), pages.shape[1] // args.pieces
