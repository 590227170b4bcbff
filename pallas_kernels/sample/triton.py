"""sample in Triton: two launches, no sort, no decision on the host.

The first kernel reads every logit once and keeps of each block its largest (and, for top_p, the
sum of its probabilities). From these alone the second, one program a row, finds a level that the
row's threshold cannot be below, lists the blocks that reach it, and searches the threshold and
draws the token in these. A block is so small that a list is little longer than the tokens it is
for; where most of the vocabulary stays, it holds every block and the same code is slower.
Must not know: which calls come here, how they are cut up (``launch``).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.sample import launch
from pallas_kernels.tiles import power_of_two

LOWEST_KEY = tl.constexpr(-(0x7F800000 + 1))  # of -inf
# Noise lies in -log(log(2**24)) .. -log(-log(1 - 2**-24)), -2.82 .. 16.64: no token that
# much less likely than the most likely one can be drawn.
NOISE_REACH = tl.constexpr(19.5)


@triton.jit
def _scaled(logits, index, mask, temperature):
    """Logits over the temperature, rounded as a division is: thresholds compare these."""
    return tl.div_rn(tl.load(logits + index, mask=mask, other=float("-inf")), temperature)


@triton.jit
def _key(value):
    """An int32 that compares as the float32 does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """Keys that cut [low, high) evenly; one at least is above low."""
    return low + (high - low) * (1 + tl.arange(0, PIVOTS)) // (PIVOTS + 1)


@triton.jit
def _narrowed(low, high, pivots, enough):
    """[low, high) after it is known which pivots have enough at and above them."""
    new_low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    return new_low, tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))


@triton.jit
def _search_tops(
    tops,  # float32[BLOCKS_TILE]
    weights,  # float32[BLOCKS_TILE]
    mass,
    high,  # a key above all tops
    PIVOTS: tl.constexpr,
):
    """The largest key with sum(weights[tops >= key]) >= mass, that of -inf if there is none."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    while high - low > 1:
        pivots = _pivots(low, high, PIVOTS)
        reached = tops[None, :] >= _value(pivots)[:, None]
        masses = tl.sum(tl.where(reached, weights[None, :], 0.0), 1)
        low, high = _narrowed(low, high, pivots, masses >= mass)
    return low


@triton.jit
def _listed(
    logits,  # float32[V] of the row
    blocks,  # int32[NUM_BLOCKS] of the row
    start,
    num_listed,
    temperature,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Token ids and scaled logits of the listed blocks from ``start``, [1, STEP, BLOCK]: as wide as
    they are compared with pivots, so that they need not change threads for it."""
    place = start + tl.arange(0, STEP)[None, :, None]
    block = tl.load(blocks + place, mask=place < num_listed, other=0)
    index = block * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    mask = (place < num_listed) & (index < VOCAB)
    return index, _scaled(logits, index, mask, temperature)


@triton.jit
def _search_listed(
    logits,
    blocks,
    num_listed,
    temperature,
    top,  # the largest scaled logit
    mass,
    low,  # a key with enough at and above it; no block outside the list reaches it
    WEIGHTED: tl.constexpr,  # False: tokens are counted
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest key with sum(weights[scaled >= key]) >= mass."""
    high = _key(top).to(tl.int64) + 1
    while high - low > 1:
        pivots = _pivots(low, high, PIVOTS)
        values = _value(pivots)[:, None, None]
        masses = tl.zeros((PIVOTS, STEP, BLOCK), tl.float32)
        for start in range(0, num_listed, STEP):
            _, scaled = _listed(logits, blocks, start, num_listed, temperature, VOCAB, BLOCK, STEP)
            weights = tl.full((1, STEP, BLOCK), 1.0, tl.float32)
            if WEIGHTED:
                weights = tl.exp(scaled - top)
            masses += tl.where(scaled >= values, weights, 0.0)
        enough = tl.sum(tl.sum(masses, 2), 1) >= mass
        low, high = _narrowed(low, high, pivots, enough)
    return low


@triton.jit
def _kept_mass(
    logits,
    blocks,
    num_listed,
    temperature,
    top,
    threshold,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sum of exp(scaled - top) of what is not below the threshold."""
    masses = tl.zeros((1, STEP, BLOCK), tl.float32)
    for start in range(0, num_listed, STEP):
        _, scaled = _listed(logits, blocks, start, num_listed, temperature, VOCAB, BLOCK, STEP)
        masses += tl.where(scaled >= threshold, tl.exp(scaled - top), 0.0)
    return tl.sum(tl.ravel(masses), 0)


@triton.jit
def _rounds(x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Four rounds of Threefry-2x32."""
    x = x + y
    y = (y << A | y >> (32 - A)) ^ x
    x = x + y
    y = (y << B | y >> (32 - B)) ^ x
    x = x + y
    y = (y << C | y >> (32 - C)) ^ x
    x = x + y
    y = (y << D | y >> (32 - D)) ^ x
    return x, y


@triton.jit
def _threefry(low, high, counter):
    """Both words of Threefry-2x32 with 20 rounds for the counter pairs (counter, 0)."""
    third = low ^ high ^ 0x1BD11BDA
    second = high + tl.zeros_like(counter)
    x, y = _rounds(counter + low, second, 13, 15, 26, 6)  # type: ignore[misc]
    x, y = _rounds(x + high, y + third + 1, 17, 29, 16, 24)
    x, y = _rounds(x + third, y + low + 2, 13, 15, 26, 6)
    x, y = _rounds(x + low, y + high + 3, 17, 29, 16, 24)
    x, y = _rounds(x + high, y + third + 4, 13, 15, 26, 6)
    return x + third, y + low + 5


@triton.jit
def _noise(key_low, key_high, index, VOCAB: tl.constexpr):
    """Standard Gumbel noise of token ids. ``tl.log`` is exact to its last bit, also near 1."""
    HALF: tl.constexpr = (VOCAB + 1) // 2
    second = index >= HALF
    counter = tl.where(second, index - HALF, index).to(tl.uint32)
    x, y = _threefry(key_low, key_high, counter)  # type: ignore[misc]
    steps = (tl.where(second, y, x) >> 9).to(tl.float32)
    uniform = (steps + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _draw_listed(
    logits,
    blocks,
    num_listed,
    temperature,
    threshold,
    key_low,  # uint32: the row's key
    key_high,  # uint32
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The first of the largest sums of scaled logit and noise; 0 where nothing is listed."""
    best = tl.full((1, STEP, BLOCK), float("-inf"), tl.float32)
    token = tl.zeros((1, STEP, BLOCK), tl.int32)
    for start in range(0, num_listed, STEP):
        index, scaled = _listed(logits, blocks, start, num_listed, temperature, VOCAB, BLOCK, STEP)
        noisy = scaled + _noise(key_low, key_high, index, VOCAB)
        better = (scaled >= threshold) & (noisy > best)  # ids rise, so the first of equals stays
        best = tl.where(better, noisy, best)
        token = tl.where(better, index, token)
    largest = tl.max(tl.ravel(best), 0)
    first = tl.where(best == largest, token, VOCAB - 1)
    return tl.min(tl.ravel(first), 0)


@triton.jit
def _sum_blocks(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_p,  # float32[B]
    tops,  # float32[B, NUM_BLOCKS]: the largest logit of each block
    sums,  # float32[B, NUM_BLOCKS]: of exp(scaled - the block's largest), of rows with top_p
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of one program
):
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    index = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * VOCAB + index, mask=index < VOCAB, other=float("-inf"))
    top = tl.max(values, 1)
    tl.store(tops + row * NUM_BLOCKS + number, top, mask=number < NUM_BLOCKS)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(top_p + row) < 1):
        base = tl.where(top == float("-inf"), 0.0, tl.div_rn(top, heat))
        weights = tl.exp(tl.div_rn(values, heat) - base[:, None])
        tl.store(sums + row * NUM_BLOCKS + number, tl.sum(weights, 1), number < NUM_BLOCKS)


@triton.jit
def _choose(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    seed_low,  # int32[B]
    seed_high,  # int32[B]
    positions,  # int32[B]
    tops,  # float32[B, NUM_BLOCKS]
    sums,  # float32[B, NUM_BLOCKS]
    token_ids,  # int32[B]
    blocks,  # int32[B, NUM_BLOCKS]: room for the list
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    blocks += row * NUM_BLOCKS
    number = tl.arange(0, BLOCKS_TILE)
    is_block = number < NUM_BLOCKS
    top_of = tl.load(tops + row * NUM_BLOCKS + number, mask=is_block, other=float("-inf"))
    largest = tl.max(top_of, 0)
    heat = tl.load(temperature + row)
    token = 0
    if heat > 0:
        top = tl.div_rn(largest, heat)
        top_of = tl.div_rn(top_of, heat)
        high = _key(top).to(tl.int64) + 1
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        floor = top + tl.log(tl.load(min_p + row))  # -inf with a min_p of 0
        cuts_k = (k > 0) & (k < VOCAB)
        cuts_min = floor > float("-inf")
        mass = 0.0

        # a level that what is kept, and what a mass is summed over, does not fall below
        low = tl.full((), LOWEST_KEY, tl.int64)
        if cuts_k:
            if k <= NUM_BLOCKS:  # k blocks reach it, so k tokens do
                ones = tl.full((BLOCKS_TILE,), 1.0, tl.float32)
                low = _search_tops(top_of, ones, k.to(tl.float32), high, PIVOTS)
        elif cuts_min:
            low = _key(floor).to(tl.int64)
        elif p < 1:
            at = tl.load(sums + row * NUM_BLOCKS + number, mask=is_block, other=0.0)
            peaks = tl.exp(top_of - top)
            whole = tl.sum(at * peaks, 0)
            mass = p * whole
            # All that is less likely than this holds less than 1 - p; the margin is for rounding.
            rare = top + tl.log((1.0 - p) * whole / VOCAB) - 0.01
            low = _search_tops(top_of, peaks, mass, high, PIVOTS)  # the blocks' largest hold mass
            low = tl.maximum(low, _key(rare).to(tl.int64))
        else:
            low = _key(top - NOISE_REACH).to(tl.int64)

        hit = (top_of >= _value(low)) & is_block
        tl.store(blocks + tl.cumsum(hit.to(tl.int32), 0) - 1, number, mask=hit)
        num_listed = tl.sum(hit.to(tl.int32), 0)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        threshold = floor
        if cuts_k:
            low = _search_listed(
                logits, blocks, num_listed, heat, top, k.to(tl.float32), low, False,
                VOCAB, BLOCK, STEP, PIVOTS,
            )  # fmt: skip
            threshold = tl.maximum(_value(low), floor)
        if p < 1:
            if cuts_k | cuts_min:
                mass = p * _kept_mass(
                    logits, blocks, num_listed, heat, top, threshold, VOCAB, BLOCK, STEP
                )
                low = _key(threshold).to(tl.int64)
            low = _search_listed(
                logits, blocks, num_listed, heat, top, mass, low, True,
                VOCAB, BLOCK, STEP, PIVOTS,
            )  # fmt: skip
            threshold = _value(low)

        word_low = tl.load(seed_low + row).to(tl.uint32, bitcast=True)
        word_high = tl.load(seed_high + row).to(tl.uint32, bitcast=True)
        position = tl.load(positions + row).to(tl.uint32, bitcast=True)
        key_low, key_high = _threefry(word_low, word_high, position)
        token = _draw_listed(
            logits, blocks, num_listed, heat, threshold, key_low, key_high, VOCAB, BLOCK, STEP
        )
    else:
        best = tl.min(tl.where((top_of == largest) & is_block, number, NUM_BLOCKS - 1), 0)
        index = best * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
        first = tl.where((values == largest) & (index < VOCAB), index, VOCAB - 1)
        token = tl.min(first, 0)
    tl.store(token_ids + row, token)


def sample(
    logits: jax.Array,  # float32[B, V]
    temperature: jax.Array,  # float32[B]
    top_k: jax.Array,  # int32[B]
    top_p: jax.Array,  # float32[B]
    min_p: jax.Array,  # float32[B]
    seed_low: jax.Array,  # int32[B]
    seed_high: jax.Array,  # int32[B]
    positions: jax.Array,  # int32[B]
) -> jax.Array:  # int32[B]
    """See ``sample.api``."""
    rows, vocab = logits.shape
    num_blocks = math.ceil(vocab / launch.BLOCK)
    a_block = jax.ShapeDtypeStruct((rows, num_blocks), jnp.float32)
    sizes: dict[str, Any] = {"VOCAB": vocab, "NUM_BLOCKS": num_blocks, "BLOCK": launch.BLOCK}
    blocks = launch.blocks_per_program(rows, num_blocks)
    step, num_warps = launch.listed_blocks(rows)
    tops, sums = jt.triton_call(
        logits,
        temperature,
        top_p,
        kernel=_sum_blocks,
        out_type=(a_block, a_block),
        grid=(math.ceil(num_blocks / blocks), rows),
        num_warps=max(1, blocks // 8),
        num_stages=1,
        BLOCKS=blocks,
        **sizes,
    )
    listed = jax.ShapeDtypeStruct((rows, num_blocks), jnp.int32)
    token_ids, _ = jt.triton_call(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed_low,
        seed_high,
        positions,
        tops,
        sums,
        kernel=_choose,
        out_type=(jax.ShapeDtypeStruct((rows,), jnp.int32), listed),
        grid=(rows,),
        num_warps=num_warps,
        num_stages=1,
        BLOCKS_TILE=power_of_two(num_blocks),
        STEP=step,
        PIVOTS=launch.PIVOTS,
        **sizes,
    )
    return token_ids
