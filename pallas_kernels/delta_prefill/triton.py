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

If each component of keys decays by itself, products with the state have no factor of a whole
token, and the first kernel stores queries and keys times their decays, and with the inverse already
multiplied what is subtracted from the changes: the paper's form, of two GEMMs after each other.
Products of keys have the decays to and from the chunk's middle, in TF32, if that cannot overflow.
Else they are made of six: between the halves of each block of 2, 4, ... 64 tokens, with the decays
to and from the border, which are at most 1, in float16.

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
from pallas_kernels.delta_prefill.ref import CHUNK, DeltaPrefillArgs
from pallas_kernels.lib.numerics import power_of_two


@triton.jit
def _row_of_chunk(
    chunk,
    query_start_loc,  # int32[R + 1]
    num_tokens,  # T
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,  # at least R + 1
    CHUNK: tl.constexpr,
):
    """The row of a chunk and its end, and the chunk's first token. The padding is one more row."""
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    owned = (starts // CHUNK + rows <= chunk) & (rows < num_starts)
    row = tl.sum(owned.to(tl.int32), 0) - 1
    row_start = tl.load(query_start_loc + row)
    row_end = tl.load(query_start_loc + row + 1, mask=row + 1 < num_starts, other=num_tokens)
    return row, row_end, row_start + (chunk - row_start // CHUNK - row) * CHUNK


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """float32 as a number of another dtype, and the rest in that dtype; 0 if it is float32."""
    if dtype == tl.bfloat16:  # by bits: a conversion there and back takes 8 cycles
        bits = (x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
        high = bits.to(tl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(tl.float32)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def _split(x, dtype: tl.constexpr):
    """float32[K, N] as an operand [K, 2N]: each column's halves. float32 is not split."""
    if dtype != tl.float32:
        high, low = _halves(x, dtype)  # type: ignore[misc]
        x = tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))
    return x


@triton.jit
def _joined(product, dtype: tl.constexpr):
    """A product with a split operand: the sum of each column's halves."""
    if dtype != tl.float32:
        halves = tl.reshape(product, (product.shape[0], product.shape[1] // 2, 2))
        product = tl.sum(halves, 2)
    return product


@triton.jit
def _times(a_high, a_low, b, dtype: tl.constexpr):
    """a @ b of float32 operands, the first one in halves."""
    b = _split(b, dtype)
    product = tl.dot(a_high, b, input_precision="tf32x3")
    if dtype != tl.float32:
        product = tl.dot(a_low, b, product)
    return _joined(product, dtype)


@triton.jit
def _corners(lower, dtype: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """The lower left quarters of blocks of 2 * SIZE on the diagonal, and zeros."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    inside = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    return tl.where(inside, lower, 0.0).to(dtype)


@triton.jit
def _merged(inverse, corners):
    """Inverses of blocks of twice the size, from those on the diagonal."""
    rounded = inverse.to(corners.dtype)
    below = tl.dot(rounded, corners, input_precision="tf32x3").to(corners.dtype)
    return inverse - tl.dot(below, rounded, input_precision="tf32x3")


@triton.jit
def _unit_inverse(lower, inner: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of 1 + ``lower`` [CHUNK, CHUNK], which is strictly lower triangular.

    Blocks on the diagonal by elimination, all at once; from these, larger ones as in
    ``delta_prefill.xla.unit_inverse``, but rounded to ``inner``: float16, which products of keys of
    length 1 do not overflow. With X the rounded result and E = 1 - X (1 + ``lower``), the inverse
    is (1 + E + E^2 + ...) X; E was below 0.01 for all keys that were tried. Right operands of GEMMs
    are in shared memory: those that depend on ``lower`` come first, so that it is not in registers
    later, and an SM has four CTAs, not two.
    """
    BLOCK: tl.constexpr = CHUNK // 8
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    high, low = _halves(lower, inner)  # type: ignore[misc]
    corners = _corners(lower, inner, CHUNK, BLOCK)
    corners2 = _corners(lower, inner, CHUNK, 2 * BLOCK)
    corners4 = _corners(lower, inner, CHUNK, 4 * BLOCK)
    blocks = tl.arange(0, BLOCKS)
    at = tl.arange(0, BLOCK)
    diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    tiles = tl.where(diagonal, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0)
    tiles = tl.sum(tiles, 2)  # [BLOCKS, BLOCK, BLOCK]
    inverses = tl.where((at[:, None] == at[None, :])[None], 1.0, tl.zeros_like(tiles))
    for step in range(BLOCK - 1):
        column = tl.sum(tl.where((at == step)[None, None, :], tiles, 0.0), 2)
        row = tl.sum(tl.where((at == step)[None, :, None], inverses, 0.0), 1)
        inverses -= column[:, :, None] * row[:, None, :]
    inverse = tl.where(diagonal, inverses[:, :, None, :], 0.0)
    inverse = tl.reshape(inverse, (CHUNK, CHUNK))
    inverse = _merged(_merged(_merged(inverse, corners), corners2), corners4)
    if inner != tl.float32:
        rounded = inverse.to(inner)
        one = tl.where(tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :], 1.0, 0.0)
        error = one - tl.dot(rounded, high, tl.dot(rounded, low, rounded.to(tl.float32)))
        first = error.to(inner)
        error = tl.dot(first, first, error).to(inner)
        inverse = tl.dot(error, rounded, rounded.to(tl.float32))
    return inverse


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
    row, row_end, first = _row_of_chunk(  # type: ignore[misc]
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
    inverse = _unit_inverse(lower, inner, CHUNK)
    # again, since it would be in 16 registers of each thread from the first use on
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    inverse *= strength[None, :]
    high, low = _halves(inverse, dtype)  # type: ignore[misc]
    at_inverse = inverses + at_chunk * (HALVES * CHUNK * CHUNK) + at_square
    tl.store(at_inverse, high)
    if HALVES == 2:
        tl.store(at_inverse + CHUNK * CHUNK, low)


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
def _channel_products(
    q,  # [T, K, Dk]
    k,  # [T, K, Dk]
    log_decay,  # float32[T, V, Dk]
    beta,  # float32[T, V]
    query_start_loc,  # int32[R + 1]
    sums,  # float32[N, V, Dk]: of whole chunks
    lowers,  # float32[N, V, CHUNK, CHUNK]: products of keys, strictly lower triangular, times beta
    scores,  # [N, V, CHUNK, CHUNK]
    decayed,  # [N, V, 1 + 2 * HALVES, CHUNK, Dk]: see ``_scan``
    is_strong,  # int32[N, V]: 1 if a half of the chunk decays by more than exp(MOST)
    out,  # [T, V, Dv]: zeros for tokens of no row
    num_tokens,  # T; see ``_chunks``
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
    """The part of ``_chunks`` before the inverse, with a decay of each component of keys.

    In a first launch keys and queries have decays to and from the chunk's middle, which may be
    above 1. A second one with ``STRONG`` computes again the chunks whose decays may have
    overflowed: see ``_across``.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, row_end, first = _row_of_chunk(  # type: ignore[misc]
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
        high, low = _halves(keys * since, dtype)  # type: ignore[misc]
        tl.store(at_plane + PLANE, high)
        if HALVES == 2:
            tl.store(at_plane + 3 * PLANE, low)
        high, low = _halves(keys * until, dtype)  # type: ignore[misc]
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
def _channel_inverses(
    beta,  # float32[T, V]
    query_start_loc,  # int32[R + 1]
    v,  # [T, V, Dv]
    lowers,  # float32[N, V, CHUNK, CHUNK]
    decayed,  # [N, V, 1 + 2 * HALVES, CHUNK, Dk]: keys are replaced, see ``_scan``
    changes,  # float32[N, V, CHUNK, Dv]: of a state of zeros
    num_tokens,  # T; see ``_chunks``
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
    row, row_end, first = _row_of_chunk(  # type: ignore[misc]
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
    # ``_unit_inverse`` takes a fifth of the instructions
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    lower = tl.dot(one, tl.load(lowers + at_square), input_precision="tf32x3")
    inverse = _unit_inverse(lower, inner, CHUNK)
    inside = at < row_end - first
    of_gate = first.to(tl.int64) * HEADS + head  # offsets exceed int32, but not within a chunk
    strength = tl.load(beta + of_gate + at * HEADS, mask=inside, other=0.0)
    inverse_high, inverse_low = _halves(inverse * strength[None, :], dtype)  # type: ignore[misc]
    PLANE: tl.constexpr = CHUNK * KEY_DIM
    at_keys = decayed + at_chunk * ((1 + 2 * HALVES) * PLANE) + PLANE
    at_keys += at[:, None] * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
    keys = tl.load(at_keys)
    removed = tl.dot(inverse_high, keys, input_precision="tf32x3")
    if HALVES == 2:
        removed = tl.dot(inverse_low, keys, removed)
        removed = tl.dot(inverse_high, tl.load(at_keys + 2 * PLANE), removed)
    high, low = _halves(removed, dtype)  # type: ignore[misc]
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


@triton.jit
def _scan(
    q,  # [T, K, Dk]
    k,  # [T, K, Dk]
    v,  # [T, V, Dv]
    sums,  # float32[N, V, CHUNK]; by channel float32[N, V, Dk], of whole chunks
    inverses,  # [N, V, HALVES, CHUNK, CHUNK]; by channel see ``_channel_inverses.changes``
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

        before = _split(state, dtype)
        of_queries = _joined(tl.dot(queries, before, input_precision="tf32x3"), dtype)
        if BY_CHANNEL:
            of_keys = tl.dot(removed, before, input_precision="tf32x3")
            if HALVES == 2:
                of_keys = tl.dot(removed_low, before, of_keys)
            changes -= _joined(of_keys, dtype)
        else:
            since = tl.exp(decay)
            of_keys = _joined(tl.dot(keys, before, input_precision="tf32x3"), dtype)
            changes = _times(high, low, value.to(tl.float32) - since * of_keys, dtype)
            of_queries *= since
        result = tl.dot(within, changes.to(dtype), of_queries, input_precision="tf32x3")
        tl.store(out + at_value, result.to(out.dtype.element_ty), mask=inside)
        if BY_CHANNEL:
            added = _times(tl.trans(ends), tl.trans(ends_low), changes, dtype)
        else:
            changes = _split(changes * tl.exp(total - decay), dtype)
            added = _joined(tl.dot(tl.trans(keys), changes, input_precision="tf32x3"), dtype)
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
    products = {"kernel": _channel_products, "MOST": launch.MOST_DECAY, **call}
    products["PART"] = min(keys, launch.PART)
    made = jt.triton_call(*inputs, out_type=arrays, STRONG=False, **products)
    refs = [jax.new_ref(array) for array in made]
    jt.triton_call(*inputs, *refs, out_type=(), STRONG=True, **products)
    sums, lowers, scores, decayed, _, out = refs
    changes = jt.triton_call(
        *(args.beta, args.query_start_loc, args.v, lowers, decayed),
        kernel=_channel_inverses,
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
