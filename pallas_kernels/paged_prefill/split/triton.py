"""paged_prefill in Triton for few queries of long contexts: the keys of a tile in several splits.

A tile is as in ``paged_prefill.tile``. The fewer tiles a row has and the more keys, the more
splits each of its tiles has, so that one sequence's last tokens fill the GPU. A row's splits do not
depend on other rows. The CTAs of a kv head take pairs of a tile and a split round-robin, so the
grid depends on shapes alone and no CTA starts in vain. A second launch merges the states of a
tile's splits in order (Flash-Decoding: Dao et al., 2023), some columns in each CTA: 44 us for 30
tokens of 8,192 of Qwen3-4B on an H200, 50 if the last CTA of a tile to arrive merges them all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.attention_triton import first_state
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.lib.splits_triton import (
    entries_of_split,
    item_of,
    merged,
    splits_of,
    store_state,
)
from pallas_kernels.paged_prefill import launch
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.paged_prefill.tile import (
    attend_keys,
    context_of,
    load_queries,
    offsets_of,
    oldest_key,
    store_result,
)


@triton.jit
def _most_keys(
    length,  # of a row's context
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The largest number of keys that a tile of the row sees."""
    return tl.minimum(length, WINDOW + TOKENS - 1) if WINDOW > 0 else length


@triton.jit
def _attend_splits(
    q,  # [T, N, H]
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    sinks,  # [N]; unused without HAS_SINKS
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    out,  # [T, N, H]
    accs,  # float32[T, K * PARTS, SPLITS, G * VALUE_TILE]: see ``at_states``
    m_l,  # float32[T, K * PARTS, SPLITS, 2 * G]
    num_tokens,  # T; this and the next two are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    table_width,  # M
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    STARTS_TILE: tl.constexpr,  # at least R + 1
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,  # columns of values of the CTA
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # (token, query head) pairs of the tile
    TOKENS: tl.constexpr,  # tokens of the tile: ROWS // GROUP
    BLOCK: tl.constexpr,  # keys per loop iteration
    SPLITS: tl.constexpr,  # of a tile at most, a power of two
    CTAS: tl.constexpr,  # of a kv head and part, if each SM has one
    MIN_KEYS: tl.constexpr,  # of a split at least, if a context has as many
):
    PARTS: tl.constexpr = DIM_TILE // VALUE_TILE  # CTAs of a tile, which divide the values' columns
    part = tl.program_id(0)
    kv_head = part // PARTS
    columns = part % PARTS * VALUE_TILE + tl.arange(0, VALUE_TILE)

    # The padding after the last row is one more row, without context.
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    ends = tl.load(query_start_loc + rows + 1, mask=rows + 1 < num_starts, other=num_tokens)
    lengths = tl.load(seq_lens + rows, mask=rows + 1 < num_starts, other=0)
    tiles_of_rows = tl.cdiv(ends - starts, TOKENS)
    most = _most_keys(lengths, WINDOW, TOKENS)
    items = tiles_of_rows * splits_of(tiles_of_rows, most, SPLITS, CTAS, MIN_KEYS)

    pair = tl.arange(0, ROWS)
    token = pair // GROUP
    for item in range(tl.program_id(1), tl.sum(items, 0), tl.num_programs(1)):
        row, index = item_of(item, rows, items)
        row_start = tl.load(query_start_loc + row)
        is_row = row + 1 < num_starts  # False for padding
        row_end = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens)
        length = tl.load(seq_lens + row, mask=is_row, other=0)
        tiles = tl.cdiv(row_end - row_start, TOKENS)
        splits = splits_of(tiles, _most_keys(length, WINDOW, TOKENS), SPLITS, CTAS, MIN_KEYS)
        split = index // tiles
        first_token = row_start + index % tiles * TOKENS
        count, position = context_of(first_token, row_end, length, TOKENS)
        end = position + count
        start = oldest_key(position, WINDOW)
        keys = tl.maximum(end - start, 0)
        per_split, used = entries_of_split(keys, splits, BLOCK)
        if split < used:
            lower = start + split * per_split
            upper = tl.minimum(lower + per_split, end)
            in_count = token < count
            at_tile, in_tile = offsets_of(first_token, kv_head, pair, NUM_KV_HEADS, GROUP, HEAD_DIM)
            query = load_queries(q + at_tile, in_tile, in_count, HEAD_DIM, DIM_TILE, SCALED)
            head = kv_head * GROUP + pair % GROUP
            m_i, l_i = first_state(sinks, head, False, ROWS)
            if HAS_SINKS and split == used - 1:
                m_i, l_i = first_state(sinks, head, True, ROWS)
            m_i, l_i, acc = attend_keys(
                query, position, token, m_i, l_i, k_pages + kv_head * HEAD_DIM,
                v_pages + kv_head * HEAD_DIM, k_scales + kv_head, v_scales + kv_head, columns,
                page_table + row.to(tl.int64) * table_width, start, end, lower, upper, SCALE, CAP,
                WINDOW, SCALED, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, VALUE_TILE, PAGE_SIZE, ROWS,
                BLOCK, True,
            )  # fmt: skip
            if used == 1:
                store_result(out + at_tile, in_tile, columns, in_count, l_i, acc, HEAD_DIM)
            else:
                # The states of a tile are adjacent, without those of tokens that it lacks.
                pairs = count * GROUP
                at_states = first_token.to(tl.int64) * (NUM_KV_HEADS * PARTS) + part * count
                own_accs = accs + at_states * (SPLITS * GROUP * VALUE_TILE)
                own_m_l = m_l + at_states * (SPLITS * 2 * GROUP)
                column = tl.arange(0, VALUE_TILE)
                inside = in_count[:, None] & (column >= 0)[None, :]
                store_state(
                    own_accs, own_m_l, split, pair, column, in_count, inside, m_i, l_i, acc, pairs,
                    VALUE_TILE,
                )  # fmt: skip


@triton.jit
def _merge(
    accs,  # float32[T, K * PARTS, SPLITS, G * VALUE_TILE]: of ``_attend_splits``
    m_l,  # float32[T, K * PARTS, SPLITS, 2 * G]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    out,  # [T, N, H]: of ``_attend_splits``, updated in place
    num_tokens,
    num_starts,
    WINDOW: tl.constexpr,
    STARTS_TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CTAS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of values that a CTA merges ...
    UNROLL: tl.constexpr,  # ... from so many splits at the same time
):
    """Merge some columns of a tile's splits."""
    PARTS: tl.constexpr = DIM_TILE // VALUE_TILE
    part = tl.program_id(0)
    row, row_start, row_end, first_token = row_of_tile(  # type: ignore[misc]
        tl.program_id(1), query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first_token >= row_end:
        return
    length = tl.load(seq_lens + row, mask=row + 1 < num_starts, other=0)
    tiles = tl.cdiv(row_end - row_start, TOKENS)
    splits = splits_of(tiles, _most_keys(length, WINDOW, TOKENS), SPLITS, CTAS, MIN_KEYS)
    count, position = context_of(first_token, row_end, length, TOKENS)
    keys = tl.maximum(position + count - oldest_key(position, WINDOW), 0)
    _, used = entries_of_split(keys, splits, BLOCK)
    if used == 1:
        return
    pair = tl.arange(0, ROWS)
    kv_head = part // PARTS
    at_tile, in_tile = offsets_of(first_token, kv_head, pair, NUM_KV_HEADS, GROUP, HEAD_DIM)
    at_states = first_token.to(tl.int64) * (NUM_KV_HEADS * PARTS) + part * count
    in_count = pair // GROUP < count
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    result = merged(
        accs + at_states * (SPLITS * GROUP * VALUE_TILE), m_l + at_states * (SPLITS * 2 * GROUP),
        used, pair, column, in_count, in_count[:, None] & (column < VALUE_TILE)[None, :],
        count * GROUP, VALUE_TILE, SPLITS, UNROLL,
    )  # fmt: skip
    of_head = part % PARTS * VALUE_TILE + column
    inside = in_count[:, None] & ((column < VALUE_TILE) & (of_head < HEAD_DIM))[None, :]
    to = out + at_tile + (in_tile[:, None] + of_head[None, :])
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


def paged_prefill(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """See ``paged_prefill.api``."""
    return launch_with(launch.split_config(args), args)


def launch_with(config: launch.SplitConfig, args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """``paged_prefill`` with a given configuration."""
    (t, _, h), num_starts = args.q.shape, args.query_start_loc.shape[0]
    sizes, value_tile = launch.sizes_of(args.q, args, config.tile), config.tile.value_tile(h)
    parts = sizes["NUM_KV_HEADS"] * (sizes["DIM_TILE"] // value_tile)
    states, group = (t, parts, config.splits), sizes["GROUP"]
    of_splits: dict[str, Any] = {
        "STARTS_TILE": max(launch.FEW_STARTS_TILE, power_of_two(num_starts)),
        "VALUE_TILE": value_tile,
        "SPLITS": config.splits,
        "CTAS": config.ctas,
        "MIN_KEYS": launch.MIN_KEYS,
    }
    items = config.splits * (t // sizes["TOKENS"] + num_starts)
    out, accs, m_l = jt.triton_call(
        args.q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.seq_lens,
        args.query_start_loc,
        args.seq_lens if args.sinks is None else args.sinks,
        args.seq_lens if args.k_scales is None else args.k_scales,
        args.seq_lens if args.v_scales is None else args.v_scales,
        kernel=_attend_splits,
        out_type=(
            jax.ShapeDtypeStruct(args.q.shape, args.q.dtype),
            jax.ShapeDtypeStruct((*states, group * value_tile), jnp.float32),
            jax.ShapeDtypeStruct((*states, 2 * group), jnp.float32),
        ),
        grid=(parts, min(launch.RESIDENT * config.ctas, items)),
        num_tokens=t,
        num_starts=num_starts,
        SCALED=args.k_scales is not None,
        **of_splits,
        **sizes,
    )
    names = ("WINDOW", "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "DIM_TILE", "ROWS", "TOKENS", "BLOCK")
    result = jax.new_ref(out)  # jax-triton updates a Ref in place
    jt.triton_call(
        accs,
        m_l,
        args.seq_lens,
        args.query_start_loc,
        result,
        kernel=_merge,
        out_type=(),
        grid=(parts, t // sizes["TOKENS"] + num_starts, -(-value_tile // launch.MERGED_COLUMNS)),
        num_warps=4,
        num_stages=1,
        num_tokens=t,
        num_starts=num_starts,
        COLUMNS=launch.MERGED_COLUMNS,
        UNROLL=launch.MERGED_SPLITS,
        **of_splits,
        **{name: sizes[name] for name in names},
    )
    return jax.freeze(result)
