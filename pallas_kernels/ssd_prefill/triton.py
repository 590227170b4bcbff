"""ssd_prefill in Triton: what needs no state for all chunks in parallel, then a scan over them.

With the names of ``ssd_prefill.xla``, the first kernel stores for each chunk and head the steps d,
their sums L, and c.b times the step and the decay between the two tokens. A CTA of the second one
has a part of a head's state, transposed [N, values], in registers and passes over the chunks of a
row with three GEMMs: the queries times the state, the scores times the inputs, and the change of
the state, of which only the first needs the state. States between chunks are never stored: those of
128 chunks of Falcon-H1-1.5B would be 400 MB.

The error of a state stays for all later tokens, so an operand of a GEMM with the state that is not
an argument is split as in ``delta_prefill.triton``. Only what outputs alone depend on is rounded.

Row r has the chunks from query_start_loc[r] // CHUNK + r on: at least as many as it needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.delta_prefill.triton_parts import joined, split
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.lib.ssd_triton import step_sizes
from pallas_kernels.ssd_prefill import launch
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs


@triton.jit
def _chunks(
    mixed,  # [T, C]
    steps,  # [T, H]
    decay,  # float32[3, H]
    query_start_loc,  # int32[R + 1]
    scores,  # [N, H, CHUNK, CHUNK]
    sizes,  # float32[N, H, CHUNK]
    sums,  # float32[N, H, CHUNK]
    out,  # [T, H, P]: zeros for tokens of no row
    num_tokens,  # T; this and the next are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # P
    STATE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS_TILE: tl.constexpr,  # heads of a CTA
    ZEROS_TILE: tl.constexpr,  # at least the outputs of these heads
    HAS_STEPS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    OF_GROUP: tl.constexpr = HEADS // GROUPS
    TILES: tl.constexpr = (OF_GROUP + HEADS_TILE - 1) // HEADS_TILE
    group = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    chunk = tl.program_id(1)
    row, _, row_end, first = row_of_tile(  # type: ignore[misc]
        chunk, query_start_loc, num_tokens, num_starts, STARTS_TILE, CHUNK
    )
    if first >= row_end:
        return
    at = tl.arange(0, CHUNK)
    inside = at < row_end - first
    base = first.to(tl.int64)  # offsets exceed int32, but not within a chunk
    first_head = tile * HEADS_TILE  # within the group
    num_heads = tl.minimum(OF_GROUP - first_head, HEADS_TILE)
    first_head += group * OF_GROUP
    if row + 1 == num_starts:
        column = tl.arange(0, ZEROS_TILE)
        at_out = out + (base * HEADS + first_head) * WIDTH + column
        for token in range(0, tl.minimum(row_end - first, CHUNK)):
            zeros = tl.zeros((ZEROS_TILE,), out.dtype.element_ty)
            tl.store(at_out + token * (HEADS * WIDTH), zeros, mask=column < num_heads * WIDTH)
        return

    CHANNELS: tl.constexpr = HEADS * WIDTH + 2 * GROUPS * STATE_DIM
    at_key = mixed + base * CHANNELS + HEADS * WIDTH + group * STATE_DIM
    at_key += at[:, None] * CHANNELS + tl.arange(0, STATE_DIM)[None, :]
    keys = tl.load(at_key, mask=inside[:, None], other=0.0)
    queries = tl.load(at_key + GROUPS * STATE_DIM, mask=inside[:, None], other=0.0)
    products = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    seen = at[:, None] >= at[None, :]
    at_square = at[:, None] * CHUNK + at[None, :]
    for head in range(first_head, first_head + num_heads):
        size = tl.full((CHUNK,), 1.0, tl.float32)
        if HAS_STEPS:
            at_step = steps + base * HEADS + at * HEADS + head
            found = tl.load(at_step, mask=inside, other=0.0).to(tl.float32)
            size = step_sizes(found + tl.load(decay + HEADS + head), LOWEST, HIGHEST)
        size = tl.where(inside, size, 0.0)  # of no token 0, so that nothing changes
        since = tl.cumsum(-tl.exp(tl.load(decay + head)) * size, 0)
        at_head = chunk.to(tl.int64) * HEADS + head
        tl.store(sizes + at_head * CHUNK + at, size)
        tl.store(sums + at_head * CHUNK + at, since)
        # masked before exp: a difference above the diagonal is positive and may overflow
        between = tl.exp(tl.where(seen, since[:, None] - since[None, :], float("-inf")))
        within = (products * between * size[None, :]).to(scores.dtype.element_ty)
        tl.store(scores + at_head * (CHUNK * CHUNK) + at_square, within)


@triton.jit
def _scan(
    mixed,  # [T, C]
    decay,  # float32[3, H]
    scores,  # [N, H, CHUNK, CHUNK]
    sizes,  # float32[N, H, CHUNK]
    sums,  # float32[N, H, CHUNK]
    query_start_loc,  # int32[R + 1]
    begins,  # int32[R]
    reads,  # int32[R]
    writes,  # int32[R]
    save_tokens,  # int32[R, NUM_SAVES]
    save_rows,  # int32[R, NUM_SAVES]
    out,  # [T, H, P]
    states,  # float32[S, H, P, N]
    NUM_SAVES: tl.constexpr,
    SAVES_TILE: tl.constexpr,  # at least NUM_SAVES
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # of a CTA
    CHUNK: tl.constexpr,
):
    PARTS: tl.constexpr = WIDTH // VALUES
    CHANNELS: tl.constexpr = HEADS * WIDTH + 2 * GROUPS * STATE_DIM
    head = tl.program_id(0) // PARTS
    group = head // (HEADS // GROUPS)
    row = tl.program_id(1)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    if start >= end:
        return
    dtype: tl.constexpr = mixed.dtype.element_ty
    at = tl.arange(0, CHUNK)
    columns = tl.arange(0, STATE_DIM)
    values = tl.program_id(0) % PARTS * VALUES + tl.arange(0, VALUES)
    at_state = states + head * (WIDTH * STATE_DIM) + values[None, :] * STATE_DIM + columns[:, None]
    STATE: tl.constexpr = HEADS * WIDTH * STATE_DIM
    at_read = at_state + tl.load(reads + row).to(tl.int64) * STATE  # offsets exceed int32
    is_old = (columns >= 0)[:, None] & (tl.load(begins + row) > 0)
    state = tl.load(at_read, mask=is_old, other=0.0)
    if NUM_SAVES > 0:
        saves = tl.arange(0, SAVES_TILE)
        counts = tl.load(save_tokens + row * NUM_SAVES + saves, mask=saves < NUM_SAVES, other=0)
    skip = tl.load(decay + 2 * HEADS + head)

    at_x = at[:, None] * CHANNELS + head * WIDTH + values[None, :]
    at_key = at[:, None] * CHANNELS + HEADS * WIDTH + group * STATE_DIM + columns[None, :]
    at_out = at[:, None] * (HEADS * WIDTH) + head * WIDTH + values[None, :]
    at_square = at[:, None] * CHUNK + at[None, :]
    first_chunk = start // CHUNK + row
    for number in range(0, tl.cdiv(end - start, CHUNK)):
        first = start + number * CHUNK
        inside = (at < end - first)[:, None]
        of_chunk = mixed + first.to(tl.int64) * CHANNELS  # offsets exceed int32
        x = tl.load(of_chunk + at_x, mask=inside, other=0.0)
        keys = tl.load(of_chunk + at_key, mask=inside, other=0.0)
        queries = tl.load(of_chunk + GROUPS * STATE_DIM + at_key, mask=inside, other=0.0)
        at_head = (first_chunk + number).to(tl.int64) * HEADS + head
        within = tl.load(scores + at_head * (CHUNK * CHUNK) + at_square)
        size = tl.load(sizes + at_head * CHUNK + at)
        since = tl.load(sums + at_head * CHUNK + at)
        total = tl.load(sums + at_head * CHUNK + CHUNK - 1)

        of_state = joined(tl.dot(queries, split(state, dtype), input_precision="tf32x3"), dtype)
        of_state *= tl.exp(since)[:, None]
        result = tl.dot(within, x, of_state, input_precision="tf32x3")
        inputs = x.to(tl.float32)
        result += skip * inputs
        at_result = out + first.to(tl.int64) * (HEADS * WIDTH) + at_out
        tl.store(at_result, result.to(out.dtype.element_ty), mask=inside)
        moved = split(inputs * (size * tl.exp(total - since))[:, None], dtype)
        added = joined(tl.dot(tl.trans(keys), moved, input_precision="tf32x3"), dtype)
        state = state * tl.exp(total) + added
        if NUM_SAVES > 0:
            found = tl.max(tl.where(counts == (number + 1) * CHUNK, saves, -1), 0)
            is_saved = (columns >= 0)[:, None] & (found >= 0)
            to = tl.load(save_rows + row * NUM_SAVES + found, mask=found >= 0, other=0)
            tl.store(at_state + to.to(tl.int64) * STATE, state, mask=is_saved)
    tl.store(at_state + tl.load(writes + row).to(tl.int64) * STATE, state)


def ssd_prefill(args: SsdPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, H, P], the states
    """See ``ssd_prefill.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: SsdPrefillArgs
) -> tuple[jax.Array, jax.Array]:  # [T, H, P], the states
    """``ssd_prefill`` with a given configuration."""
    sizes = _sizes(args)
    *of_chunks, out = _of_chunks(config, args)
    # jax-triton updates a Ref in place
    out, states = jax.new_ref(out), jax.new_ref(args.states)
    saves, num_saves = (args.writes, args.writes), 0  # no more than arguments, without saves
    if args.save_tokens is not None and args.save_rows is not None:
        saves, num_saves = (args.save_tokens, args.save_rows), args.save_tokens.shape[1]
    jt.triton_call(
        args.mixed,
        args.decay,
        *of_chunks,
        args.query_start_loc,
        args.begins,
        args.reads,
        args.writes,
        *saves,
        out,
        states,
        kernel=_scan,
        out_type=(),
        grid=(sizes["HEADS"] * (sizes["WIDTH"] // config.values), len(args.begins)),
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
        NUM_SAVES=num_saves,
        SAVES_TILE=power_of_two(max(num_saves, 1)),
        VALUES=config.values,
        **sizes,
    )
    return jax.freeze(out), jax.freeze(states)


def _of_chunks(config: launch.TritonConfig, args: SsdPrefillArgs) -> tuple[jax.Array, ...]:
    """Products, steps and sums of all chunks, and the outputs of tokens of no row."""
    num_starts, sizes, of = len(args.query_start_loc), _sizes(args), jax.ShapeDtypeStruct
    num_tokens, heads, groups = len(args.mixed), sizes["HEADS"], sizes["GROUPS"]
    chunks = num_tokens // CHUNK + num_starts
    tile = min(launch.HEADS_TILE, power_of_two(heads // groups))
    of_heads = of((chunks, heads, CHUNK), jnp.float32)
    return jt.triton_call(
        args.mixed,
        args.decay if args.steps is None else args.steps,
        args.decay,
        args.query_start_loc,
        kernel=_chunks,
        out_type=(
            of((chunks, heads, CHUNK, CHUNK), args.mixed.dtype),
            of_heads,
            of_heads,
            of((num_tokens, heads, sizes["WIDTH"]), args.mixed.dtype),
        ),
        grid=(groups * -(-(heads // groups) // tile), chunks),
        num_warps=config.chunk_warps,
        num_stages=1,
        num_tokens=num_tokens,
        num_starts=num_starts,
        STARTS_TILE=max(launch.STARTS_TILE, power_of_two(num_starts)),
        HEADS_TILE=tile,
        ZEROS_TILE=power_of_two(tile * sizes["WIDTH"]),
        HAS_STEPS=args.steps is not None,
        **launch.finite_limits(args.limits),
        **sizes,
    )


def _sizes(args: SsdPrefillArgs) -> dict[str, Any]:
    """Constants of both kernels."""
    _, heads, width, state_dim = args.states.shape
    return {
        "HEADS": heads,
        "GROUPS": args.num_groups,
        "WIDTH": width,
        "STATE_DIM": state_dim,
        "CHUNK": CHUNK,
    }
