"""delta_prefill in Triton: what needs no state for all chunks in parallel, then a scan over them.

With the names of ``delta_prefill.xla``, the first kernel stores for each chunk and value head the
sums of log decays, (1 + A)^-1 beta, and q.k times the decay between the two tokens. A CTA of the
second one has a part of a value head's state [Dk, values] in registers and passes over the chunks
of a row: three GEMMs after each other in each chunk, u = (1 + A)^-1 beta (v - exp(c) k S), then
the new state. The keys are used as they are, not multiplied by the inverse, which is 64 x 64: so
less is stored between the kernels than with the chunked form of the paper (section 3.3), and keys
need no rounding.

The error of a state stays for all later tokens, so an operand of a GEMM that is not an argument is
split into a number of the arguments' dtype and the rest in the same dtype, 16 bits together for
bfloat16. States then differ from the definition's by 4e-6, and by 1e-4 where one key is repeated
and nothing decays, which cancels most of each product. Only what outputs alone depend on is
rounded.

If each component of keys decays by itself, ``triton_channels`` has the first kernel.

Row r has the chunks from query_start_loc[r] // CHUNK + r on: at least as many as it needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.delta_prefill import launch
from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.delta_prefill.triton_channels import channel_inverses, channel_products
from pallas_kernels.delta_prefill.triton_parts import (
    halves,
    joined,
    split,
    times,
    unit_inverse,
)
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile


@triton.jit
def _chunks(
    q,  # [T, K, Dk]
    k,  # [T, K, Dk]
    log_decay,  # float32[T, V]
    beta,  # float32[T, V]
    query_start_loc,  # int32[R + 1]
    sums,  # float32[N, V, CHUNK]
    inverses,  # [N, V, HALVES, CHUNK, CHUNK]
    scores,  # [N, V, CHUNK, CHUNK]
    out,  # [T, V, Dv]: zeros for tokens of no row
    num_tokens,  # T; this and the next are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, _, row_end, first = row_of_tile(  # type: ignore[misc]
        chunk, query_start_loc, num_tokens, num_starts, STARTS_TILE, CHUNK
    )
    if first >= row_end:
        return
    at = tl.arange(0, CHUNK)
    inside = at < row_end - first
    base = first.to(tl.int64)  # offsets exceed int32, but not within a chunk
    if row + 1 == num_starts:
        at_out = out + (base * HEADS + head) * VALUE_DIM
        at_out += at[:, None] * (HEADS * VALUE_DIM) + tl.arange(0, VALUE_DIM)[None, :]
        zeros = tl.zeros((CHUNK, VALUE_DIM), out.dtype.element_ty)
        tl.store(at_out, zeros, mask=inside[:, None])
        return
    dtype: tl.constexpr = k.dtype.element_ty
    at_chunk = (chunk * HEADS + head).to(tl.int64)
    of_key = (base * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    at_key = at[:, None] * (KEY_HEADS * KEY_DIM) + tl.arange(0, KEY_DIM)[None, :]
    keys = tl.load(k + of_key + at_key, mask=inside[:, None], other=0.0)
    queries = tl.load(q + of_key + at_key, mask=inside[:, None], other=0.0)
    of_gate = base * HEADS + head
    decay = tl.load(log_decay + of_gate + at * HEADS, mask=inside, other=0.0)
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    decay = tl.cumsum(decay, 0)
    tl.store(sums + at_chunk * CHUNK + at, decay)

    # masked before exp: a difference above the diagonal is positive and may overflow
    seen = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
    at_square = at[:, None] * CHUNK + at[None, :]
    within = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * between
    tl.store(scores + at_chunk * (CHUNK * CHUNK) + at_square, within.to(dtype))
    lower = tl.dot(keys, tl.trans(keys), input_precision="tf32x3") * between * strength[:, None]
    lower = tl.where(at[:, None] > at[None, :], lower, 0.0)
    inner: tl.constexpr = dtype if dtype == tl.float32 else tl.float16
    inverse = unit_inverse(lower, inner, CHUNK)
    # again, since it would be in 16 registers of each thread from the first use on
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    inverse *= strength[None, :]
    high, low = halves(inverse, dtype)  # type: ignore[misc]
    at_inverse = inverses + at_chunk * (HALVES * CHUNK * CHUNK) + at_square
    tl.store(at_inverse, high)
    if HALVES == 2:
        tl.store(at_inverse + CHUNK * CHUNK, low)


@triton.jit
def _scan(
    q,  # [T, K, Dk]
    k,  # [T, K, Dk]
    v,  # [T, V, Dv]
    sums,  # float32[N, V, CHUNK]; by channel float32[N, V, Dk], of whole chunks
    inverses,  # [N, V, HALVES, CHUNK, CHUNK]; by channel see ``triton_channels.channel_inverses``
    scores,  # [N, V, CHUNK, CHUNK]
    # by channel [N, V, 1 + 2 * HALVES, CHUNK, Dk]: queries with their decays from the chunk's
    # begin; these times the state are subtracted from the changes; keys with their decays to the
    # end; and the low halves of the last two; else not read
    decayed,
    query_start_loc,  # int32[R + 1]
    begins,  # int32[R]
    reads,  # int32[R]
    writes,  # int32[R]
    save_tokens,  # int32[R, NUM_SAVES]
    save_rows,  # int32[R, NUM_SAVES]
    out,  # [T, V, Dv]
    states,  # float32[P, V, Dk, Dv]
    NUM_SAVES: tl.constexpr,
    SAVES_TILE: tl.constexpr,  # at least NUM_SAVES
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # of a CTA
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    PARTS: tl.constexpr = VALUE_DIM // VALUES
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    if start >= end:
        return
    dtype: tl.constexpr = k.dtype.element_ty
    at = tl.arange(0, CHUNK)
    components = tl.arange(0, KEY_DIM)
    values = tl.program_id(0) % PARTS * VALUES + tl.arange(0, VALUES)
    at_state = states + head * (KEY_DIM * VALUE_DIM)
    at_state += components[:, None] * VALUE_DIM + values[None, :]
    STATE: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    at_read = at_state + tl.load(reads + row).to(tl.int64) * STATE  # offsets exceed int32
    is_old = (components >= 0)[:, None] & (tl.load(begins + row) > 0)
    state = tl.load(at_read, mask=is_old, other=0.0)
    if NUM_SAVES > 0:
        saves = tl.arange(0, SAVES_TILE)
        at_saves = row * NUM_SAVES + saves
        counts = tl.load(save_tokens + at_saves, mask=saves < NUM_SAVES, other=0)

    at_square = at[:, None] * CHUNK + at[None, :]
    first_chunk = start // CHUNK + row
    for number in range(0, tl.cdiv(end - start, CHUNK)):
        token = start.to(tl.int64) + number * CHUNK + at  # offsets exceed int32
        inside = (token < end)[:, None]
        at_chunk = ((first_chunk + number) * HEADS + head).to(tl.int64)
        at_value = (token * HEADS + head)[:, None] * VALUE_DIM + values[None, :]
        if BY_CHANNEL:
            PLANE: tl.constexpr = CHUNK * KEY_DIM
            at_plane = decayed + at_chunk * ((1 + 2 * HALVES) * PLANE)
            at_plane += at[:, None] * KEY_DIM + components[None, :]
            queries = tl.load(at_plane)
            removed = tl.load(at_plane + PLANE)
            ends = tl.load(at_plane + 2 * PLANE)
            removed_low = tl.load(at_plane + 3 * PLANE) if HALVES == 2 else removed
            ends_low = tl.load(at_plane + 4 * PLANE) if HALVES == 2 else ends
            at_change = at_chunk * (CHUNK * VALUE_DIM) + at[:, None] * VALUE_DIM + values[None, :]
            changes = tl.load(inverses + at_change)
            total = tl.load(sums + at_chunk * KEY_DIM + components)[:, None]
        else:
            at_key = (token * KEY_HEADS + head // (HEADS // KEY_HEADS))[:, None] * KEY_DIM
            at_key += components[None, :]
            keys = tl.load(k + at_key, mask=inside, other=0.0)
            queries = tl.load(q + at_key, mask=inside, other=0.0)
            value = tl.load(v + at_value, mask=inside, other=0.0)
            at_inverse = inverses + at_chunk * (HALVES * CHUNK * CHUNK) + at_square
            high = tl.load(at_inverse)
            low = tl.load(at_inverse + CHUNK * CHUNK) if HALVES == 2 else high
            decay = tl.load(sums + at_chunk * CHUNK + at)[:, None]
            total = tl.load(sums + at_chunk * CHUNK + CHUNK - 1)
        within = tl.load(scores + at_chunk * (CHUNK * CHUNK) + at_square)

        before = split(state, dtype)
        of_queries = joined(tl.dot(queries, before, input_precision="tf32x3"), dtype)
        if BY_CHANNEL:
            of_keys = tl.dot(removed, before, input_precision="tf32x3")
            if HALVES == 2:
                of_keys = tl.dot(removed_low, before, of_keys)
            changes -= joined(of_keys, dtype)
        else:
            since = tl.exp(decay)
            of_keys = joined(tl.dot(keys, before, input_precision="tf32x3"), dtype)
            changes = times(high, low, value.to(tl.float32) - since * of_keys, dtype)
            of_queries *= since
        result = tl.dot(within, changes.to(dtype), of_queries, input_precision="tf32x3")
        tl.store(out + at_value, result.to(out.dtype.element_ty), mask=inside)
        if BY_CHANNEL:
            added = times(tl.trans(ends), tl.trans(ends_low), changes, dtype)
        else:
            changes = split(changes * tl.exp(total - decay), dtype)
            added = joined(tl.dot(tl.trans(keys), changes, input_precision="tf32x3"), dtype)
        state = state * tl.exp(total) + added
        if NUM_SAVES > 0:
            found = tl.max(tl.where(counts == (number + 1) * CHUNK, saves, -1), 0)
            is_saved = (components >= 0)[:, None] & (found >= 0)
            to = tl.load(save_rows + row * NUM_SAVES + found, mask=found >= 0, other=0)
            tl.store(at_state + to.to(tl.int64) * STATE, state, mask=is_saved)
    tl.store(at_state + tl.load(writes + row).to(tl.int64) * STATE, state)


def delta_prefill(args: DeltaPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, V, Dv], the states
    """See ``delta_prefill.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: DeltaPrefillArgs
) -> tuple[jax.Array, jax.Array]:  # [T, V, Dv], the states
    """``delta_prefill`` with a given configuration."""
    sizes = _sizes(args)
    sums, inverses, scores, *decayed, out = of_chunks(config, args)
    # jax-triton updates a Ref in place
    out, states = jax.new_ref(out), jax.new_ref(args.states)
    saves, num_saves = (args.writes, args.writes), 0  # no more than arguments, without saves
    if args.save_tokens is not None and args.save_rows is not None:
        saves, num_saves = (args.save_tokens, args.save_rows), args.save_tokens.shape[1]
    jt.triton_call(
        args.q,
        args.k,
        args.v,
        sums,
        inverses,
        scores,
        *(decayed or [args.k]),
        args.query_start_loc,
        args.begins,
        args.reads,
        args.writes,
        *saves,
        out,
        states,
        kernel=_scan,
        out_type=(),
        grid=(sizes["HEADS"] * (sizes["VALUE_DIM"] // config.values), len(args.begins)),
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
        NUM_SAVES=num_saves,
        SAVES_TILE=power_of_two(max(num_saves, 1)),
        VALUES=config.values,
        BY_CHANNEL=args.by_channel,
        **sizes,
    )
    return jax.freeze(out), jax.freeze(states)


def of_chunks(config: launch.TritonConfig, args: DeltaPrefillArgs) -> tuple[jax.Array, ...]:
    """Sums of decays, inverses and scores of all chunks, and the outputs of tokens of no row; by
    channel as ``_channel_chunks`` stores them.
    """
    num_starts, sizes, of = len(args.query_start_loc), _sizes(args), jax.ShapeDtypeStruct
    shape = (len(args.q) // CHUNK + num_starts, sizes["HEADS"])
    square, item, float32 = (*shape, CHUNK, CHUNK), args.k.dtype, jnp.float32
    inputs = (args.q, args.k, args.log_decay, args.beta, args.query_start_loc)
    call: dict[str, Any] = {
        "grid": shape[::-1],
        "num_warps": config.chunk_warps,
        "num_stages": 1,
        "num_tokens": len(args.q),
        "num_starts": num_starts,
        "STARTS_TILE": max(launch.STARTS_TILE, power_of_two(num_starts)),
        **sizes,
    }
    outputs = of(args.v.shape, args.v.dtype)
    if not args.by_channel:
        inverses = of((*shape, sizes["HALVES"], CHUNK, CHUNK), item)
        arrays = (of((*shape, CHUNK), float32), inverses, of(square, item), outputs)
        return jt.triton_call(*inputs, kernel=_chunks, out_type=arrays, **call)
    keys, planes = sizes["KEY_DIM"], 1 + 2 * sizes["HALVES"]
    arrays = (
        of((*shape, keys), float32),
        of(square, float32),
        of(square, item),
        of((*shape, planes, CHUNK, keys), item),
        of(shape, jnp.int32),
        outputs,
    )
    products = {"kernel": channel_products, "MOST": launch.MOST_DECAY, **call}
    products["PART"] = min(keys, launch.PART)
    made = jt.triton_call(*inputs, out_type=arrays, STRONG=False, **products)
    refs = [jax.new_ref(array) for array in made]
    jt.triton_call(*inputs, *refs, out_type=(), STRONG=True, **products)
    sums, lowers, scores, decayed, _, out = refs
    changes = jt.triton_call(
        *(args.beta, args.query_start_loc, args.v, lowers, decayed),
        kernel=channel_inverses,
        out_type=of((*shape, CHUNK, sizes["VALUE_DIM"]), float32),
        **{**call, "num_warps": launch.INVERSE_WARPS},
    )
    stored = (jax.freeze(ref) for ref in (sums, scores, decayed, out))
    sums, scores, decayed, out = stored
    return sums, changes, scores, decayed, out


def _sizes(args: DeltaPrefillArgs) -> dict[str, Any]:
    """Constants of both kernels."""
    _, key_heads, key_dim = args.k.shape
    _, heads, value_dim = args.v.shape
    return {
        "KEY_HEADS": key_heads,
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        "HALVES": 1 if args.k.dtype == jnp.float32 else 2,
    }
