"""sample in Triton: seven launches, no sort, no decision on the host.

1. ``_summarize`` reads every logit once and stores for each block its largest logit and, for top_p,
   the sum of its probabilities. 2 and 6 skip blocks whose largest logit is too small; 3 and 4 read
   the whole row, since most of its blocks are needed.
2. ``few.choose_among_few``, one CTA per row, finds a level from the block summaries and, if few
   logits reach it, the row's token: for every greedy row and nearly every filtered one. The other
   launches are for the remaining rows; CTAs of a row that has its token return at once.
3. ``_weigh_levels``, for rows with only top_p and a wide nucleus, sums the probability at and above
   evenly spaced levels.
4. ``_collect`` finds two levels that bracket the row's threshold (from the sums of 3 or from 2) and
   copies the logits between them, or all above the lower one if they are few enough.
5. ``listed.find_threshold``, one CTA per row, searches these candidates for the threshold and draws
   the row's token if the list is complete.
6. ``_draw`` draws a token from each CTA's part of a row; 7. ``_take`` selects the row's token.

1, 3, 4 and 6 use as many CTAs per row as fill the GPU. Probabilities are added in an order that is
the same in every batch, or as integers, whose sum does not depend on the order: a row's token does
not depend on the number of CTAs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.sample import launch
from pallas_kernels.sample.few import BOUNDS, choose_among_few
from pallas_kernels.sample.levels import inverse, least_of, nucleus_alone, scale, scaled_at
from pallas_kernels.sample.listed import BRACKET, find_threshold
from pallas_kernels.sample.noise import can_exceed, row_key, take_better, threefry, uniform
from pallas_kernels.sample.ref import SampleArgs

FEW_OF_TILE = tl.constexpr(4)  # a smaller part of a tile is deferred until a tile is full


@triton.jit
def _reaching(
    logits,  # float32[V] of the row
    block_max,  # float32[NUM_BLOCKS] of the row
    index,
    inside,  # mask: within the vocabulary
    least,
    BLOCK: tl.constexpr,
):
    """Logits; -inf, without a read, in blocks whose largest logit is below ``least``."""
    best = tl.load(block_max + index // BLOCK, mask=inside, other=float("-inf"))
    return tl.load(logits + index, mask=inside & (best >= least), other=float("-inf"))


@triton.jit
def _summarize(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    block_max,  # float32[B, NUM_BLOCKS]: the largest logit of each block
    block_sums,  # float32[B, NUM_BLOCKS]: sum of exp(scaled - block max), for top_p alone
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of one CTA
):
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    index = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * VOCAB + index, mask=index < VOCAB, other=float("-inf"))
    row_max = tl.max(values, 1)
    tl.store(block_max + row * NUM_BLOCKS + number, row_max, mask=number < NUM_BLOCKS)
    temp = tl.load(temperature + row)
    k, p, p_min = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (temp > 0) & nucleus_alone(k, p, p_min, VOCAB):
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp((values - base[:, None]) * inverse(temp))
        tl.store(block_sums + row * NUM_BLOCKS + number, tl.sum(weights, 1), number < NUM_BLOCKS)


@triton.jit
def _bounds(bounds, row):
    """The largest scaled logit, and a lower and an upper bound of the threshold."""
    bounds += row * BOUNDS
    return tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)


@triton.jit
def _level(low, high, which, LEVELS: tl.constexpr):
    """Levels spaced evenly from low up, below high; the same bits in every launch."""
    return tl.fma((high - low) / LEVELS, which.to(tl.float32), low)


@triton.jit
def _weigh_levels(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    chosen,  # int32[B]
    bounds,  # float32[B, BOUNDS]
    masses,  # float32[B, NUM_TILES, LEVELS]: of a tile's tokens at and above each level
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(chosen + row) >= 0:
        return
    k, p, p_min = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if not nucleus_alone(k, p, p_min, VOCAB):
        return
    temp = tl.load(temperature + row)
    row_max, low, high = _bounds(bounds, row)
    if high == float("inf"):
        return
    for tile in range(tl.program_id(0), NUM_TILES, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)[None, :]
        scaled = scaled_at(logits + row * VOCAB, index, index < VOCAB, temp)
        weights = tl.exp(scaled - row_max)
        for start in tl.static_range(0, LEVELS, PIVOTS):  # few enough for the registers
            some = start + tl.arange(0, PIVOTS)
            reached = tl.where(scaled >= _level(low, high, some, LEVELS)[:, None], weights, 0.0)
            tl.store(masses + (row * NUM_TILES + tile) * LEVELS + some, tl.sum(reached, 1))


@triton.jit
def _bracket(
    bounds,  # float32[BOUNDS] of the row
    masses,  # float32[NUM_TILES, LEVELS] of the row
    k,
    p,
    p_min,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Two levels that bracket the row's threshold, the mass at and above the higher one, and the
    mass that top_p needs; the lower level is inf if no search is needed."""
    row_max, lowest, highest = _bounds(bounds, 0)  # type: ignore[misc]
    low, high = float("inf"), float("inf")
    above, mass = 0.0, 0.0
    if nucleus_alone(k, p, p_min, VOCAB):
        mass = p * tl.load(bounds + 3)
        low = lowest
        if highest < float("inf"):
            which = tl.arange(0, LEVELS)
            level = _level(lowest, highest, which, LEVELS)
            tile = tl.arange(0, TILES_TILE)[:, None]
            at = masses + tile * LEVELS + which[None, :]
            reached = tl.sum(tl.load(at, mask=tile < NUM_TILES, other=0.0), 0)
            enough = (reached >= mass) | (which == 0)
            low = tl.max(tl.where(enough, level, float("-inf")), 0)
            high = tl.min(tl.where(enough, float("inf"), level), 0)
            above = tl.max(tl.where(enough, 0.0, reached), 0)
            # At most as many tokens reach the level as have its mass with the level's weight each.
            # The lists hold a quarter of the row; half is used, since their lengths differ.
            most = tl.min(tl.where(enough, reached, float("inf")), 0) / tl.exp(low - row_max)
            if 8 * most < VOCAB:
                high, above = float("inf"), 0.0
    elif (p < 1) | ((k > 0) & (k < VOCAB)):
        low = lowest
    return low, high, above, mass


@triton.jit
def _append(
    lists,  # int32[CAPACITY, THREADS]
    counts,  # int32[THREADS]
    thread,  # int32[THREADS]
    values,  # float32[THREADS]: logits
    index,  # int32[THREADS]: their token ids
    first,
    end,
    max_count,  # CAPACITY
    VOCAB: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Append logits in [first, end) to the threads' lists; returns the new counts."""
    kept = (values >= first) & (values < end) & (index < VOCAB)
    tl.store(lists + counts * THREADS + thread, index, mask=kept & (counts < max_count))
    return counts + kept.to(tl.int32)


@triton.jit
def _join(
    logits,  # float32[V] of the row
    lists,  # int32[CAPACITY, THREADS]: token ids listed by each thread
    counts,  # int32[THREADS]: lengths of the lists
    max_length,  # of the lists
    candidates,  # float32[CAPACITY * THREADS]
    candidate_ids,  # int32[CAPACITY * THREADS]
    THREADS: tl.constexpr,
    JOIN_STEP: tl.constexpr,
):
    """Concatenate the threads' lists, with their logits."""
    start = tl.cumsum(counts, 0) - counts
    for first in range(0, max_length, JOIN_STEP):
        which = first + tl.arange(0, JOIN_STEP)[:, None]
        mask = which < counts[None, :]
        index = tl.load(
            lists + which * THREADS + tl.arange(0, THREADS)[None, :], mask=mask, other=0
        )
        values = tl.load(logits + index, mask=mask)
        tl.store(candidates + start[None, :] + which, values, mask=mask)
        tl.store(candidate_ids + start[None, :] + which, index, mask=mask)


@triton.jit
def _collect(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    chosen,  # int32[B]
    bounds,  # float32[B, BOUNDS]
    masses,  # float32[B, NUM_TILES, LEVELS]
    brackets,  # float32[B, BRACKET]
    candidates,  # float32[B, CTAS, capacity]: logits between the row's levels, or above the lower
    candidate_ids,  # int32[B, CTAS, capacity]: their token ids
    counts,  # int32[B, CTAS]: number of candidates; capacity + 1 if a thread's list overflowed
    lists,  # int32[B, CTAS, CAPACITY, THREADS]: the threads' lists
    capacity,  # CAPACITY * THREADS
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,  # logits that a thread loads at once
    JOIN_STEP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(chosen + row) >= 0:
        return
    temp = tl.load(temperature + row)
    k, p, p_min = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    bounds += row * BOUNDS
    masses += row * NUM_TILES * LEVELS
    low, high, above, mass = _bracket(  # type: ignore[misc]
        bounds, masses, k, p, p_min, VOCAB, NUM_TILES, TILES_TILE, LEVELS
    )
    if tl.program_id(0) == 0:
        brackets += row * BRACKET
        tl.store(brackets, low)
        tl.store(brackets + 1, high)
        tl.store(brackets + 2, above)
        tl.store(brackets + 3, mass)

    logits += row * VOCAB
    segment = row * tl.num_programs(0) + tl.program_id(0)
    lists += segment * capacity
    max_count = capacity // THREADS  # not a constexpr, so all batches p_min a kernel
    thread = tl.arange(0, THREADS)
    lengths = tl.zeros((THREADS,), tl.int32)
    tiles = tl.where(low < float("inf"), tl.cdiv(VOCAB, THREADS * VECTOR), 0)
    first, end = least_of(low, temp), least_of(high, temp)
    # One shared list costs a thread 120 instructions per logit, a list of its own 20. The lists are
    # joined after all reads.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        index = (tile * THREADS + thread) * VECTOR
        at = index[:, None] + tl.arange(0, VECTOR)[None, :]
        values = tl.load(logits + at, mask=at < VOCAB)
        even, odd = tl.split(tl.reshape(values, (THREADS, VECTOR // 2, 2)))
        zero, two = tl.split(even)
        one, three = tl.split(odd)
        lengths = _append(
            lists, lengths, thread, zero, index, first, end, max_count, VOCAB, THREADS
        )
        lengths = _append(
            lists, lengths, thread, one, index + 1, first, end, max_count, VOCAB, THREADS
        )
        lengths = _append(
            lists, lengths, thread, two, index + 2, first, end, max_count, VOCAB, THREADS
        )
        lengths = _append(
            lists, lengths, thread, three, index + 3, first, end, max_count, VOCAB, THREADS
        )
    max_length = tl.max(lengths, 0)
    if max_length > max_count:
        tl.store(counts + segment, capacity + 1)
    else:
        tl.store(counts + segment, tl.sum(lengths, 0))
        tl.debug_barrier()  # threads read the lists of other threads
        candidates += segment * capacity
        candidate_ids += segment * capacity
        _join(logits, lists, lengths, max_length, candidates, candidate_ids, THREADS, JOIN_STEP)


@triton.jit
def _update_best(
    best,  # float32[TILE]: each thread's largest sum of logit and noise so far
    token,  # int32[TILE]: its token
    largest,  # of ``best``
    one,  # float32[TILE]: logits of the tokens whose noise is the counters' first words
    two,  # float32[TILE]: logits of the tokens HALF further on
    counter,  # int32[TILE]
    key_low,
    key_high,
    temp,
    threshold,
    least,  # smallest logit that reaches the threshold
    HALF: tl.constexpr,
):
    """Update best, token and largest with these tokens."""
    x, y = threefry(key_low, key_high, counter.to(tl.uint32))  # type: ignore[misc]
    u, v = uniform(x), uniform(y)
    cold = inverse(temp)
    can = can_exceed(one * cold, u, largest) | can_exceed(two * cold, v, largest)
    can &= tl.maximum(one, two) >= least
    if tl.max(can.to(tl.int32), 0) > 0:
        scaled = scale(one, temp)
        best, token = take_better(best, token, scaled, u, counter, threshold)  # type: ignore[misc]
        scaled = scale(two, temp)
        best, token = take_better(best, token, scaled, v, counter + HALF, threshold)  # type: ignore[misc]
        largest = tl.max(best, 0)
    return best, token, largest


@triton.jit
def _pair(
    logits,  # float32[V] of the row
    block_max,  # float32[NUM_BLOCKS] of the row
    counter,  # int32[TILE]
    mask,
    least,
    VOCAB: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of the two tokens whose noise is the two words of a counter."""
    two = counter + HALF
    return (
        _reaching(logits, block_max, counter, mask & (counter < HALF), least, BLOCK),
        _reaching(logits, block_max, two, mask & (two < VOCAB), least, BLOCK),
    )


@triton.jit
def _draw(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    seed_low,  # int32[B]
    seed_high,  # int32[B]
    positions,  # int32[B]
    block_max,  # float32[B, NUM_BLOCKS]
    tokens,  # int32[B]
    thresholds,  # float32[B]
    sums,  # float32[B, CTAS]: the largest sum of logit and noise
    token_ids,  # int32[B, CTAS]: the first token with it; 0 if no token is kept
    deferred,  # int32[B, CTAS, TILE]: counters from tiles with few tokens to draw from
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # counters, with a pair of logits each
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(tokens + row) >= 0:
        return
    temp = tl.load(temperature + row)
    threshold = tl.load(thresholds + row)
    least = least_of(threshold, temp)
    key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
    logits += row * VOCAB
    block_max += row * NUM_BLOCKS
    at = row * tl.num_programs(0) + tl.program_id(0)
    deferred += at * TILE
    place = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    token = tl.zeros((TILE,), tl.int32)
    largest = float("-inf")
    filled = 0
    HALF: tl.constexpr = (VOCAB + 1) // 2  # a counter's two words are for tokens HALF apart
    NUM_TILES: tl.constexpr = (HALF + TILE - 1) // TILE
    ctas = tl.num_programs(0)
    # one more iteration than tiles, for the deferred counters
    for tile in range(tl.program_id(0), NUM_TILES + ctas, ctas):
        counter = tile * TILE + place
        one, two = _pair(logits, block_max, counter, counter < HALF, least, VOCAB, HALF, BLOCK)  # type: ignore[misc]
        kept = (tl.maximum(one, two) >= least) & (counter < HALF)
        found = tl.sum(kept.to(tl.int32), 0)
        if FEW_OF_TILE * found > TILE:
            best, token, largest = _update_best(  # type: ignore[misc]
                best, token, largest, one, two, counter,
                key_low, key_high, temp, threshold, least, HALF,
            )  # fmt: skip
        else:
            if (filled + found > TILE) | ((tile >= NUM_TILES) & (filled > 0)):
                tl.debug_barrier()  # threads read what others have deferred
                counter_then = tl.load(deferred + place, mask=place < filled, other=0)
                one, two = _pair(  # type: ignore[misc]
                    logits, block_max, counter_then, place < filled, least, VOCAB, HALF, BLOCK
                )
                best, token, largest = _update_best(  # type: ignore[misc]
                    best, token, largest, one, two, counter_then,
                    key_low, key_high, temp, threshold, least, HALF,
                )  # fmt: skip
                tl.debug_barrier()  # before it is overwritten
                filled = 0
            where_to = filled + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(deferred + where_to, counter, mask=kept)
            filled += found
    first = tl.min(tl.where(best == largest, token, VOCAB - 1), 0)
    tl.store(sums + at, largest)
    tl.store(token_ids + at, first)


@triton.jit
def _take(
    tokens,  # int32[B]
    sums,  # float32[B, segments]
    sampled,  # int32[B, segments]
    token_ids,  # int32[B]
    segments,  # at most the number of tiles
    VOCAB: tl.constexpr,
    TILES_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        place = tl.arange(0, TILES_TILE)
        mask = place < segments
        noisy = tl.load(sums + row * segments + place, mask=mask, other=float("-inf"))
        sampled_id = tl.load(sampled + row * segments + place, mask=mask, other=0)
        token = tl.min(tl.where((noisy == tl.max(noisy, 0)) & mask, sampled_id, VOCAB - 1), 0)
    tl.store(token_ids + row, token)


def sample(args: SampleArgs) -> jax.Array:  # int32[B]
    """See ``sample.api``."""
    rows, vocab = args.logits.shape
    num_blocks, num_tiles = math.ceil(vocab / launch.BLOCK), math.ceil(vocab / launch.TILE)
    segments = launch.ctas_per_row(rows, num_tiles)
    threads = 32 * launch.NUM_WARPS
    per_thread = launch.candidates_per_thread(math.ceil(vocab / threads / launch.VECTOR), segments)
    capacity = per_thread * threads
    filters, noise = args.filters, args.noise
    blocks = launch.blocks_per_cta(rows, num_blocks)

    sizes: dict[str, Any] = {
        "VOCAB": vocab,
        "NUM_BLOCKS": num_blocks,
        "NUM_TILES": num_tiles,
        "BLOCKS_TILE": power_of_two(num_blocks),
        "TILES_TILE": power_of_two(num_tiles),
        "BLOCK": launch.BLOCK,
        "TILE": launch.TILE,
        "LEVELS": launch.LEVELS,
        "PIVOTS": launch.PIVOTS,
        "FEW_BLOCKS": launch.FEW_BLOCKS,
        "FEW": launch.FEW,
        "FEW_TILE": launch.FEW_TILE,
        "FEW_PIVOTS": launch.FEW_PIVOTS,
        "WIDE": launch.WIDE,
        "segments": segments,
        "capacity": capacity,
        "slots": launch.SEARCH_STEP // power_of_two(segments),
    }

    def call(kernel: Any, args: tuple[jax.Array, ...], out: Any, **own: Any) -> Any:
        """One launch, with the sizes that are parameters of the kernel."""
        used = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        out_type = tuple(jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in out)
        options = {"grid": (segments, rows), "num_warps": launch.NUM_WARPS, "num_stages": 1}
        options |= used | own
        return jt.triton_call(*args, kernel=kernel, out_type=out_type, **options)

    f32, i32 = jnp.float32, jnp.int32
    block_max, block_sums = call(
        _summarize,
        (args.logits, *filters),
        (((num_blocks,), f32), ((num_blocks,), f32)),
        num_warps=max(1, blocks // 8),
        grid=(math.ceil(num_blocks / blocks), rows),
        BLOCKS=blocks,
    )
    chosen, bounds, *_ = call(
        choose_among_few,
        (args.logits, *filters, *noise, block_max, block_sums),
        (
            ((), i32),
            ((BOUNDS.value,), f32),
            ((launch.FEW_BLOCKS,), i32),
            ((launch.FEW,), f32),
            ((launch.FEW,), i32),
        ),
        grid=(rows,),
    )
    (masses,) = call(
        _weigh_levels,
        (args.logits, *filters, chosen, bounds),
        (((num_tiles, launch.LEVELS), f32),),
        num_warps=launch.WEIGH_NUM_WARPS,
        grid=(max(segments, min(num_tiles, launch.WEIGH_MIN_CTAS)), rows),
    )
    *collected, _ = call(
        _collect,
        (args.logits, *filters, chosen, bounds, masses),
        (
            ((BRACKET.value,), f32),
            ((segments, capacity), f32),
            ((segments, capacity), i32),
            ((segments,), i32),
            ((segments, per_thread, threads), i32),
        ),
        STAGES=launch.STAGES,
        THREADS=threads,
        VECTOR=launch.VECTOR,
        JOIN_STEP=launch.JOIN_STEP,
    )
    thresholds, tokens = call(
        find_threshold,
        (args.logits, *filters, *noise, chosen, bounds, *collected),
        (((), f32), ((), i32)),
        grid=(rows,),
        STEP=launch.SEARCH_STEP,
        PIVOTS=launch.SEARCH_PIVOTS,
    )
    *sampled, _ = call(
        _draw,
        (args.logits, args.temperature, *noise, block_max, tokens, thresholds),
        (((segments,), f32), ((segments,), i32), ((segments, launch.TILE // 2), i32)),
        TILE=launch.TILE // 2,
    )
    (token_ids,) = call(_take, (tokens, *sampled), (((), i32),), grid=(rows,))
    return token_ids
