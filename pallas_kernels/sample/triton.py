"""sample in Triton: seven launches, no sort, no decision on the host.

1. ``_summarize`` reads every logit once and keeps of each block its largest and, for top_p, the
   sum of its probabilities. 2 and 6 do not read a block whose largest is too small to matter; 3
   and 4 read all of a row that still needs them, as most of its blocks matter.
2. ``few.choose_among_few``, one program a row, finds a level from the blocks and, where few logits
   reach it, the row's token: of every greedy row and nearly every filtered one. What follows is for
   the others; a row that has its token leaves each launch at once.
3. ``_weigh_levels``, for rows with top_p alone and logits at the level nearly everywhere, sums the
   probability at and above evenly spread levels.
4. ``_collect`` finds two levels that the row's threshold lies between (in 3's sums or from 2) and
   copies the logits between them, or all above the lower where they are few enough.
5. ``listed.find_threshold`` searches these for the threshold, one program a row, and draws the
   row's token where they are all that reach it.
6. ``_draw`` draws a token from the part of a row that a program has; 7. ``_take`` the row's.

1, 3, 4 and 6 work on a row with as many programs as fill the chip. Probabilities are added in an
order that is the same in every batch, or as integers, which have none: a row's token does not
depend on how a batch was cut up.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.numerics import power_of_two
from pallas_kernels.sample import launch
from pallas_kernels.sample.few import BOUNDS, choose_among_few
from pallas_kernels.sample.levels import inverse, least_of, nucleus_alone, scale, scaled_at
from pallas_kernels.sample.listed import BRACKET, find_threshold
from pallas_kernels.sample.noise import can_exceed, row_key, take_better, threefry, uniform

FEW_OF_TILE = tl.constexpr(4)  # a part of a tile: noise for no more waits until a tile is full


@triton.jit
def _reaching(
    logits,  # float32[V] of the row
    tops,  # float32[NUM_BLOCKS] of the row
    index,
    inside,  # of the vocabulary
    least,
    BLOCK: tl.constexpr,
):
    """Logits; -inf, and not read, where the block's largest is below the least that is wanted."""
    best = tl.load(tops + index // BLOCK, mask=inside, other=float("-inf"))
    return tl.load(logits + index, mask=inside & (best >= least), other=float("-inf"))


@triton.jit
def _summarize(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    top_k,  # int32[B]
    top_p,  # float32[B]
    min_p,  # float32[B]
    tops,  # float32[B, NUM_BLOCKS]: the largest logit of each block
    sums,  # float32[B, NUM_BLOCKS]: of exp(scaled - the block's largest), where top_p is alone
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
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (heat > 0) & nucleus_alone(k, p, share, VOCAB):
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp((values - base[:, None]) * inverse(heat))
        tl.store(sums + row * NUM_BLOCKS + number, tl.sum(weights, 1), number < NUM_BLOCKS)


@triton.jit
def _bounds(bounds, row):
    """The largest scaled logit, and two levels that the threshold lies between."""
    bounds += row * BOUNDS
    return tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)


@triton.jit
def _level(low, high, which, LEVELS: tl.constexpr):
    """Levels spread evenly from low up, below high; the same bits in every launch."""
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
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if not nucleus_alone(k, p, share, VOCAB):
        return
    heat = tl.load(temperature + row)
    top, low, high = _bounds(bounds, row)
    if high == float("inf"):
        return
    for tile in range(tl.program_id(0), NUM_TILES, tl.num_programs(0)):
        index = tile * TILE + tl.arange(0, TILE)[None, :]
        scaled = scaled_at(logits + row * VOCAB, index, index < VOCAB, heat)
        weights = tl.exp(scaled - top)
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
    share,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Two levels that the row's threshold lies between, the mass at and above the higher, and what
    top_p needs; a lower level of inf where nothing is to be searched."""
    top, lowest, highest = _bounds(bounds, 0)  # type: ignore[misc]
    low, high = float("inf"), float("inf")
    above, mass = 0.0, 0.0
    if nucleus_alone(k, p, share, VOCAB):
        mass = p * tl.load(bounds + 3)
        low = lowest
        if highest < float("inf"):
            which = tl.arange(0, LEVELS)
            level = _level(lowest, highest, which, LEVELS)
            part = tl.arange(0, TILES_TILE)[:, None]
            at = masses + part * LEVELS + which[None, :]
            reached = tl.sum(tl.load(at, mask=part < NUM_TILES, other=0.0), 0)
            enough = (reached >= mass) | (which == 0)
            low = tl.max(tl.where(enough, level, float("-inf")), 0)
            high = tl.min(tl.where(enough, float("inf"), level), 0)
            above = tl.max(tl.where(enough, 0.0, reached), 0)
            # No more tokens reach the level than have its mass if each has the level's weight. A
            # list has room for a quarter of the row: half of that, as some are longer than others.
            most = tl.min(tl.where(enough, reached, float("inf")), 0) / tl.exp(low - top)
            if 8 * most < VOCAB:
                high, above = float("inf"), 0.0
    elif (p < 1) | ((k > 0) & (k < VOCAB)):
        low = lowest
    return low, high, above, mass


@triton.jit
def _note(
    own,  # int32[NOTES, THREADS]
    noted,  # int32[THREADS]
    thread,  # int32[THREADS]
    values,  # float32[THREADS]: logits
    index,  # int32[THREADS]: whose they are
    first,
    end,
    most,  # NOTES
    VOCAB: tl.constexpr,
    THREADS: tl.constexpr,
):
    """How many each thread has noted after these: those from first up, below end."""
    kept = (values >= first) & (values < end) & (index < VOCAB)
    tl.store(own + noted * THREADS + thread, index, mask=kept & (noted < most))
    return noted + kept.to(tl.int32)


@triton.jit
def _join(
    logits,  # float32[V] of the row
    own,  # int32[NOTES, THREADS]: tokens that each thread has noted
    noted,  # int32[THREADS]: how many
    longest,  # of these
    listed,  # float32[NOTES * THREADS]
    listed_ids,  # int32[NOTES * THREADS]
    THREADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The threads' notes, and their logits, one after another."""
    start = tl.cumsum(noted, 0) - noted
    for first in range(0, longest, AT_ONCE):
        which = first + tl.arange(0, AT_ONCE)[:, None]
        there = which < noted[None, :]
        index = tl.load(own + which * THREADS + tl.arange(0, THREADS)[None, :], mask=there, other=0)
        values = tl.load(logits + index, mask=there)
        tl.store(listed + start[None, :] + which, values, mask=there)
        tl.store(listed_ids + start[None, :] + which, index, mask=there)


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
    listed,  # float32[B, PROGRAMS, room]: logits between the row's levels, or above the lower
    listed_ids,  # int32[B, PROGRAMS, room]: whose they are
    counts,  # int32[B, PROGRAMS]: of those; room + 1 where a thread's own list was too short
    own,  # int32[B, PROGRAMS, NOTES, THREADS]: each thread's list
    room,  # NOTES * THREADS
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    RUN: tl.constexpr,  # logits that a thread loads at once
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(chosen + row) >= 0:
        return
    heat = tl.load(temperature + row)
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    bounds += row * BOUNDS
    masses += row * NUM_TILES * LEVELS
    low, high, above, mass = _bracket(  # type: ignore[misc]
        bounds, masses, k, p, share, VOCAB, NUM_TILES, TILES_TILE, LEVELS
    )
    if tl.program_id(0) == 0:
        brackets += row * BRACKET
        tl.store(brackets, low)
        tl.store(brackets + 1, high)
        tl.store(brackets + 2, above)
        tl.store(brackets + 3, mass)

    logits += row * VOCAB
    segment = row * tl.num_programs(0) + tl.program_id(0)
    own += segment * room
    most = room // THREADS  # no constant: a kernel for all batches
    thread = tl.arange(0, THREADS)
    noted = tl.zeros((THREADS,), tl.int32)
    tiles = tl.where(low < float("inf"), tl.cdiv(VOCAB, THREADS * RUN), 0)
    first, end = least_of(low, heat), least_of(high, heat)
    # To agree on places in one list takes threads 120 instructions a logit, to keep a list each
    # 20. They are joined when all is read.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        index = (tile * THREADS + thread) * RUN
        at = index[:, None] + tl.arange(0, RUN)[None, :]
        values = tl.load(logits + at, mask=at < VOCAB)
        even, odd = tl.split(tl.reshape(values, (THREADS, RUN // 2, 2)))
        zero, two = tl.split(even)
        one, three = tl.split(odd)
        noted = _note(own, noted, thread, zero, index, first, end, most, VOCAB, THREADS)
        noted = _note(own, noted, thread, one, index + 1, first, end, most, VOCAB, THREADS)
        noted = _note(own, noted, thread, two, index + 2, first, end, most, VOCAB, THREADS)
        noted = _note(own, noted, thread, three, index + 3, first, end, most, VOCAB, THREADS)
    longest = tl.max(noted, 0)
    if longest > most:
        tl.store(counts + segment, room + 1)
    else:
        tl.store(counts + segment, tl.sum(noted, 0))
        tl.debug_barrier()  # other threads may read what one has written
        listed += segment * room
        listed_ids += segment * room
        _join(logits, own, noted, longest, listed, listed_ids, THREADS, AT_ONCE)


@triton.jit
def _contest(
    best,  # float32[TILE]: the largest sum of logit and noise that each thread has seen
    token,  # int32[TILE]: whose it is
    largest,  # of the best
    one,  # float32[TILE]: logits of the tokens whose noise is the counters' first words
    two,  # float32[TILE]: of those HALF further on
    counter,  # int32[TILE]
    key_low,
    key_high,
    heat,
    threshold,
    least,  # logit that reaches it
    HALF: tl.constexpr,
):
    """Best, token and largest after these tokens, too."""
    x, y = threefry(key_low, key_high, counter.to(tl.uint32))  # type: ignore[misc]
    u, v = uniform(x), uniform(y)
    cold = inverse(heat)
    can = can_exceed(one * cold, u, largest) | can_exceed(two * cold, v, largest)
    can &= tl.maximum(one, two) >= least
    if tl.max(can.to(tl.int32), 0) > 0:
        scaled = scale(one, heat)
        best, token = take_better(best, token, scaled, u, counter, threshold)  # type: ignore[misc]
        scaled = scale(two, heat)
        best, token = take_better(best, token, scaled, v, counter + HALF, threshold)  # type: ignore[misc]
        largest = tl.max(best, 0)
    return best, token, largest


@triton.jit
def _pair(
    logits,  # float32[V] of the row
    tops,  # float32[NUM_BLOCKS] of the row
    counter,  # int32[TILE]
    asked,
    least,
    VOCAB: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of the two tokens whose noise is the two words of a counter."""
    two = counter + HALF
    return (
        _reaching(logits, tops, counter, asked & (counter < HALF), least, BLOCK),
        _reaching(logits, tops, two, asked & (two < VOCAB), least, BLOCK),
    )


@triton.jit
def _draw(
    logits,  # float32[B, V]
    temperature,  # float32[B]
    seed_low,  # int32[B]
    seed_high,  # int32[B]
    positions,  # int32[B]
    tops,  # float32[B, NUM_BLOCKS]
    settled,  # int32[B]
    thresholds,  # float32[B]
    sums,  # float32[B, PROGRAMS]: the largest sum of logit and noise
    token_ids,  # int32[B, PROGRAMS]: the first token with it; 0 where nothing is kept
    waiting,  # int32[B, PROGRAMS, TILE]: counters, from tiles with few to draw from
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # of counters: a pair of logits each
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(settled + row) >= 0:
        return
    heat = tl.load(temperature + row)
    threshold = tl.load(thresholds + row)
    least = least_of(threshold, heat)
    key_low, key_high = row_key(seed_low + row, seed_high + row, positions + row)  # type: ignore[misc]
    logits += row * VOCAB
    tops += row * NUM_BLOCKS
    at = row * tl.num_programs(0) + tl.program_id(0)
    waiting += at * TILE
    place = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    token = tl.zeros((TILE,), tl.int32)
    largest = float("-inf")
    filled = 0
    HALF: tl.constexpr = (VOCAB + 1) // 2  # a counter's two words are for tokens that far apart
    NUM_TILES: tl.constexpr = (HALF + TILE - 1) // TILE
    programs = tl.num_programs(0)
    # one tile more than there are: it has nothing, and what waits has its turn
    for tile in range(tl.program_id(0), NUM_TILES + programs, programs):
        counter = tile * TILE + place
        one, two = _pair(logits, tops, counter, counter < HALF, least, VOCAB, HALF, BLOCK)  # type: ignore[misc]
        kept = (tl.maximum(one, two) >= least) & (counter < HALF)
        found = tl.sum(kept.to(tl.int32), 0)
        if FEW_OF_TILE * found > TILE:
            best, token, largest = _contest(  # type: ignore[misc]
                best, token, largest, one, two, counter,
                key_low, key_high, heat, threshold, least, HALF,
            )  # fmt: skip
        else:
            if (filled + found > TILE) | ((tile >= NUM_TILES) & (filled > 0)):
                tl.debug_barrier()  # other threads read what waits
                counter_then = tl.load(waiting + place, mask=place < filled, other=0)
                one, two = _pair(  # type: ignore[misc]
                    logits, tops, counter_then, place < filled, least, VOCAB, HALF, BLOCK
                )
                best, token, largest = _contest(  # type: ignore[misc]
                    best, token, largest, one, two, counter_then,
                    key_low, key_high, heat, threshold, least, HALF,
                )  # fmt: skip
                tl.debug_barrier()  # and have read it
                filled = 0
            where_to = filled + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(waiting + where_to, counter, mask=kept)
            filled += found
    first = tl.min(tl.where(best == largest, token, VOCAB - 1), 0)
    tl.store(sums + at, largest)
    tl.store(token_ids + at, first)


@triton.jit
def _take(
    settled,  # int32[B]
    sums,  # float32[B, segments]
    drawn,  # int32[B, segments]
    token_ids,  # int32[B]
    segments,  # no more than tiles
    VOCAB: tl.constexpr,
    TILES_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(settled + row)
    if token < 0:
        place = tl.arange(0, TILES_TILE)
        there = place < segments
        noisy = tl.load(sums + row * segments + place, mask=there, other=float("-inf"))
        drawn_id = tl.load(drawn + row * segments + place, mask=there, other=0)
        token = tl.min(tl.where((noisy == tl.max(noisy, 0)) & there, drawn_id, VOCAB - 1), 0)
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
    num_blocks, num_tiles = math.ceil(vocab / launch.BLOCK), math.ceil(vocab / launch.TILE)
    segments = launch.programs_per_row(rows, num_tiles)
    threads = 32 * launch.WARPS
    notes = launch.notes(math.ceil(vocab / threads / launch.RUN), segments)
    room = notes * threads
    filters, noise = (temperature, top_k, top_p, min_p), (seed_low, seed_high, positions)
    few, listed = launch.FEW_BLOCKS, launch.FEW
    blocks = launch.blocks_per_program(rows, num_blocks)

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
        "FEW_BLOCKS": few,
        "FEW": listed,
        "FEW_TILE": launch.FEW_TILE,
        "FEW_PIVOTS": launch.FEW_PIVOTS,
        "WIDE": launch.WIDE,
        "segments": segments,
        "room": room,
        "slots": launch.SEARCH_STEP // power_of_two(segments),
    }

    def call(kernel: Any, args: tuple[jax.Array, ...], out: Any, **own: Any) -> Any:
        """One launch, with those of the sizes that the kernel asks for."""
        wanted = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        out_type = tuple(jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in out)
        options = {"grid": (segments, rows), "num_warps": launch.WARPS, "num_stages": 1}
        options |= wanted | own
        return jt.triton_call(*args, kernel=kernel, out_type=out_type, **options)

    f32, i32 = jnp.float32, jnp.int32
    tops, sums = call(
        _summarize,
        (logits, *filters),
        (((num_blocks,), f32), ((num_blocks,), f32)),
        num_warps=max(1, blocks // 8),
        grid=(math.ceil(num_blocks / blocks), rows),
        BLOCKS=blocks,
    )
    chosen, bounds, *_ = call(
        choose_among_few,
        (logits, *filters, *noise, tops, sums),
        (((), i32), ((BOUNDS.value,), f32), ((few,), i32), ((listed,), f32), ((listed,), i32)),
        grid=(rows,),
    )
    (masses,) = call(
        _weigh_levels,
        (logits, *filters, chosen, bounds),
        (((num_tiles, launch.LEVELS), f32),),
        num_warps=launch.WEIGHING_WARPS,
        grid=(max(segments, min(num_tiles, launch.WEIGHING_PROGRAMS)), rows),
    )
    *collected, _ = call(
        _collect,
        (logits, *filters, chosen, bounds, masses),
        (
            ((BRACKET.value,), f32),
            ((segments, room), f32),
            ((segments, room), i32),
            ((segments,), i32),
            ((segments, notes, threads), i32),
        ),
        STAGES=launch.STAGES,
        THREADS=threads,
        RUN=launch.RUN,
        AT_ONCE=launch.AT_ONCE,
    )
    thresholds, settled = call(
        find_threshold,
        (logits, *filters, *noise, chosen, bounds, *collected),
        (((), f32), ((), i32)),
        grid=(rows,),
        STEP=launch.SEARCH_STEP,
        PIVOTS=launch.SEARCH_PIVOTS,
    )
    *drawn, _ = call(
        _draw,
        (logits, temperature, *noise, tops, settled, thresholds),
        (((segments,), f32), ((segments,), i32), ((segments, launch.TILE // 2), i32)),
        TILE=launch.TILE // 2,
    )
    (token_ids,) = call(_take, (settled, *drawn), (((), i32),), grid=(rows,))
    return token_ids
