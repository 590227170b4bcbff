"""Tokens sorted by expert and brought back, in Triton.

``tiles_of`` is a counting sort without atomics. A pair's place follows from the numbers of pairs of
each expert in earlier blocks and of equal pairs before it in its own block. For few pairs each CTA
counts all of them itself; for more another kernel counts each block's first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.experts.tiles import Tiles, max_tiles
from pallas_kernels.lib.numerics import power_of_two

COUNTED_AT_ONCE = 1024  # pairs that each CTA counts itself
BLOCK = 512  # pairs of a CTA, if there are more
PART = 128  # pairs that are compared with each other: of a CTA, if there are few
ONE_HOT = 1 << 14  # elements of a comparison of pairs with experts, in registers
COUNTED_TOGETHER = 1 << 12  # elements of the same comparison, of which each thread adds up some
COLUMNS = 1024  # of a token that a CTA adds up


@triton.jit
def _count(
    choices,  # int32[P]
    counts,  # int32[programs, EXPERTS_TILE]
    PAIRS: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Number of pairs of each expert in a block."""
    expert = tl.arange(0, EXPERTS_TILE)
    found = tl.zeros((CHUNK, EXPERTS_TILE), tl.int32)
    for start in range(0, BLOCK, CHUNK):
        pair = tl.program_id(0) * BLOCK + start + tl.arange(0, CHUNK)
        choice = tl.load(choices + pair, mask=pair < PAIRS, other=-1)
        found += (choice[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * EXPERTS_TILE + expert, tl.sum(found, 0))


@triton.jit
def _numbers_of_experts(
    choices,  # int32[P]
    counts,  # int32[programs, EXPERTS_TILE]; unused if not COUNTED
    PAIRS: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Pairs of each expert, and those in the blocks before this CTA's: int32[EXPERTS_TILE]."""
    expert = tl.arange(0, EXPERTS_TILE)
    every = tl.zeros((CHUNK, EXPERTS_TILE), tl.int32)
    before = tl.zeros((CHUNK, EXPERTS_TILE), tl.int32)
    if COUNTED:
        blocks = tl.num_programs(0)
        for start in range(0, blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            at = block[:, None] * EXPERTS_TILE + expert[None, :]
            found = tl.load(counts + at, mask=(block < blocks)[:, None], other=0)
            every += found
            before += tl.where((block < tl.program_id(0))[:, None], found, 0)
    else:
        for start in range(0, PAIRS, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            choice = tl.load(choices + pair, mask=pair < PAIRS, other=-1)
            found = (choice[:, None] == expert[None, :]).to(tl.int32)
            every += found
            before += tl.where((pair < tl.program_id(0) * BLOCK)[:, None], found, 0)
    return tl.sum(every, 0), tl.sum(before, 0)


@triton.jit
def _write_tiles(
    numbers,  # int32[EXPERTS_TILE]: pairs of each expert
    tiles,  # int32[EXPERTS_TILE]: tiles of each expert
    first,  # int32[EXPERTS_TILE]: first tile of each expert
    expert_of,  # int32[N]
    rows_of,  # int32[N]
    used,  # int32[1]
    EXPERTS_TILE: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The expert and the rows of every tile; unused tiles have no rows."""
    expert = tl.arange(0, EXPERTS_TILE)
    for i in range(0, tl.max(tiles, 0)):
        rows = tl.minimum(numbers - i * WIDTH, WIDTH)
        tl.store(expert_of + first + i, expert, mask=i < tiles)
        tl.store(rows_of + first + i, rows, mask=i < tiles)
    in_use = tl.sum(tiles, 0)
    tl.store(used, in_use)
    for start in range(in_use, TILES, EXPERTS_TILE):
        tile = start + expert
        tl.store(expert_of + tile, tl.zeros_like(tile), mask=tile < TILES)
        tl.store(rows_of + tile, tl.zeros_like(tile), mask=tile < TILES)


@triton.jit
def _sort(
    choices,  # int32[P]
    counts,  # int32[programs, EXPERTS_TILE]; unused if not COUNTED
    expert_of,  # int32[N]
    rows_of,  # int32[N]
    used,  # int32[1]
    pairs,  # int32[N * width]
    place,  # int32[P]
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The places of a block's pairs, PART by PART; the first CTA also writes the tiles."""
    numbers, before = _numbers_of_experts(  # type: ignore[misc]
        choices, counts, PAIRS, EXPERTS_TILE, BLOCK, CHUNK, COUNTED
    )
    expert = tl.arange(0, EXPERTS_TILE)
    numbers = tl.where(expert < EXPERTS, numbers, 0)
    tiles = (numbers + WIDTH - 1) // WIDTH
    first = tl.cumsum(tiles, 0) - tiles
    if tl.program_id(0) == 0:
        _write_tiles(numbers, tiles, first, expert_of, rows_of, used, EXPERTS_TILE, TILES, WIDTH)
    next_place = first * WIDTH + before
    number = tl.arange(0, PART)
    for start in range(0, BLOCK, PART):
        pair = tl.program_id(0) * BLOCK + start + number
        choice = tl.load(choices + pair, mask=pair < PAIRS, other=-1)
        is_own = choice[:, None] == expert[None, :]
        is_earlier = (choice[:, None] == choice[None, :]) & (number[None, :] < number[:, None])
        at = tl.sum(tl.where(is_own, next_place[None, :], 0), 1)
        at += tl.sum(is_earlier.to(tl.int32), 1)
        exists = (choice >= 0) & (choice < EXPERTS)
        tl.store(place + pair, tl.where(exists, at, TILES * WIDTH), mask=pair < PAIRS)
        tl.store(pairs + at, pair, mask=exists & (pair < PAIRS))
        next_place += tl.sum(is_own.to(tl.int32), 0)


def tiles_of(choices: jax.Array, num_experts: int, width: int) -> Tiles:  # int32[T, k]
    """See ``experts.tiles``; the pairs of rows that are not used are not written."""
    pairs, number = choices.size, max_tiles(choices.size, num_experts, width)
    tile = power_of_two(num_experts)
    counted = pairs > COUNTED_AT_ONCE
    part = max(16, min(power_of_two(pairs), ONE_HOT // tile, PART))
    block = BLOCK if counted else part
    grid = (-(-pairs // block),)
    sizes: Any = {"PAIRS": pairs, "EXPERTS_TILE": tile, "BLOCK": block}
    chunk = max(1, min(COUNTED_TOGETHER // tile, block if counted else power_of_two(pairs)))
    flat = choices.reshape(-1)
    counts = flat
    if counted:
        counts = jt.triton_call(
            flat,
            kernel=_count,
            out_type=jax.ShapeDtypeStruct((grid[0], tile), jnp.int32),
            grid=grid,
            num_warps=8,
            num_stages=1,
            CHUNK=chunk,
            **sizes,
        )

    def of(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    expert, rows, used, held, place = jt.triton_call(
        flat,
        counts,
        kernel=_sort,
        out_type=(of(number), of(number), of(1), of(number * width), of(pairs)),
        grid=grid,
        num_warps=8,
        num_stages=1,
        EXPERTS=num_experts,
        TILES=number,
        WIDTH=width,
        PART=part,
        CHUNK=chunk,
        COUNTED=counted,
        **sizes,
    )
    held, place = held.reshape(number, width), place.reshape(choices.shape)
    return Tiles(expert, rows, held, place, used)


@triton.jit
def _spread(
    x,  # [T, D]
    place,  # int32[T, k]
    rows,  # [R, D]
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
):
    """Copy a token to each of its places."""
    token = tl.program_id(0)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    values = tl.load(x + token.to(tl.int64) * WIDTH + column, mask=inside)
    for i in range(CHOSEN):
        at = tl.load(place + token * CHOSEN + i)
        if at < ROWS:
            tl.store(rows + at.to(tl.int64) * WIDTH + column, values, mask=inside)


def spread(x: jax.Array, place: jax.Array, num_rows: int) -> jax.Array:  # [T, D], int32[T, k]
    """Rows [R, D]: each token at its places; other rows are not written."""
    tokens, width = x.shape
    return jt.triton_call(
        x,
        place,
        kernel=_spread,
        out_type=jax.ShapeDtypeStruct((num_rows, width), x.dtype),
        grid=(tokens,),
        num_warps=4,
        num_stages=1,
        CHOSEN=place.shape[1],
        ROWS=num_rows,
        WIDTH=width,
        TILE=power_of_two(width),
    )


@triton.jit
def _gather(
    rows,  # [R, D]
    place,  # int32[T, k]
    weights,  # float32[T, k]
    out,  # [T, D]
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    TILE: tl.constexpr,
):
    """Some components of a token: the weighted sum of the rows at its places, in order."""
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(CHOSEN):  # type: ignore[misc]
        at = tl.load(place + token * CHOSEN + i)
        weight = tl.load(weights + token * CHOSEN + i)
        source = rows + at.to(tl.int64) * WIDTH + column
        total += weight * tl.load(source, mask=inside & (at < ROWS), other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def gather(
    rows: jax.Array,  # [R, D]
    place: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
) -> jax.Array:  # [T, D]
    """The weighted sum of the rows at each token's places; places from R on add nothing."""
    tokens, chosen = place.shape
    num_rows, width = rows.shape
    tile = min(COLUMNS, power_of_two(width))
    return jt.triton_call(
        rows,
        place,
        weights,
        kernel=_gather,
        out_type=jax.ShapeDtypeStruct((tokens, width), rows.dtype),
        grid=(tokens, -(-width // tile)),
        num_warps=4,
        num_stages=1,
        CHOSEN=chosen,
        ROWS=num_rows,
        WIDTH=width,
        TILE=tile,
    )
