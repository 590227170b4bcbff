"""The state space duality of Mamba-2 in plain XLA: one token of each row, and prompts in chunks.

A token with the step d, the input x [P], the key b [N] and the query c [N] changes a head's state S
[P, N] to exp(a d) S + d x b^T, and its output is S c. With L the sum of a d from a chunk's begin,
the output of token i is exp(L_i) S c_i, of the state S before the chunk, plus the sum over j <= i
of exp(L_i - L_j) d_j (b_j.c_i) x_j. (Dao and Gu 2024, arXiv:2405.21060, section 6.) Differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows, StepContext
from jaxinfer.nn.mixers.recurrent import PromptRows, with_kept
from pallas_kernels.lib.chunk_scan import CHUNK, RowIndices, by_token, chunks_of, scan_chunks


class SsdTokens(NamedTuple):
    """The inputs of tokens."""

    x: jax.Array  # [T, H, P]
    b: jax.Array  # [T, G, N]; heads h of H have group h // (H / G)
    c: jax.Array  # [T, G, N]
    steps: jax.Array  # float32[T, H]
    rates: jax.Array  # float32[H], below 0

    def part(self, tokens: slice) -> SsdTokens:
        """Those of some tokens."""
        x, b, c, steps = (one[tokens] for one in (self.x, self.b, self.c, self.steps))
        return SsdTokens(x, b, c, steps, self.rates)


def ssd(
    tokens: SsdTokens,
    states: jax.Array,  # float32[S, H, P, N]
    rows: Rows,
    ctx: StepContext,
) -> tuple[jax.Array, jax.Array]:  # float32[T, H, P], float32[S, H, P, N]
    """The outputs of a step's tokens, those of decode rows first, and the new states.

    ``rows`` are those of the context, or ``recurrent.whole_sequence``.
    """
    d, parts = ctx.num_decodes, []
    if d:
        positions, slots = ctx.positions[:d], rows.slots[:d]
        out, states = ssd_decode(tokens.part(slice(d)), states, positions, slots)
        states = with_kept(states, rows, d)
        parts.append(out)
    if len(tokens.x) > d:
        of_prompts = PromptRows.of(rows.prompts(d))
        out, states = ssd_prefill(tokens.part(slice(d, None)), states, of_prompts)
        parts.append(out)
    return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), states


@jax.jit  # one trace serves every layer
def ssd_decode(
    tokens: SsdTokens,
    states: jax.Array,  # float32[S, H, P, N]
    positions: jax.Array,  # int32[B]
    rows: jax.Array,  # int32[B]
) -> tuple[jax.Array, jax.Array]:  # float32[B, H, P], float32[S, H, P, N]
    """One token of each row, whose state is at ``rows`` before and after."""
    x, b, c, steps, rates = (one.astype(jnp.float32) for one in tokens)
    each = x.shape[1] // b.shape[1]
    b, c = jnp.repeat(b, each, axis=1), jnp.repeat(c, each, axis=1)
    found = jnp.where((positions == 0)[:, None, None, None], 0, states[rows])
    # Where a decay is 1 - 4e-8, as in the last layer of lightning attention, the state times the
    # decay would be rounded to the same side at every token: 8e-5 of it after 4,096 tokens.
    lost = found * jnp.expm1(rates * steps)[..., None, None]
    state = found + (lost + (steps[..., None] * x)[..., None] * b[:, :, None])
    out = _product("BHPN,BHN->BHP", state, c)
    return out, states.at[rows].set(state)


@jax.jit
def ssd_prefill(
    tokens: SsdTokens,
    states: jax.Array,  # float32[S, H, P, N]
    rows: RowIndices,
) -> tuple[jax.Array, jax.Array]:  # float32[T, H, P], float32[S, H, P, N]
    """The tokens of prompts; what needs no state is computed for all chunks at once."""
    chunks = chunks_of(rows.query_start_loc, len(tokens.x))
    heads, groups = tokens.x.shape[1], tokens.b.shape[1]

    def by_head(one: jax.Array) -> jax.Array:  # [T, H, ...] -> float32[C, H, CHUNK, ...]
        return jnp.moveaxis(chunks.take(one), 2, 1)

    def of_heads(one: jax.Array) -> jax.Array:  # [C, G, ...] -> [C, H, ...]
        return jnp.repeat(one, heads // groups, axis=1)

    x, b, c = by_head(tokens.x), by_head(tokens.b), by_head(tokens.c)
    steps = by_head(tokens.steps)  # of no token 0, so that nothing changes
    since = jnp.cumsum(tokens.rates[:, None] * steps, axis=-1)  # L, [C, H, CHUNK]
    at = jnp.arange(CHUNK)
    # masked before exp: a difference above the diagonal is positive and may overflow
    seen = at[:, None] >= at[None]
    between = jnp.exp(jnp.where(seen, since[..., :, None] - since[..., None, :], -jnp.inf))
    x = x * steps[..., None]
    within = of_heads(_product("CGiN,CGjN->CGij", c, b)) * between
    until = jnp.exp(since[..., -1:] - since)
    each = (
        _product("CHij,CHjP->CHiP", within, x),
        _product("CHjP,CHjN->CHPN", x * until[..., None], of_heads(b)),
        of_heads(c) * jnp.exp(since)[..., None],
        jnp.exp(since[..., -1]),
    )

    def advance(
        state: jax.Array, one: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:  # [H, P, N], [H, CHUNK, P]
        own, added, queries, decay = one
        out = own + _product("HiN,HPN->HiP", queries, state)
        return state * decay[:, None, None] + added, out

    out, states = scan_chunks(rows, states, chunks, advance, each)
    return by_token(out, rows.query_start_loc, chunks, len(tokens.x)), states


def grouped_rms_norm(
    x: jax.Array,  # float32[T, I]
    weight: jax.Array,  # [I]
    groups: int,
    eps: float,
    ctx: StepContext | None,
) -> jax.Array:  # float32[T, I]
    """An RMS norm of each of so many equal parts of the columns.

    With a context each of its devices has an equal part of every group.
    """
    parts = x.reshape(len(x), groups, -1)
    mean = jnp.mean(jnp.square(parts), axis=-1)
    mean = mean if ctx is None else ctx.mean_across(mean)
    parts = parts * jax.lax.rsqrt(mean + eps)[..., None]
    return parts.reshape(x.shape) * weight.astype(jnp.float32)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest")
