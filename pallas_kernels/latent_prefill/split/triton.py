"""latent_prefill in Triton for few queries of long contexts: a tile's entries in several splits.

The first kernel attends to what precedes the step, as in ``latent_prefill.triton``. The fewer tiles
a row has and the more entries, the more splits each of its tiles has, so that one sequence's last
tokens fill the GPU; a row's splits do not depend on other rows. A CTA has one split of a tile (one
that would take several round-robin would spill registers); the first ones of the grid have all
splits, and the others return. Each expands its mean latents to values, a quarter of their width in
DeepSeek's models, and stores these and their log-sum-exp. The second kernel attends to the step's
own tokens and merges the states of the splits in order (Flash-Decoding: Dao et al., 2023).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.latent_prefill import launch
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.latent_prefill.tile import (
    chunk_operands,
    chunk_sizes,
    chunk_state,
    context_operands,
    context_sizes,
    context_state,
)
from pallas_kernels.lib.attention_triton import with_state
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.lib.splits_triton import entries_of_split, item_of, splits_of


@triton.jit
def _attend_splits(
    q,  # [T, N, D + R]
    k_up,  # [N, D, C]
    v_up,  # [N, V, C]
    pages,  # [P, S, C + R]; SCALED: uint8[P, S, C]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    scales,  # float32[P, S, G]; unused without SCALED
    rope_pages,  # [P, S, R]; unused without SCALED
    means,  # float32[SPLITS, T, N, V]: values of the entries of each split
    lse,  # float32[SPLITS, T, N]: log2 of the sum of exp2(score)
    num_tokens,  # T; this and the next two are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    table_width,  # M
    SCALE: tl.constexpr,  # of scores, times log2(e); positive
    STARTS_TILE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,  # G
    SCALED: tl.constexpr,  # latents have 8 bits: see ``lib.latent_pages``
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,  # of a tile at most, a power of two
    CTAS: tl.constexpr,  # of a head, if each SM has one
    MIN_KEYS: tl.constexpr,  # of a split at least, if a row has as many entries
):
    """States of the attention of tiles of one head's queries to the tokens before the step."""
    head = tl.program_id(0)
    rows = tl.arange(0, STARTS_TILE)
    is_row = rows + 1 < num_starts
    starts = tl.load(query_start_loc + rows, mask=is_row, other=0)
    counts = tl.load(query_start_loc + rows + 1, mask=is_row, other=0) - starts
    before_rows = tl.load(seq_lens + rows, mask=is_row, other=0) - counts
    tiles_of_rows = tl.where(before_rows > 0, tl.cdiv(counts, TOKENS), 0)
    items = tiles_of_rows * splits_of(tiles_of_rows, before_rows, SPLITS, CTAS, MIN_KEYS)
    item = tl.program_id(1)
    if item >= tl.sum(items, 0):
        return
    row, index = item_of(item, rows, items)
    row_start = tl.load(query_start_loc + row)
    row_end = tl.load(query_start_loc + row + 1)
    before = tl.load(seq_lens + row) - (row_end - row_start)
    tiles = tl.cdiv(row_end - row_start, TOKENS)
    splits = splits_of(tiles, before, SPLITS, CTAS, MIN_KEYS)
    split = index // tiles
    per_split, used = entries_of_split(before, splits, BLOCK)
    if split >= used:
        return
    first = row_start + index % tiles * TOKENS
    lower = split * per_split
    of_split, values = context_state(
        q, k_up, v_up, pages, page_table + row.to(tl.int64) * table_width, scales,
        rope_pages, head, first, row_end, lower, tl.minimum(lower + per_split, before),
        SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK, GROUPS, SCALED, PAGE_SIZE, TOKENS,
        BLOCK, STEP,
    )  # fmt: skip
    token = first + tl.arange(0, TOKENS)
    inside = token < row_end
    at_head = (split * num_tokens + token).to(tl.int64) * NUM_HEADS + head
    at_value = at_head[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(lse + at_head, of_split, mask=inside)
    tl.store(means + at_value, values, mask=inside[:, None])


@triton.jit
def _attend_and_merge(
    q,  # [T, N, D + R]
    k_nope,  # [T, N, D]
    entries,  # [T, C + R]
    v,  # [T, N, V]
    query_start_loc,  # int32[R + 1]
    seq_lens,  # int32[R]
    means,  # float32[SPLITS, T, N, V]: of ``_attend_splits``
    lse,  # float32[SPLITS, T, N]
    out,  # [T, N, V]
    num_tokens,
    num_starts,
    SCALE: tl.constexpr,
    STARTS_TILE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTEXT_TOKENS: tl.constexpr,  # of a tile of ``_attend_splits``
    CONTEXT_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CTAS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Attention of a tile of one head's queries to the step's tokens of the same row, and to what
    the states of splits have seen.
    """
    head = tl.program_id(0)
    row, row_start, row_end, first = row_of_tile(  # type: ignore[misc]
        tl.program_id(1), query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first >= row_end:
        return
    is_row = row + 1 < num_starts
    m_i, l_i, acc = chunk_state(
        q, k_nope, entries, v, head, first, row_start, row_end, is_row,
        SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK, TOKENS, BLOCK,
    )  # fmt: skip
    token = first + tl.arange(0, TOKENS)
    inside = token < row_end
    value = tl.arange(0, VALUE)
    before = tl.load(seq_lens + row, mask=is_row, other=0) - (row_end - row_start)
    used = 0
    if before > 0:
        tiles = tl.cdiv(row_end - row_start, CONTEXT_TOKENS)
        splits = splits_of(tiles, before, SPLITS, CTAS, MIN_KEYS)
        _, used = entries_of_split(before, splits, CONTEXT_BLOCK)
    for split in range(0, used):
        at_head = (split * num_tokens + token).to(tl.int64) * NUM_HEADS + head
        at_value = at_head[:, None] * VALUE + value[None, :]
        of_split = tl.load(lse + at_head, mask=inside, other=float("-inf"))
        values = tl.load(means + at_value, mask=inside[:, None], other=0.0)
        one = tl.full((TOKENS,), 1.0, tl.float32)
        m_i, l_i, acc = with_state(m_i, l_i, acc, of_split, one, values)
    at_head = token.to(tl.int64) * NUM_HEADS + head
    at_out = out + at_head[:, None] * VALUE + value[None, :]
    tl.store(at_out, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def latent_prefill(args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """See ``latent_prefill.api``."""
    return launch_with(launch.split_config(args), args)


def launch_with(config: launch.SplitConfig, args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """``latent_prefill`` with a given configuration."""
    (t, n, _), num_starts = args.q.shape, args.query_start_loc.shape[0]
    chunk, context, splits = config.tiles.chunk, config.tiles.context, config.splits
    sizes = chunk_sizes(args)
    of_splits: dict[str, Any] = {"SPLITS": splits, "CTAS": config.ctas, "MIN_KEYS": launch.MIN_KEYS}
    few_starts = {"STARTS_TILE": max(launch.FEW_STARTS_TILE, power_of_two(num_starts))}
    means, lse = jt.triton_call(
        *context_operands(args),
        kernel=_attend_splits,
        out_type=(
            jax.ShapeDtypeStruct((splits, t, n, sizes["VALUE"]), jnp.float32),
            jax.ShapeDtypeStruct((splits, t, n), jnp.float32),
        ),
        grid=(n, launch.most_items(config, t, num_starts - 1)),
        **context.parameters(),
        **(context_sizes(args) | few_starts),
        **of_splits,
    )
    return jt.triton_call(
        args.q,
        *chunk_operands(args),
        args.query_start_loc,
        args.seq_lens,
        means,
        lse,
        kernel=_attend_and_merge,
        out_type=jax.ShapeDtypeStruct((t, n, sizes["VALUE"]), args.q.dtype),
        grid=(n, t // chunk.tokens + num_starts),
        CONTEXT_TOKENS=context.tokens,
        CONTEXT_BLOCK=context.block,
        **chunk.parameters(),
        **sizes,
        **of_splits,
    )
