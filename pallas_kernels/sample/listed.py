"""A row's threshold, and where they are all there is its token, from a list of logits, in Triton.

Owns: the search of such a list, or of the whole row where the list overflowed, by one program a
row. Probabilities are added as integers, whose sum has no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.few import BOUNDS, NOISE_REACH
from pallas_kernels.sample.levels import key_of, narrowed, pivots_in, scaled_at, span, value_of
from pallas_kernels.sample.noise import noise_of, row_key, take_better

WEIGHT_ONE = tl.constexpr(float(1 << 42))  # of a probability as an integer; 2**20 of them fit
BRACKET = tl.constexpr(4)  # of a row: low, high, above (high), mass


@triton.jit
def _weights(distance):
    """Probabilities of tokens that far below the most likely, relative to it, as integers: their
    sum does not depend on the order, and 2**-43 is beyond what a float32 sum tells apart."""
    return (tl.exp(distance) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _search(
    source,  # float32: logits, in pieces
    offset,  # int32[1, STEP]: where in the source a thread begins
    left,  # int32[1, STEP]: logits of the piece from there on
    longest,  # of the pieces
    temperature,
    top,  # the largest scaled logit of the row
    needed,  # int64
    low,  # a key with enough at and above it
    high,  # a key with too little
    slots,
    WEIGHTED: tl.constexpr,  # False: tokens are counted
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest key with sum(weights[scaled >= key]) >= needed."""
    while span(low, high) > 1:
        pivots = pivots_in(low, high, PIVOTS)
        values = value_of(pivots)[:, None]
        found = tl.zeros((PIVOTS, STEP), tl.int64)
        for start in range(0, longest, slots):
            scaled = scaled_at(source, offset + start, start < left, temperature)
            weights = tl.full((1, STEP), 1, tl.int64)
            if WEIGHTED:
                weights = _weights(scaled - top)
            found += tl.where(scaled >= values, weights, 0)
        low, high = narrowed(low, high, pivots, tl.sum(found, 1) >= needed)
    return low


@triton.jit
def _kept_mass(
    source,
    offset,  # int32[1, STEP]
    left,  # int32[1, STEP]
    longest,
    temperature,
    top,
    threshold,
    slots,
    STEP: tl.constexpr,
):
    """Sum of the weights of what is not below the threshold."""
    found = tl.zeros((1, STEP), tl.int64)
    for start in range(0, longest, slots):
        scaled = scaled_at(source, offset + start, start < left, temperature)
        found += tl.where(scaled >= threshold, _weights(scaled - top), 0)
    return tl.sum(tl.ravel(found), 0)


@triton.jit
def _draw(
    source,  # float32: logits, in pieces
    ids,  # int32: whose they are
    offset,  # int32[1, STEP]: where in both a thread begins
    left,  # int32[1, STEP]: logits of the piece from there on
    longest,  # of the pieces
    temperature,
    threshold,
    key_low,
    key_high,
    slots,
    VOCAB: tl.constexpr,
    STEP: tl.constexpr,
):
    """The token with the largest sum of logit and noise of a list."""
    best = tl.full((1, STEP), float("-inf"), tl.float32)
    token = tl.zeros((1, STEP), tl.int32)
    for start in range(0, longest, slots):
        there = start < left
        scaled = scaled_at(source, offset + start, there, temperature)
        index = tl.load(ids + offset + start, mask=there, other=0)
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
    listed,  # float32[B, segments, room]
    listed_ids,  # int32[B, segments, room]
    counts,  # int32[B, segments]
    thresholds,  # float32[B]: no scaled logit below it can be drawn
    settled,  # int32[B]: the row's token; -1: to be drawn from all of the row
    segments,
    room,
    slots,  # of each piece, read at once; a power of two
    VOCAB: tl.constexpr,
    STEP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(chosen + row)
    if token >= 0:
        tl.store(settled + row, token)
        return
    heat = tl.load(temperature + row)
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    cuts_k = (k > 0) & (k < VOCAB)
    brackets += row * BRACKET
    top = tl.load(bounds + row * BOUNDS)
    low = key_of(tl.load(brackets))
    high = tl.minimum(key_of(tl.load(brackets + 1)), key_of(top) + 1)

    piece = tl.arange(0, STEP)[None, :] // slots
    slot = tl.arange(0, STEP)[None, :] % slots
    length = tl.load(counts + row * segments + piece, mask=piece < segments, other=0)
    longest = tl.max(tl.ravel(length), 0)
    source = listed + row * (segments * room)
    stride = room
    above = tl.load(brackets + 2)
    is_all = (tl.load(brackets) < float("inf")) & (tl.load(brackets + 1) == float("inf"))
    is_all &= longest <= room
    if longest > room:  # then the whole row is searched in place of the list
        source = logits + row * VOCAB
        stride = tl.cdiv(VOCAB, STEP // slots)
        longest = stride
        length = tl.minimum(VOCAB - piece * stride, stride)
        above = 0.0
    offset = piece * stride + slot
    left = length - slot

    threshold = top + tl.log(share)  # -inf with a min_p of 0
    if cuts_k:
        low = _search(
            source, offset, left, longest, heat, top, k.to(tl.int64), low, high, slots,
            False, STEP, PIVOTS,
        )  # fmt: skip
        threshold = tl.maximum(value_of(low), threshold)
    if p < 1:
        needed = ((tl.load(brackets + 3) - above) * WEIGHT_ONE).to(tl.int64)
        if cuts_k | (share > 0):
            kept = _kept_mass(source, offset, left, longest, heat, top, threshold, slots, STEP)
            needed = (kept.to(tl.float64) * p).to(tl.int64)
            low = key_of(threshold)
        low = _search(
            source, offset, left, longest, heat, top, needed, low, high, slots,
            True, STEP, PIVOTS,
        )  # fmt: skip
        threshold = value_of(low)
    threshold = tl.maximum(threshold, top - NOISE_REACH)
    tl.store(thresholds + row, threshold)
    if is_all:
        key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
        token = _draw(
            source, listed_ids + row * (segments * room), offset, left, longest, heat, threshold,
            key_low, key_high, slots, VOCAB, STEP,
        )  # fmt: skip
    tl.store(settled + row, token)
