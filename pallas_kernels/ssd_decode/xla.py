"""ssd_decode in plain XLA, for all rows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.short_conv.xla import short_conv_decode
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill.xla import tokens_of


@jax.jit  # one trace serves every layer
def ssd_decode(
    args: SsdDecodeArgs,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [B, H, P]
    """See ``ssd_decode.api``."""
    mixed, convs = args.mixed, args.convs
    if args.conv is not None and convs is not None:
        where = (convs, args.positions, args.rows)
        mixed, convs = short_conv_decode(mixed, args.conv, args.conv_bias, *where, silu=True)
    tokens = tokens_of(mixed, args.steps, args.decay, args.states, args.limits)
    x, b, c, steps = (one.astype(jnp.float32) for one in tokens)
    each = x.shape[1] // b.shape[1]
    b, c = jnp.repeat(b, each, axis=1), jnp.repeat(c, each, axis=1)
    is_new = (args.positions == 0)[:, None, None, None]
    found = jnp.where(is_new, 0, args.states[args.rows])
    # Where a decay is 1 - 4e-8, as in the last layer of lightning attention, the state times the
    # decay would be rounded to the same side at every token: 8e-5 of it after 4,096 tokens.
    lost = found * jnp.expm1(-jnp.exp(args.decay[0]) * steps)[..., None, None]
    state = found + (lost + (steps[..., None] * x)[..., None] * b[:, :, None])
    out = jnp.einsum("BHPN,BHN->BHP", state, c, precision="highest")
    out = (out + args.decay[2, :, None] * x).astype(args.mixed.dtype)
    states = args.states.at[args.rows].set(state)
    if args.keeps is None:
        return out, states, convs

    def kept(stored: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        states, convs = stored
        convs = None if convs is None else convs.at[args.keeps].set(convs[args.rows])
        return states.at[args.keeps].set(state), convs

    # few steps save any, and a scatter moves all states
    is_kept = jnp.any(args.keeps != args.rows)
    return out, *jax.lax.cond(is_kept, kept, lambda stored: stored, (states, convs))
