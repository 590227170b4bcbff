"""A row's threshold from a list of candidates, and its token if the list is complete, in Triton.

Owns: the search of such a list, or of the whole row if the list overflowed, with one CTA per row.
Probabilities are added as integers, so the sum does not depend on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.few import BOUNDS, NOISE_REACH
from pallas_kernels.sample.levels import key_of, narrowed, pivots_in, scaled_at, span, value_of
from pallas_kernels.sample.noise import noise_of, row_key, take_better

WEIGHT_ONE = tl.constexpr(
    float(1 << 42)
)  # integer of probability 1; a sum of 2**20 does not overflow
BRACKET = tl.constexpr(
    4
)  # values per row: low, high, mass at and above high, mass that top_p needs


@triton.jit
def _weights(distance):
    """Probabilities relative to the most likely token, from logit differences, as integers: their
    sum does not depend on the order, and 2**-43 is below the resolution of a float32 sum."""
    return (tl.exp(distance) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _search(
    source,  # float32: logits, in pieces
    offset,  # int32[1, STEP]: start of each thread in the source
    remaining,  # int32[1, STEP]: logits of the piece from mask on
    max_length,  # of the pieces
    temperature,
    row_max,  # the largest scaled logit of the row
    needed,  # int64
    low,  # a key with enough weight at and above it
    high,  # a key with too little weight
    slots,
    WEIGHTED: tl.constexpr,  # False: weights are 1
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest key with sum(weights[scaled >= key]) >= needed."""
    while span(low, high) > 1:
        pivots = pivots_in(low, high, PIVOTS)
        values = value_of(pivots)[:, None]
        found = tl.zeros((PIVOTS, STEP), tl.int64)
        for start in range(0, max_length, slots):
            scaled = scaled_at(source, offset + start, start < remaining, temperature)
            weights = tl.full((1, STEP), 1, tl.int64)
            if WEIGHTED:
                weights = _weights(scaled - row_max)
            found += tl.where(scaled >= values, weights, 0)
        low, high = narrowed(low, high, pivots, tl.sum(found, 1) >= needed)
    return low


@triton.jit
def _kept_mass(
    source,
    offset,  # int32[1, STEP]
    remaining,  # int32[1, STEP]
    max_length,
    temperature,
    row_max,
    threshold,
    slots,
    STEP: tl.constexpr,
):
    """Sum of the weights of logits at and above the threshold."""
    found = tl.zeros((1, STEP), tl.int64)
    for start in range(0, max_length, slots):
        scaled = scaled_at(source, offset + start, start < remaining, temperature)
        found += tl.where(scaled >= threshold, _weights(scaled - row_max), 0)
    return tl.sum(tl.ravel(found), 0)


@triton.jit
def _draw(
    source,  # float32: logits, in pieces
    ids,  # int32: their token ids
    offset,  # int32[1, STEP]: start of each thread in both
    remaining,  # int32[1, STEP]: logits of the piece from mask on
    max_length,  # of the pieces
    temperature,
    threshold,
    key_low,
    key_high,
    slots,
    VOCAB: tl.constexpr,
    STEP: tl.constexpr,
):
    """The token of a list with the largest sum of logit and noise."""
    best = tl.full((1, STEP), float("-inf"), tl.float32)
    token = tl.zeros((1, STEP), tl.int32)
    for start in range(0, max_length, slots):
        mask = start < remaining
        scaled = scaled_at(source, offset + start, mask, temperature)
        index = tl.load(ids + offset + start, mask=mask, other=0)
        u = noise_of(index, key_low, key_high, VOCAB)
        best, token = take_better(best, token, scaled, u, index, threshold)  # type: ignore[misc]
    largest = tl.max(tl.ravel(best), 0)
    return tl.min(tl.ravel(tl.where(best == largest, token, VOCAB - 1)), 0)


@triton.jit
def find_threshold(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    seed_low,  # int32[B]
    seed_high,  # int32[B]
    positions,  # int32[B]
    chosen,  # int32[B]
    bounds,  # float32[B, BOUNDS]
    brackets,  # float32[B, BRACKET]
    candidates,  # float32[B, segments, capacity]
    candidate_ids,  # int32[B, segments, capacity]
    counts,  # int32[B, segments]
    thresholds,  # float32[B]: scaled logits below it cannot be drawn
    tokens,  # int32[B]: the row's token; -1: to be drawn from the whole row
    segments,
    capacity,
    slots,  # logits of each piece that are read at once; a power of two
    VOCAB: tl.constexpr,
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(chosen + row)
    if token >= 0:
        tl.store(tokens + row, token)
        return
    temp = tl.load(temperature + row)
    k, p, p_min = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    uses_top_k = (k > 0) & (k < VOCAB)
    brackets += row * BRACKET
    row_max = tl.load(bounds + row * BOUNDS)
    low = key_of(tl.load(brackets))
    high = tl.minimum(key_of(tl.load(brackets + 1)), key_of(row_max) + 1)

    piece = tl.arange(0, STEP)[None, :] // slots
    slot = tl.arange(0, STEP)[None, :] % slots
    length = tl.load(counts + row * segments + piece, mask=piece < segments, other=0)
    max_length = tl.max(tl.ravel(length), 0)
    source = candidates + row * (segments * capacity)
    stride = capacity
    above = tl.load(brackets + 2)
    is_complete = (tl.load(brackets) < float("inf")) & (tl.load(brackets + 1) == float("inf"))
    is_complete &= max_length <= capacity
    if max_length > capacity:  # overflow: search the whole row instead of the list
        source = logits + row * VOCAB
        stride = tl.cdiv(VOCAB, STEP // slots)
        max_length = stride
        length = tl.minimum(VOCAB - piece * stride, stride)
        above = 0.0
    offset = piece * stride + slot
    remaining = length - slot

    threshold = row_max + tl.log(p_min)  # -inf with a min_p of 0
    if uses_top_k:
        low = _search(
            source, offset, remaining, max_length, temp, row_max, k.to(tl.int64), low, high, slots,
            False, STEP, PIVOTS,
        )  # fmt: skip
        threshold = tl.maximum(value_of(low), threshold)
    if p < 1:
        needed = ((tl.load(brackets + 3) - above) * WEIGHT_ONE).to(tl.int64)
        if uses_top_k | (p_min > 0):
            kept = _kept_mass(
                source, offset, remaining, max_length, temp, row_max, threshold, slots, STEP
            )
            needed = (kept.to(tl.float64) * p).to(tl.int64)
            low = key_of(threshold)
        low = _search(
            source, offset, remaining, max_length, temp, row_max, needed, low, high, slots,
            True, STEP, PIVOTS,
        )  # fmt: skip
        threshold = value_of(low)
    threshold = tl.maximum(threshold, row_max - NOISE_REACH)
    tl.store(thresholds + row, threshold)
    if is_complete:
        key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
        token = _draw(
            source, candidate_ids + row * (segments * capacity), offset, remaining, max_length,
            temp, threshold, key_low, key_high, slots, VOCAB, STEP,
        )  # fmt: skip
    tl.store(tokens + row, token)
