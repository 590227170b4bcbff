"""short_conv in Triton: one launch for all tokens and states, in place.

A CTA has a tile of a row's tokens and some channels. It reads each input once, and has those of the
last taps in registers. A row with several tokens stores inputs in places that the taps of its first
W - 1 tokens read, so one CTA does both: that of the row's first tile. Row r has the tiles from
query_start_loc[r] // TOKENS + r on: at least as many as it needs.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.rows_triton import row_of_tile
from pallas_kernels.short_conv import launch
from pallas_kernels.short_conv.ref import ShortConvArgs


@triton.jit
def _store_inputs(
    x,  # [.., X_CHANNELS], from the row's first token and the channels of the CTA on
    old,  # [W, NUM_CHANNELS]: the row's state, from the channels of the CTA on
    to,  # [W, NUM_CHANNELS]: where it goes, likewise
    count,  # of the row's tokens; 0: nothing is stored
    begin,  # position of the row's first token
    channel,  # int32[CHANNELS], of the CTA
    in_channels,  # bool[CHANNELS]
    X_CHANNELS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the last W inputs up to so many tokens of a row. An older one keeps its place."""
    for newer in tl.static_range(WIDTH):  # type: ignore[attr-defined]
        number = count - 1 - newer  # within the row
        position = begin + number
        place = (position + WIDTH) % WIDTH * NUM_CHANNELS
        at_input = tl.where(number >= 0, x + number.to(tl.int64) * X_CHANNELS, old + place)
        value = tl.load(at_input + channel, mask=in_channels & (position >= 0), other=0.0)
        tl.store(to + place + channel, value, mask=in_channels & (count > 0))


@triton.jit
def _convolve(
    x,  # [T, X_CHANNELS]
    weights,  # [W, C]
    bias,  # [C]
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
    TOKENS: tl.constexpr,  # of a CTA
    CHANNELS: tl.constexpr,  # of a CTA
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    STATE: tl.constexpr = WIDTH * NUM_CHANNELS
    dtype: tl.constexpr = out.dtype.element_ty
    row, start, end, first = row_of_tile(  # type: ignore[misc]
        tl.program_id(1), query_start_loc, num_tokens, num_starts, STARTS_TILE, TOKENS
    )
    if first >= end:
        return
    channel = tl.arange(0, CHANNELS)
    first_channel = tl.program_id(0) * CHANNELS
    in_channels = first_channel + channel < NUM_CHANNELS
    out += first.to(tl.int64) * NUM_CHANNELS + first_channel  # offsets exceed int32
    if row + 1 == num_starts:
        for token in tl.static_range(TOKENS):
            at_out = out + token * NUM_CHANNELS + channel
            tl.store(at_out, tl.zeros((CHANNELS,), dtype), mask=in_channels & (first + token < end))
        return

    x += start.to(tl.int64) * X_CHANNELS + first_channel
    kept += first_channel
    begin = tl.load(begins + row)
    old = kept + tl.load(reads + row).to(tl.int64) * STATE
    before = first - start  # tokens of the row
    at_tile = x + before.to(tl.int64) * X_CHANNELS
    taps = ()
    window = ()  # float32, the last W - 1 inputs
    for back in tl.static_range(WIDTH - 1, -1, -1):
        at_weight = weights + (WIDTH - 1 - back) * NUM_CHANNELS + first_channel + channel
        taps += (tl.load(at_weight, mask=in_channels, other=0.0).to(tl.float32),)
        if back > 0:
            position = begin - back
            place = (position + WIDTH) % WIDTH * NUM_CHANNELS
            at_input = tl.where(before > 0, at_tile - back * X_CHANNELS, old + place)
            is_input = (before > 0) | (position >= 0)
            found = tl.load(at_input + channel, mask=in_channels & is_input, other=0.0)
            window += (found.to(tl.float32),)
    if HAS_BIAS:
        at_bias = bias + first_channel + channel
        shift = tl.load(at_bias, mask=in_channels, other=0.0).to(tl.float32)
    for token in tl.static_range(TOKENS):
        inside = in_channels & (first + token < end)
        found = tl.load(at_tile + token * X_CHANNELS + channel, mask=inside, other=0.0)
        window += (found.to(tl.float32),)
        total = tl.zeros((CHANNELS,), tl.float32)
        for tap in tl.static_range(WIDTH):
            total += taps[tap] * window[token + tap]
        if HAS_BIAS:
            total += shift
        if SILU:
            total *= tl.sigmoid(total)
        tl.store(out + token * NUM_CHANNELS + channel, total.to(dtype), mask=inside)
    if before > 0:
        return

    tl.debug_barrier()  # all threads have read the state before one stores it
    for save in range(NUM_SAVES):
        at_save = row * NUM_SAVES + save
        to = kept + tl.load(save_rows + at_save).to(tl.int64) * STATE
        count = tl.load(save_tokens + at_save)
        _store_inputs(
            x, old, to, count, begin, channel, in_channels, X_CHANNELS, NUM_CHANNELS, WIDTH
        )
    to = kept + tl.load(writes + row).to(tl.int64) * STATE
    _store_inputs(
        x, old, to, end - start, begin, channel, in_channels, X_CHANNELS, NUM_CHANNELS, WIDTH
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
        args.weights if args.bias is None else args.bias,
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
        TOKENS=config.tokens,
        CHANNELS=config.channels,
        HAS_BIAS=args.bias is not None,
        SILU=args.silu,
    )
    return out, jax.freeze(kept)
