"""ssd_prefill in plain XLA: chunks of 64 tokens in parallel, then a scan over their states.

With L the sum of -a d from a chunk's begin, the output of token i is exp(L_i) S c_i, of the state S
before the chunk, plus the sum over j <= i of exp(L_i - L_j) d_j (b_j.c_i) x_j. (Dao and Gu 2024,
arXiv:2405.21060, section 6.) Differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.chunk_scan import CHUNK, by_token, chunks_of, scan_chunks
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs, num_groups


class SsdTokens(NamedTuple):
    """The inputs of tokens."""

    x: jax.Array  # [T, H, P]
    b: jax.Array  # [T, G, N]; heads h of H have group h // (H / G)
    c: jax.Array  # [T, G, N]
    steps: jax.Array  # float32[T, H]


def tokens_of(
    mixed: jax.Array,  # [T, C]
    steps: jax.Array | None,  # [T, H]
    decay: jax.Array,  # float32[3, H]
    states: jax.Array,  # float32[S, H, P, N]
    limits: tuple[float, float],
) -> SsdTokens:
    """The inputs of tokens, as ``SsdPrefillArgs`` has them."""
    _, heads, width, state_dim = states.shape
    tokens, inner, keys = len(mixed), heads * width, num_groups(mixed, states) * state_dim
    x, b, c = jnp.split(mixed, (inner, inner + keys), axis=1)
    b, c = (one.reshape(tokens, -1, state_dim) for one in (b, c))
    if steps is None:
        sizes = jnp.ones((tokens, heads), jnp.float32)
    else:
        sizes = jnp.clip(jax.nn.softplus(steps.astype(jnp.float32) + decay[1]), *limits)
    return SsdTokens(x.reshape(tokens, heads, width), b, c, sizes)


def workspace_bytes(args: SsdPrefillArgs) -> int:
    """A bound on the memory that a call allocates: for each chunk and head, in float32, some 4
    matrices of chunk by chunk, 6 of keys and 6 of inputs; the states are updated in place.
    """
    _, heads, width, state_dim = args.states.shape
    chunks = args.mixed.shape[0] // CHUNK + args.begins.shape[0]
    return 4 * chunks * CHUNK * heads * (4 * CHUNK + 6 * state_dim + 6 * width)


@jax.jit  # one trace serves every layer
def ssd_prefill(args: SsdPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, H, P], the states
    """See ``ssd_prefill.api``; what needs no state is computed for all chunks at once."""
    tokens = tokens_of(args.mixed, args.steps, args.decay, args.states, args.limits)
    chunks = chunks_of(args.query_start_loc, len(args.mixed))
    heads, groups = tokens.x.shape[1], tokens.b.shape[1]

    def by_head(one: jax.Array) -> jax.Array:  # [T, H, ...] -> float32[C, H, CHUNK, ...]
        return jnp.moveaxis(chunks.take(one), 2, 1)

    def of_heads(one: jax.Array) -> jax.Array:  # [C, G, ...] -> [C, H, ...]
        return jnp.repeat(one, heads // groups, axis=1)

    x, b, c = by_head(tokens.x), by_head(tokens.b), by_head(tokens.c)
    steps = by_head(tokens.steps)  # of no token 0, so that nothing changes
    since = jnp.cumsum(-jnp.exp(args.decay[0])[:, None] * steps, axis=-1)  # L, [C, H, CHUNK]
    at = jnp.arange(CHUNK)
    # masked before exp: a difference above the diagonal is positive and may overflow
    seen = at[:, None] >= at[None]
    between = jnp.exp(jnp.where(seen, since[..., :, None] - since[..., None, :], -jnp.inf))
    moved = x * steps[..., None]
    within = of_heads(_product("CGiN,CGjN->CGij", c, b)) * between
    until = jnp.exp(since[..., -1:] - since)
    each = (
        _product("CHij,CHjP->CHiP", within, moved) + args.decay[2, :, None, None] * x,
        _product("CHjP,CHjN->CHPN", moved * until[..., None], of_heads(b)),
        of_heads(c) * jnp.exp(since)[..., None],
        jnp.exp(since[..., -1]),
    )

    def advance(
        state: jax.Array, one: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:  # [H, P, N], [H, CHUNK, P]
        own, added, queries, decay = one
        out = own + _product("HiN,HPN->HiP", queries, state)
        return state * decay[:, None, None] + added, out

    out, states = scan_chunks(args, args.states, chunks, advance, each)
    out = by_token(out, args.query_start_loc, chunks, len(args.mixed))
    return out.astype(args.mixed.dtype), states


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest")
