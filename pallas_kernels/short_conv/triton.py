"""short_conv in Triton: one launch for all tokens and states, in place.

A CTA has a tile of a row's tokens and some channels. A row with several tokens stores inputs in
places that the taps of its first W - 1 tokens read, so one CTA does both: that of the row's first
tile. Row r has the tiles from query_start_loc[r] // TOKENS + r on: at least as many as it needs.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.short_conv import launch
from pallas_kernels.short_conv.ref import ShortConvArgs


@triton.jit
def _row_of_tile(
    tile,
    query_start_loc,  # int32[R + 1]
    num_tokens,  # T
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,  # at least R + 1
    TOKENS: tl.constexpr,
):
    """The row of a tile, its tokens' begin and end, and the tile's first one. The padding is one
    more row.
    """
    rows = tl.arange(0, STARTS_TILE)
    starts = tl.load(query_start_loc + rows, mask=rows < num_starts, other=num_tokens)
    owned = (starts // TOKENS + rows <= tile) & (rows < num_starts)
    row = tl.sum(owned.to(tl.int32), 0) - 1
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1, mask=row + 1 < num_starts, other=num_tokens)
    return row, start, end, start + (tile - start // TOKENS - row) * TOKENS


@triton.jit
def _store_inputs(
    x,  # [.., X_CHANNELS], from the row's first token on
    old,  # [WIDTH_TILE, CHANNELS]: the row's state, by place
    kept,  # [W, NUM_CHANNELS]: where it goes
    count,  # of the row's tokens; 0: nothing is stored
    begin,  # position of the row's first token
    channel,  # int32[CHANNELS]
    X_CHANNELS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Store the last W inputs up to so many tokens of a row."""
    place = tl.arange(0, WIDTH_TILE)
    newest = begin + count - 1
    position = newest - (newest + 2 * WIDTH - place) % WIDTH
    number = (position - begin)[:, None]
    stored = ((place < WIDTH) & (count > 0))[:, None] & (channel < NUM_CHANNELS)[None, :]
    at_x = x + number.to(tl.int64) * X_CHANNELS + channel[None, :]  # offsets exceed int32
    new = tl.load(at_x, mask=stored & (number >= 0), other=0.0)
    older = tl.where((position >= 0)[:, None], old, 0.0)
    value = tl.where(number >= 0, new, older.to(new.dtype))
    at_kept = kept + place[:, None] * NUM_CHANNELS + channel[None, :]
    tl.store(at_kept, value, mask=stored)


@triton.jit
def _convolve(
    x,  # [T, X_CHANNELS]
    weights,  # [W, C]
    query_start_loc,  # int32[R + 1]
    begins,  # int32[R]
    reads,  # int32[R]
    writes,  # int32[R]
    save_tokens,  # int32[R, NUM_SAVES]
    save_rows,  # int32[R, NUM_SAVES]
    kept,  # [P, W, C]
    out,  # [T, C]
    num_tokens,  # T; this and the next are not constexpr, so all buckets share a kernel
    num_starts,  # R + 1
    STARTS_TILE: tl.constexpr,
    NUM_SAVES: tl.constexpr,
    X_CHANNELS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,  # C
    WIDTH: tl.constexpr,  # W
    WIDTH_TILE: tl.constexpr,  # at least W
    TOKENS: tl.constexpr,  # of a CTA
    CHANNELS: tl.constexpr,  # of a CTA
):
    row, start, end, first = _row_of_tile(  # type: ignore[misc]
        tl.program_id(1), query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first >= end:
        return
    at = tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_channels = channel < NUM_CHANNELS
    inside = (at < end - first) & in_channels[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    # offsets exceed int32, but not within a tile
    at_out = out + first.to(tl.int64) * NUM_CHANNELS + at * NUM_CHANNELS + channel[None, :]
    if row + 1 == num_starts:
        tl.store(at_out, tl.zeros((TOKENS, CHANNELS), dtype), mask=inside)
        return
    at_x = x + first.to(tl.int64) * X_CHANNELS + at * X_CHANNELS + channel[None, :]
    begin = tl.load(begins + row)
    STATE: tl.constexpr = WIDTH * NUM_CHANNELS
    own = kept + tl.load(reads + row).to(tl.int64) * STATE
    number = first - start + at  # within the row
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        is_new = number >= back
        found = tl.load(at_x - back * X_CHANNELS, mask=inside & is_new, other=0.0)
        if back > 0:
            position = begin + number - back
            is_old = inside & (number < back) & (position >= 0)
            at_place = own + (position + WIDTH) % WIDTH * NUM_CHANNELS + channel[None, :]
            found = tl.where(is_new, found, tl.load(at_place, mask=is_old, other=0.0))
        weight = tl.load(weights + tap * NUM_CHANNELS + channel, mask=in_channels, other=0.0)
        total += weight.to(tl.float32)[None, :] * found.to(tl.float32)
    tl.store(at_out, (total * tl.sigmoid(total)).to(dtype), mask=inside)
    if first > start:
        return

    place = tl.arange(0, WIDTH_TILE)[:, None]
    is_place = (place < WIDTH) & (begin > 0) & in_channels[None, :]
    old = tl.load(own + place * NUM_CHANNELS + channel[None, :], mask=is_place, other=0.0)
    tl.debug_barrier()  # all threads have read the state before one stores it
    x += start.to(tl.int64) * X_CHANNELS
    for save in range(NUM_SAVES):
        at_save = row * NUM_SAVES + save
        to = kept + tl.load(save_rows + at_save).to(tl.int64) * STATE
        count = tl.load(save_tokens + at_save)
        _store_inputs(
            x, old, to, count, begin, channel, X_CHANNELS, NUM_CHANNELS, WIDTH, WIDTH_TILE
        )
    to = kept + tl.load(writes + row).to(tl.int64) * STATE
    _store_inputs(
        x, old, to, end - start, begin, channel, X_CHANNELS, NUM_CHANNELS, WIDTH, WIDTH_TILE
    )


def short_conv(args: ShortConvArgs) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """See ``short_conv.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: ShortConvArgs
) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """``short_conv`` with a given configuration."""
    (num_tokens, x_channels), (width, channels) = args.x.shape, args.weights.shape
    num_starts = len(args.query_start_loc)
    kept = jax.new_ref(args.kept)  # jax-triton updates a Ref in place
    saves, num_saves = (args.writes, args.writes), 0  # no more than arguments, without saves
    if args.save_tokens is not None and args.save_rows is not None:
        saves, num_saves = (args.save_tokens, args.save_rows), args.save_tokens.shape[1]
    out = jt.triton_call(
        args.x,
        args.weights,
        args.query_start_loc,
        args.begins,
        args.reads,
        args.writes,
        *saves,
        kept,
        kernel=_convolve,
        out_type=jax.ShapeDtypeStruct((num_tokens, channels), args.x.dtype),
        grid=(-(-channels // config.channels), num_tokens // config.tokens + num_starts),
        num_warps=config.num_warps,
        num_stages=1,
        num_tokens=num_tokens,
        num_starts=num_starts,
        STARTS_TILE=max(launch.STARTS_TILE, power_of_two(num_starts)),
        NUM_SAVES=num_saves,
        X_CHANNELS=x_channels,
        NUM_CHANNELS=channels,
        WIDTH=width,
        WIDTH_TILE=power_of_two(width),
        TOKENS=config.tokens,
        CHANNELS=config.channels,
    )
    return out, jax.freeze(kept)
