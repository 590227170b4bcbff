"""The chunks of delta_prefill in Triton, if each component of keys decays by itself.

Products with the state then have no factor of a whole token. So queries and keys are stored times
their decays, and with the inverse already multiplied what is subtracted from the changes: the form
of section 3.3 of the paper (see ``xla``), of two GEMMs after each other. Products of keys have the
decays to and from the chunk's middle, in TF32, if that cannot overflow. Else they are made of six:
between the halves of each block of 2, 4, ... 64 tokens, with the decays to and from the border,
which are at most 1, in float16.

A first version, with six products in every chunk and the inverse in the same kernel, took 1,500 us
for a layer of Kimi Linear (8,192 tokens, H200), of which an SM ran one CTA at a time; its states
differed from those of ``xla`` by 1e-5, and by 7e-5 with strong decays. This one executes about half
as many instructions, and has not been timed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.delta_prefill.triton_parts import halves, unit_inverse
from pallas_kernels.lib.rows_triton import row_of_tile


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 rounded to TF32, whose operands the tensor cores would cut off; if the arguments are
    float32 themselves, not rounded.
    """
    if dtype != tl.float32:
        bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _product(a, b, sums, dtype: tl.constexpr):
    """The product of ``_rounded`` operands, added to ``sums``."""
    if dtype == tl.float32:
        sums = tl.dot(a, b, sums, input_precision="tf32x3")
    else:
        sums = tl.dot(a, b, sums, input_precision="tf32")
    return sums


@triton.jit
def _rows(x, row):
    """For each row of ``x`` another one."""
    return tl.gather(x, tl.broadcast_to(row[:, None], (x.shape[0], x.shape[1])), 0)


@triton.jit
def _across(
    queries,  # float32[CHUNK, PART]
    keys,  # float32[CHUNK, PART]
    decay,  # float32[CHUNK, PART]: sums of log decays
    within,  # float32[CHUNK, CHUNK]
    lower,  # float32[CHUNK, CHUNK]
    size,
    inner: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Add the products of the tokens in the second half of each block of 2 * ``size`` with those in
    its first half. The border is at the last token of the first half.
    """
    at = tl.arange(0, CHUNK)
    last = at // (2 * size) * (2 * size) + size - 1  # of the first half of each token's block
    since = decay - _rows(decay, last)  # type: ignore[misc]
    is_second = at // size % 2 == 1
    factor = tl.exp(tl.where(is_second[:, None], since, -since))
    near = (keys * factor).to(inner)
    earlier = tl.trans(near)
    inside = (at[:, None] // (2 * size) == at[None, :] // (2 * size)) & (
        at[:, None] // size > at[None, :] // size
    )
    products = tl.dot((queries * factor).to(inner), earlier, input_precision="tf32x3")
    within += tl.where(inside, products, 0.0)
    lower += tl.where(inside, tl.dot(near, earlier, input_precision="tf32x3"), 0.0)
    return within, lower


@triton.jit
def channel_products(
    q,  # [T, K, Dk]
    k,  # [T, K, Dk]
    log_decay,  # float32[T, V, Dk]
    beta,  # float32[T, V]
    query_start_loc,  # int32[R + 1]
    sums,  # float32[N, V, Dk]: of whole chunks
    lowers,  # float32[N, V, CHUNK, CHUNK]: products of keys, strictly lower triangular, times beta
    scores,  # [N, V, CHUNK, CHUNK]
    decayed,  # [N, V, 1 + 2 * HALVES, CHUNK, Dk]: see ``triton._scan``
    is_strong,  # int32[N, V]: 1 if a half of the chunk decays by more than exp(MOST)
    out,  # [T, V, Dv]: zeros for tokens of no row
    num_tokens,  # T; see ``triton._chunks``
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
    PART: tl.constexpr,  # components at a time, so that four CTAs fit in the registers of an SM
    MOST: tl.constexpr,
    STRONG: tl.constexpr,
):
    """The part of ``triton._chunks`` before the inverse, with a decay of each component of keys.

    In a first launch keys and queries have decays to and from the chunk's middle, which may be
    above 1. A second one with ``STRONG`` computes again the chunks whose decays may have
    overflowed: see ``_across``.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, _, row_end, first = row_of_tile(  # type: ignore[misc]
        chunk, query_start_loc, num_tokens, num_starts, STARTS_TILE, CHUNK
    )
    if first >= row_end:
        return
    at = tl.arange(0, CHUNK)
    inside = at < row_end - first
    of_gate = first.to(tl.int64) * HEADS + head  # offsets exceed int32, but not within a chunk
    if row + 1 == num_starts:
        at_out = out + of_gate * VALUE_DIM
        at_out += at[:, None] * (HEADS * VALUE_DIM) + tl.arange(0, VALUE_DIM)[None, :]
        zeros = tl.zeros((CHUNK, VALUE_DIM), out.dtype.element_ty)
        tl.store(at_out, zeros, mask=inside[:, None])
        return
    at_chunk = (chunk * HEADS + head).to(tl.int64)
    if STRONG and tl.load(is_strong + at_chunk) == 0:
        return
    dtype: tl.constexpr = k.dtype.element_ty
    inner: tl.constexpr = dtype if dtype == tl.float32 else tl.float16
    of_key = (first.to(tl.int64) * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    PLANE: tl.constexpr = CHUNK * KEY_DIM
    within = tl.zeros((CHUNK, CHUNK), tl.float32)
    lower = tl.zeros((CHUNK, CHUNK), tl.float32)
    strongest = tl.zeros((CHUNK, PART), tl.float32)  # the same in all rows
    for part in range(KEY_DIM // PART):
        columns = part * PART + tl.arange(0, PART)
        at_decay = of_gate * KEY_DIM + at[:, None] * (HEADS * KEY_DIM) + columns[None, :]
        decay = tl.load(log_decay + at_decay, mask=inside[:, None], other=0.0)
        at_key = of_key + at[:, None] * (KEY_HEADS * KEY_DIM) + columns[None, :]
        keys = tl.load(k + at_key, mask=inside[:, None], other=0.0).to(tl.float32)
        queries = tl.load(q + at_key, mask=inside[:, None], other=0.0).to(tl.float32)
        decay = tl.cumsum(decay, 0)
        # sums over rows would be several times as many instructions
        middle = _rows(decay, at * 0 + CHUNK // 2 - 1)  # type: ignore[misc]
        total = _rows(decay, at * 0 + CHUNK - 1)  # type: ignore[misc]
        at_sums = sums + at_chunk * KEY_DIM + columns[None, :] + at[:, None] * 0
        tl.store(at_sums, decay, mask=at[:, None] == CHUNK - 1)
        strongest = tl.minimum(strongest, tl.minimum(middle, total - middle))
        if STRONG:
            own = tl.sum(queries * keys, 1)
            within += tl.where(at[:, None] == at[None, :], own[:, None], 0.0)
            size = 1
            while size < CHUNK:
                within, lower = _across(  # type: ignore[misc]
                    queries, keys, decay, within, lower, size, inner, CHUNK, PART
                )
                size *= 2
        else:
            since = tl.exp(decay - middle)
            earlier = tl.trans(_rounded(keys * tl.exp(middle - decay), dtype))  # type: ignore[misc]
            later = _rounded(queries * since, dtype)  # type: ignore[misc]
            within = _product(later, earlier, within, dtype)  # type: ignore[misc]
            later = _rounded(keys * since, dtype)  # type: ignore[misc]
            lower = _product(later, earlier, lower, dtype)  # type: ignore[misc]
        since = tl.exp(decay)
        until = tl.exp(total - decay)
        at_plane = decayed + at_chunk * ((1 + 2 * HALVES) * PLANE)
        at_plane += at[:, None] * KEY_DIM + columns[None, :]
        tl.store(at_plane, (queries * since).to(dtype))
        high, low = halves(keys * since, dtype)  # type: ignore[misc]
        tl.store(at_plane + PLANE, high)
        if HALVES == 2:
            tl.store(at_plane + 3 * PLANE, low)
        high, low = halves(keys * until, dtype)  # type: ignore[misc]
        tl.store(at_plane + 2 * PLANE, high)
        if HALVES == 2:
            tl.store(at_plane + 4 * PLANE, low)
    if not STRONG:
        tl.store(is_strong + at_chunk, (tl.min(strongest) < -MOST).to(tl.int32))
    # what has overflowed above the diagonal is not read
    within = tl.where(at[:, None] >= at[None, :], within, 0.0)
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    lower = tl.where(at[:, None] > at[None, :], lower * strength[:, None], 0.0)
    at_square = at_chunk * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    tl.store(scores + at_square, within.to(dtype))
    tl.store(lowers + at_square, lower)


@triton.jit
def channel_inverses(
    beta,  # float32[T, V]
    query_start_loc,  # int32[R + 1]
    v,  # [T, V, Dv]
    lowers,  # float32[N, V, CHUNK, CHUNK]
    decayed,  # [N, V, 1 + 2 * HALVES, CHUNK, Dk]: keys are replaced, see ``triton._scan``
    changes,  # float32[N, V, CHUNK, Dv]: of a state of zeros
    num_tokens,  # T; see ``triton._chunks``
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """The inverses of chunks, and their products with keys and with values."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, _, row_end, first = row_of_tile(  # type: ignore[misc]
        chunk, query_start_loc, num_tokens, num_starts, STARTS_TILE, CHUNK
    )
    if first >= row_end or row + 1 == num_starts:
        return
    dtype: tl.constexpr = v.dtype.element_ty
    inner: tl.constexpr = dtype if dtype == tl.float32 else tl.float16
    at = tl.arange(0, CHUNK)
    at_chunk = (chunk * HEADS + head).to(tl.int64)
    at_square = at_chunk * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    # a product with 1 puts it in the registers as products are, in which the elimination of
    # ``unit_inverse`` takes a fifth of the instructions
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    lower = tl.dot(one, tl.load(lowers + at_square), input_precision="tf32x3")
    inverse = unit_inverse(lower, inner, CHUNK)
    inside = at < row_end - first
    of_gate = first.to(tl.int64) * HEADS + head  # offsets exceed int32, but not within a chunk
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    inverse_high, inverse_low = halves(inverse * strength[None, :], dtype)  # type: ignore[misc]
    PLANE: tl.constexpr = CHUNK * KEY_DIM
    at_keys = decayed + at_chunk * ((1 + 2 * HALVES) * PLANE) + PLANE
    at_keys += at[:, None] * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
    keys = tl.load(at_keys)
    removed = tl.dot(inverse_high, keys, input_precision="tf32x3")
    if HALVES == 2:
        removed = tl.dot(inverse_low, keys, removed)
        removed = tl.dot(inverse_high, tl.load(at_keys + 2 * PLANE), removed)
    high, low = halves(removed, dtype)  # type: ignore[misc]
    tl.debug_barrier()  # all of the keys have been read
    tl.store(at_keys, high)
    if HALVES == 2:
        tl.store(at_keys + 2 * PLANE, low)
    values = tl.arange(0, VALUE_DIM)
    at_value = of_gate * VALUE_DIM + at[:, None] * (HEADS * VALUE_DIM) + values[None, :]
    value = tl.load(v + at_value, mask=inside[:, None], other=0.0)
    change = tl.dot(inverse_high, value, input_precision="tf32x3")
    if HALVES == 2:
        change = tl.dot(inverse_low, value, change)
    at_change = at_chunk * (CHUNK * VALUE_DIM) + at[:, None] * VALUE_DIM + values[None, :]
    tl.store(changes + at_change, change)
