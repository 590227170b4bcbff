"""ssd_decode in Triton: one launch for all rows, in place.

A CTA has some components of one head of one row. It reads their part of the state once, keeps it in
registers and writes it once, so the kernel is bound by the bytes of the states. Each CTA computes
the convolution of its own components and of the group's keys and queries, and those of a group all
write the same inputs of it.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.ssd_triton import lost_of, step_sizes
from pallas_kernels.ssd_decode import launch
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill.launch import finite_limits


@triton.jit
def _convolved(
    token,  # [C], of the row
    conv,  # [W, C]
    bias,  # [C]
    convs,  # [W, C], of the row's sequence
    channel,  # int32[D]
    position,
    CHANNELS: tl.constexpr,  # C
    TAPS: tl.constexpr,  # W
    HAS_BIAS: tl.constexpr,
):
    """SiLU of the convolution of channels, float32[D], and its inputs, from the token backwards.

    Each tap is a vector: one tile of all of them, as in ``delta_decode``, takes 240 registers of
    a thread with 256 columns, instead of 96.
    """
    inputs = (tl.load(token + channel),)
    for back in tl.static_range(1, TAPS):  # type: ignore[attr-defined]
        at = (position + TAPS - back) % TAPS * CHANNELS + channel
        # a sequence has no inputs before its first token
        inputs += (tl.load(convs + at, mask=(channel >= 0) & (back <= position), other=0.0),)
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(TAPS):  # type: ignore[attr-defined]
        weight = tl.load(conv + (TAPS - 1 - back) * CHANNELS + channel)
        total += inputs[back].to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    return total * tl.sigmoid(total), inputs


@triton.jit
def _store_inputs(
    convs,  # [W, C], of the row's sequence
    kept_convs,  # [W, C]: where it is saved
    is_kept,
    inputs,  # W times [D], from the token backwards
    channel,  # int32[D]
    position,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Store the token in its place, and if the sequence is saved all inputs there."""
    tl.store(convs + position % TAPS * CHANNELS + channel, inputs[0])
    for back in tl.static_range(TAPS):  # type: ignore[attr-defined]
        at = kept_convs + (position + TAPS - back) % TAPS * CHANNELS + channel
        tl.store(at, inputs[back], mask=(channel >= 0) & is_kept)


@triton.jit
def _decode(
    mixed,  # [B, C]
    steps,  # [B, H]
    decay,  # float32[3, H]
    states,  # float32[S, H, P, N]
    positions,  # int32[B]
    rows,  # int32[B]
    keeps,  # int32[B]
    conv,  # [W, C]
    conv_bias,  # [C]
    convs,  # [S, W, C]
    out,  # [B, H, P]
    HEADS: tl.constexpr,  # H
    GROUPS: tl.constexpr,  # G
    WIDTH: tl.constexpr,  # P
    STATE_DIM: tl.constexpr,  # N
    VALUES: tl.constexpr,  # of a CTA
    TAPS: tl.constexpr,  # W; 0: there is no convolution
    HAS_BIAS: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    PARTS: tl.constexpr = WIDTH // VALUES
    CHANNELS: tl.constexpr = HEADS * WIDTH + 2 * GROUPS * STATE_DIM
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1)
    own = tl.load(rows + row).to(tl.int64)  # offsets exceed int32
    kept_row = tl.load(keeps + row).to(tl.int64)
    position = tl.load(positions + row)
    values = tl.program_id(0) % PARTS * VALUES + tl.arange(0, VALUES)
    columns = tl.arange(0, STATE_DIM)
    at_state = states + head * (WIDTH * STATE_DIM) + values[:, None] * STATE_DIM + columns[None, :]
    STATE: tl.constexpr = HEADS * WIDTH * STATE_DIM
    is_old = (values >= 0)[:, None] & (position > 0)
    state = tl.load(at_state + own * STATE, mask=is_old, other=0.0)

    mixed += row * CHANNELS
    at_x = head * WIDTH + values
    at_key = HEADS * WIDTH + head // (HEADS // GROUPS) * STATE_DIM + columns
    at_query = at_key + GROUPS * STATE_DIM
    if TAPS > 0:
        kept_convs = convs + kept_row * (TAPS * CHANNELS)
        convs += own * (TAPS * CHANNELS)
        x, x_inputs = _convolved(  # type: ignore[misc]
            mixed, conv, conv_bias, convs, at_x, position, CHANNELS, TAPS, HAS_BIAS
        )
        key, k_inputs = _convolved(  # type: ignore[misc]
            mixed, conv, conv_bias, convs, at_key, position, CHANNELS, TAPS, HAS_BIAS
        )
        query, q_inputs = _convolved(  # type: ignore[misc]
            mixed, conv, conv_bias, convs, at_query, position, CHANNELS, TAPS, HAS_BIAS
        )
    else:
        x = tl.load(mixed + at_x).to(tl.float32)
        key = tl.load(mixed + at_key).to(tl.float32)
        query = tl.load(mixed + at_query).to(tl.float32)
    exponent = -tl.exp(tl.load(decay + head))
    if HAS_STEPS:
        found = tl.load(steps + row * HEADS + head).to(tl.float32)
        size = step_sizes(found + tl.load(decay + HEADS + head), LOWEST, HIGHEST)
        exponent *= size
        moved = x * size
    else:
        moved = x
    # the state times the decay would be rounded to one side where the decay is nearly 1: see
    # ``ssd_decode.xla``
    state += state * lost_of(exponent) + moved[:, None] * key[None, :]
    tl.store(at_state + own * STATE, state)
    is_kept = kept_row != own
    tl.store(at_state + kept_row * STATE, state, mask=(values >= 0)[:, None] & is_kept)
    if TAPS > 0:
        _store_inputs(convs, kept_convs, is_kept, x_inputs, at_x, position, CHANNELS, TAPS)
        _store_inputs(convs, kept_convs, is_kept, k_inputs, at_key, position, CHANNELS, TAPS)
        _store_inputs(convs, kept_convs, is_kept, q_inputs, at_query, position, CHANNELS, TAPS)
    result = tl.sum(state * query[None, :], 1) + tl.load(decay + 2 * HEADS + head) * x
    at_out = out + (row * HEADS + head) * WIDTH + values
    tl.store(at_out, result.to(out.dtype.element_ty))


def ssd_decode(
    args: SsdDecodeArgs,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [B, H, P]
    """See ``ssd_decode.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig, args: SsdDecodeArgs
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [B, H, P]
    """``ssd_decode`` with a given configuration."""
    _, heads, width, state_dim = args.states.shape
    taps = 0 if args.conv is None else len(args.conv)
    # jax-triton updates a Ref in place
    states = jax.new_ref(args.states)
    convs = None if args.convs is None else jax.new_ref(args.convs)
    out = jt.triton_call(
        args.mixed,
        args.decay if args.steps is None else args.steps,
        args.decay,
        states,
        args.positions,
        args.rows,
        args.rows if args.keeps is None else args.keeps,
        args.mixed if args.conv is None else args.conv,
        args.mixed if args.conv_bias is None else args.conv_bias,
        args.mixed if convs is None else convs,
        kernel=_decode,
        out_type=jax.ShapeDtypeStruct((len(args.rows), heads, width), args.mixed.dtype),
        grid=(heads * (width // config.values), len(args.rows)),
        num_warps=config.num_warps,
        num_stages=1,
        HEADS=heads,
        GROUPS=args.num_groups,
        WIDTH=width,
        STATE_DIM=state_dim,
        VALUES=config.values,
        TAPS=taps,
        HAS_BIAS=args.conv_bias is not None,
        HAS_STEPS=args.steps is not None,
        **finite_limits(args.limits),
    )
    return out, jax.freeze(states), None if convs is None else jax.freeze(convs)
