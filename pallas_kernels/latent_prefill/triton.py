"""latent_prefill in Triton: expanded attention within a chunk, absorbed attention to what precedes.

XLA expands the step's own entries to keys and values, and the first kernel attends to them. Only
the host knows how many earlier tokens a row has (from chunks before or a reused prefix), so they
cannot be expanded by a GEMM without a shape for the worst case. The second kernel attends to them
in the pages, with absorbed queries: 3.4 times the operations of expanded attention for DeepSeek's
sizes, and no more memory. It merges its result with that of the first by their log-sum-exp. CTAs of
rows without earlier tokens return at once.
"""

from __future__ import annotations

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
from pallas_kernels.lib.rows_triton import row_of_tile


@triton.jit
def _attend_chunk(
    q,  # [T, N, D + R]
    k_nope,  # [T, N, D]
    entries,  # [T, C + R]
    v,  # [T, N, V]
    query_start_loc,  # int32[R + 1]
    out,  # [T, N, V]
    lse,  # float32[T, N]: log2 of the sum of exp2(score)
    num_tokens,  # T; this and the next are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    SCALE: tl.constexpr,  # of scores, times log2(e); positive
    STARTS_TILE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Causal attention of a tile of one head's queries to the step's tokens of the same row."""
    head = tl.program_id(0)
    # The longest tiles, those at the end of a row, come first, so none runs alone at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, row_start, row_end, first = row_of_tile(  # type: ignore[misc]
        tile, query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first >= row_end:
        return
    is_row = row + 1 < num_starts  # False for padding, which attends to nothing
    m_i, l_i, acc = chunk_state(
        q, k_nope, entries, v, head, first, row_start, row_end, is_row,
        SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK, TOKENS, BLOCK,
    )  # fmt: skip
    token = first + tl.arange(0, TOKENS)
    inside = token < row_end
    at_head = token.to(tl.int64) * NUM_HEADS + head
    at_out = out + at_head[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(at_out, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + at_head, m_i + tl.log2(l_i), mask=inside)


@triton.jit
def _attend_context(
    q,  # [T, N, D + R]
    k_up,  # [N, D, C]
    v_up,  # [N, V, C]
    pages,  # [P, S, C + R]; SCALED: uint8[P, S, C]
    page_table,  # int32[R, M]
    seq_lens,  # int32[R]
    query_start_loc,  # int32[R + 1]
    scales,  # float32[P, S, G]; unused without SCALED
    rope_pages,  # [P, S, R]; unused without SCALED
    lse,  # float32[T, N]: of ``_attend_chunk``
    out,  # [T, N, V]: of ``_attend_chunk``, updated in place
    num_tokens,  # T; this and the next two are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    table_width,  # M
    SCALE: tl.constexpr,
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
):
    """Merge the attention of a tile of one head's queries to the tokens before the step."""
    head = tl.program_id(0)
    row, row_start, row_end, first = row_of_tile(  # type: ignore[misc]
        tl.program_id(1), query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    is_row = row + 1 < num_starts
    before = tl.load(seq_lens + row, mask=is_row, other=0) - (row_end - row_start)
    if (first >= row_end) | (before <= 0):
        return
    of_context, values = context_state(
        q, k_up, v_up, pages, page_table + row.to(tl.int64) * table_width, scales, rope_pages,
        head, first, row_end, 0, before, SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK, GROUPS, SCALED,
        PAGE_SIZE, TOKENS, BLOCK, STEP,
    )  # fmt: skip
    token = first + tl.arange(0, TOKENS)
    inside = (token < row_end)[:, None]
    at_head = token * NUM_HEADS + head
    value = tl.arange(0, VALUE)
    # each part counts as much as its sum of exp2(score)
    of_chunk = tl.load(lse + at_head, mask=token < row_end, other=0.0)
    largest = tl.maximum(of_chunk, of_context)
    w_chunk = tl.exp2(of_chunk - largest)
    w_context = tl.exp2(of_context - largest)
    at_out = out + at_head[:, None] * VALUE + value[None, :]
    chunk = tl.load(at_out, mask=inside, other=0.0).to(tl.float32)
    merged = chunk * w_chunk[:, None] + values * w_context[:, None]
    merged = merged / (w_chunk + w_context)[:, None]
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=inside)


def latent_prefill(args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """See ``latent_prefill.api``."""
    return launch_with(launch.choose_configs(args.q, scaled=args.scales is not None), args)


def launch_with(configs: launch.TritonConfigs, args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """``latent_prefill`` with given configurations."""
    (t, n, _), num_starts = args.q.shape, args.query_start_loc.shape[0]
    chunk, context, sizes = configs.chunk, configs.context, chunk_sizes(args)
    out, lse = jt.triton_call(
        args.q,
        *chunk_operands(args),
        args.query_start_loc,
        kernel=_attend_chunk,
        out_type=(
            jax.ShapeDtypeStruct((t, n, sizes["VALUE"]), args.q.dtype),
            jax.ShapeDtypeStruct((t, n), jnp.float32),
        ),
        grid=(n, t // chunk.tokens + num_starts),
        **chunk.parameters(),
        **sizes,
    )
    merged = jax.new_ref(out)  # jax-triton updates a Ref in place
    jt.triton_call(
        *context_operands(args),
        lse,
        merged,
        kernel=_attend_context,
        out_type=(),
        grid=(n, t // context.tokens + num_starts),
        **context.parameters(),
        **context_sizes(args),
    )
    return jax.freeze(merged)
