"""delta_decode in Triton: one launch for all rows, in place.

A CTA has one value head of one row. It reads the head's state once, keeps it in registers and
writes it once, so the kernel is bound by the bytes of the states. The CTAs of the value heads of
one key head each compute that head's convolution, and write the same inputs of it.
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.delta_decode import launch
from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.lib.numerics import power_of_two


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _taps(
    qkv,  # [C], of the row
    conv,  # [W, C]
    convs,  # [W, C], of the row's sequence
    channel,  # int32[D]
    position,
    CHANNELS: tl.constexpr,  # C
    WIDTH: tl.constexpr,  # W
    WIDTH_TILE: tl.constexpr,
):
    """The taps of channels, float32[WIDTH_TILE, D], whose sum is the convolution; and its inputs,
    from the token backwards.

    They are one tile, since Triton loads vectors with fewer elements than the CTA has threads in
    the layout of the state, of which each thread has many rows.
    """
    back = tl.arange(0, WIDTH_TILE)[:, None]  # tokens before this one
    at_input = convs + (position + WIDTH - back) % WIDTH * CHANNELS + channel[None, :]
    at_token = qkv + back * 0 + channel[None, :]
    token = tl.load(at_token, mask=back == 0, other=0.0)
    # a sequence has no inputs before its first token
    is_input = (back > 0) & (back < WIDTH) & (back <= position)
    found = tl.load(at_input, mask=is_input, other=0.0)
    at_weight = conv + (WIDTH - 1 - back) * CHANNELS + channel[None, :]
    weight = tl.load(at_weight, mask=back < WIDTH, other=0.0)
    inputs = found.to(tl.float32) + token.to(tl.float32)  # one of them is 0
    return inputs * weight.to(tl.float32), inputs


@triton.jit
def _store_inputs(
    convs,  # [W, C], of the row's sequence
    kept_convs,  # [W, C]: where it is saved
    is_kept,
    inputs,  # [WIDTH_TILE, D], from the token backwards
    channel,  # int32[D]
    position,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Store the token in its place, and if the sequence is saved all inputs there."""
    back = tl.arange(0, WIDTH_TILE)[:, None]
    inputs = inputs.to(convs.dtype.element_ty)
    at = (position + WIDTH - back) % WIDTH * CHANNELS + channel[None, :]
    tl.store(convs + at, inputs, mask=back == 0)
    tl.store(kept_convs + at, inputs, mask=(back < WIDTH) & is_kept)


@triton.jit
def _unit(x):  # float32[D]
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _decode(
    qkv,  # [B, C]
    gates,  # [B, V + G]
    z,  # [B, V * Dv]
    conv,  # [W, C]
    decay,  # float32[V + G]
    norm,  # [Dv]
    states,  # float32[P, V, Dk, Dv]
    convs,  # [P, W, C]
    positions,  # int32[B]
    rows,  # int32[B]
    keeps,  # int32[B]
    out,  # [B, V * Dv]
    EPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,  # K
    HEADS: tl.constexpr,  # V
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    WIDTH: tl.constexpr,  # W
    WIDTH_TILE: tl.constexpr,  # at least W
    BY_CHANNEL: tl.constexpr,
    SIGMOID: tl.constexpr,  # the activation of the gate of the output; else SiLU
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    own = tl.load(rows + row).to(tl.int64)  # offsets exceed int32
    kept_row = tl.load(keeps + row).to(tl.int64)
    is_kept = kept_row != own
    position = tl.load(positions + row)
    keys = tl.arange(0, KEY_DIM)
    values = tl.arange(0, VALUE_DIM)
    in_state = head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    at_state = states + own * (HEADS * KEY_DIM * VALUE_DIM) + in_state
    is_old = (keys >= 0)[:, None] & (position > 0)
    state = tl.load(at_state, mask=is_old, other=0.0)

    qkv += row * CHANNELS
    kept_convs = convs + kept_row * (WIDTH * CHANNELS)
    convs += own * (WIDTH * CHANNELS)
    at_q = head // (HEADS // KEY_HEADS) * KEY_DIM + keys
    at_k = KEY_HEADS * KEY_DIM + at_q
    at_v = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    # all loads come before the first sum over threads, so that they are in flight together
    q, q_inputs = _taps(qkv, conv, convs, at_q, position, CHANNELS, WIDTH, WIDTH_TILE)  # type: ignore[misc]
    k, k_inputs = _taps(qkv, conv, convs, at_k, position, CHANNELS, WIDTH, WIDTH_TILE)  # type: ignore[misc]
    v, v_inputs = _taps(qkv, conv, convs, at_v, position, CHANNELS, WIDTH, WIDTH_TILE)  # type: ignore[misc]
    if BY_CHANNEL:  # a step for each component of keys
        at_step = HEADS + head * KEY_DIM + keys
        gates += row * (HEADS + HEADS * KEY_DIM)
    else:
        at_step = HEADS + head
        gates += row * (2 * HEADS)
    beta = tl.load(gates + head).to(tl.float32)
    step = tl.load(gates + at_step).to(tl.float32) + tl.load(decay + at_step)
    rate = tl.load(decay + head)
    at_out = (row * HEADS + head) * VALUE_DIM + values
    scale = tl.load(norm + values).to(tl.float32)
    gate = tl.load(z + at_out).to(tl.float32)

    q = _unit(_silu(tl.sum(q, 0))) * KEY_DIM**-0.5
    k = _unit(_silu(tl.sum(k, 0)))
    v = _silu(tl.sum(v, 0))
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    kept = tl.exp(-tl.exp(rate) * softplus)
    if BY_CHANNEL:
        state *= kept[:, None]
        kept = 1.0

    # Both products with the state before the change, so that their sums are one reduction apart
    # from each other; the change adds (q . k) times itself to the output.
    of_k = tl.sum(state * k[:, None], 0) * kept
    of_q = tl.sum(state * q[:, None], 0) * kept
    change = (v - of_k) * tl.sigmoid(beta)
    result = of_q + tl.sum(q * k, 0) * change
    state = state * kept + k[:, None] * change[None, :]
    tl.store(at_state, state)
    at_kept = states + kept_row * (HEADS * KEY_DIM * VALUE_DIM) + in_state
    tl.store(at_kept, state, mask=(keys >= 0)[:, None] & is_kept)
    _store_inputs(convs, kept_convs, is_kept, q_inputs, at_q, position, CHANNELS, WIDTH, WIDTH_TILE)
    _store_inputs(convs, kept_convs, is_kept, k_inputs, at_k, position, CHANNELS, WIDTH, WIDTH_TILE)
    _store_inputs(convs, kept_convs, is_kept, v_inputs, at_v, position, CHANNELS, WIDTH, WIDTH_TILE)
    gate = tl.sigmoid(gate) if SIGMOID else _silu(gate)
    result *= tl.rsqrt(tl.sum(result * result, 0) / VALUE_DIM + EPS) * scale * gate
    tl.store(out + at_out, result.to(out.dtype.element_ty))


def delta_decode(args: DeltaDecodeArgs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``delta_decode.api``."""
    _, heads, key_dim, value_dim = args.states.shape
    # jax-triton updates a Ref in place
    states, convs = jax.new_ref(args.states), jax.new_ref(args.convs)
    out = jt.triton_call(
        args.qkv,
        args.gates,
        args.z,
        args.conv,
        args.decay,
        args.norm,
        states,
        convs,
        args.positions,
        args.rows,
        args.rows if args.keeps is None else args.keeps,
        kernel=_decode,
        out_type=jax.ShapeDtypeStruct(args.z.shape, args.qkv.dtype),
        grid=(heads, len(args.rows)),
        num_warps=launch.num_warps(args),
        num_stages=1,
        EPS=args.eps,
        KEY_HEADS=args.num_key_heads,
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=len(args.conv),
        WIDTH_TILE=power_of_two(len(args.conv)),
        BY_CHANNEL=args.by_channel,
        SIGMOID=args.z_act == "sigmoid",
    )
    return out, jax.freeze(states), jax.freeze(convs)
