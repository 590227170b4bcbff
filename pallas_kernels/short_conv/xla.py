"""short_conv in plain XLA: one array in which each row's tokens follow the inputs before them.

There a tap is a shift of the whole array, so its inputs need no gather of their own. Whether an
input is of the row or from the state, it is in the same sum. Differentiable.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.short_conv.ref import ShortConvArgs


def workspace_bytes(args: ShortConvArgs) -> int:
    """A bound on the memory that a call allocates: two arrays of all inputs, and the outputs of
    both; ``kept`` is updated in place.
    """
    width, channels = args.weights.shape
    inputs = args.x.shape[0] + (width - 1) * args.begins.shape[0]
    return 4 * inputs * channels * args.x.dtype.itemsize


@jax.jit  # one trace serves every layer
def short_conv(args: ShortConvArgs) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """See ``short_conv.api``."""
    width, channels = args.weights.shape
    x, starts, num_rows = args.x[:, :channels], args.query_start_loc, len(args.begins)
    num_tokens, earlier = len(x), width - 1
    # of each row in turn the inputs before its first token, and its tokens
    firsts = starts[:-1] + earlier * jnp.arange(1, num_rows + 1, dtype=jnp.int32)  # the first token
    at = jnp.arange(num_tokens + earlier * num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(firsts - earlier, at, side="right") - 1
    number = at - firsts[row]
    of_before, of_x = (row + 1) * earlier + number, num_rows * earlier + at - (row + 1) * earlier
    inputs = jnp.concatenate((_before(args), x))[jnp.where(number < 0, of_before, of_x)]
    shifts = (inputs[tap : len(inputs) - earlier + tap] for tap in range(width))
    total = jnp.zeros((), jnp.float32)
    for weight, shifted in zip(args.weights.astype(jnp.float32), shifts, strict=True):
        total = total + weight * shifted.astype(jnp.float32)
    # of a token and the W - 1 inputs after it
    mixed = _activated(total, args.bias, silu=args.silu).astype(x.dtype)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts[1:], token, side="right")
    out = mixed[jnp.minimum(token + earlier * row, len(mixed) - 1)]
    out = jnp.where((row < num_rows)[:, None], out, 0)
    return out, _stored(args, inputs, firsts)


def short_conv_decode(
    x: jax.Array,  # [B, C]
    weights: jax.Array,  # [W, C]
    bias: jax.Array | None,  # [C]
    kept: jax.Array,  # [P, W, C]: see ``ShortConvArgs``
    positions: jax.Array,  # int32[B]
    rows: jax.Array,  # int32[B]
    *,
    silu: bool,
) -> tuple[jax.Array, jax.Array]:  # float32[B, C], [P, W, C]
    """The same of one token in each of the rows, whose inputs are at ``rows`` before and after."""
    width = len(weights)
    taps, total = weights.astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
    for tap in range(width - 1):
        position = positions - (width - 1 - tap)
        found = jnp.where((position >= 0)[:, None], kept[rows, position % width], 0)
        total += taps[tap] * found.astype(jnp.float32)
    total += taps[-1] * x.astype(jnp.float32)
    kept = kept.at[rows, positions % width].set(x.astype(kept.dtype))
    return _activated(total, bias, silu=silu), kept


def _activated(total: jax.Array, bias: jax.Array | None, *, silu: bool) -> jax.Array:
    """The output of the taps' sum, in float32."""
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return jax.nn.silu(total) if silu else total


def _before(args: ShortConvArgs) -> jax.Array:  # [R * (W - 1), C]
    """The W - 1 inputs before each row's first token; zeros before a sequence begins."""
    width, channels = args.weights.shape
    positions = args.begins[:, None] - jnp.arange(width - 1, 0, -1)
    found = args.kept[args.reads[:, None], positions % width]
    return jnp.where((positions >= 0)[..., None], found, 0).reshape(
        len(positions) * (width - 1), channels
    )


def _stored(
    args: ShortConvArgs,
    inputs: jax.Array,  # [R * (W - 1) + T, C]
    firsts: jax.Array,  # int32[R]: where each row's first token is in ``inputs``
) -> jax.Array:  # [P, W, C]
    """The state with the inputs that rows store."""
    starts, (nowhere, width, _) = args.query_start_loc, args.kept.shape

    def put(kept: jax.Array, counts: jax.Array, to: jax.Array) -> jax.Array:  # int32[R, N] each
        newest = args.begins[:, None, None] + counts[..., None] - 1
        back = (newest - jnp.arange(width)) % width
        at = firsts[:, None, None] + counts[..., None] - 1 - back
        to = jnp.where(counts > 0, to, nowhere)
        return kept.at[to].set(inputs[jnp.maximum(at, 0)], mode="drop")

    kept = put(args.kept, (starts[1:] - starts[:-1])[:, None], args.writes[:, None])
    if args.save_tokens is not None and args.save_rows is not None:
        kept = put(kept, args.save_tokens, args.save_rows)
    return kept
