"""The selective scan of Mamba in plain XLA: one token of each row, and prompts in chunks.

A token with the step d, the input x, the key b [N] and the query c [N], which are those of its
channel's head, changes a channel's state s [N] to exp(a d) s + d x b, where a [N] are the channel's
rates; its output is s.c. Within a chunk an associative scan combines these maps, so no decay is
divided by another one. Differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.chunk_scan import RowIndices, by_token, chunks_of, scan_chunks


class ScanTokens(NamedTuple):
    """The inputs of tokens."""

    x: jax.Array  # [T, I]
    b: jax.Array  # [T, H, N]: of each head, which has I / H consecutive channels
    c: jax.Array  # [T, H, N]
    steps: jax.Array  # float32[T, I]
    rates: jax.Array  # float32[I, N], below 0

    def take(self, part: slice) -> ScanTokens:
        """Some of the tokens."""
        x, b, c, steps = (one[part] for one in (self.x, self.b, self.c, self.steps))
        return ScanTokens(x, b, c, steps, self.rates)


@jax.jit  # one trace serves every layer
def selective_decode(
    tokens: ScanTokens,
    states: jax.Array,  # float32[S, I, N]
    positions: jax.Array,  # int32[B]
    rows: jax.Array,  # int32[B]
) -> tuple[jax.Array, jax.Array]:  # float32[B, I], float32[S, I, N]
    """One token of each row, whose state is at ``rows`` before and after."""
    found = jnp.where((positions == 0)[:, None, None], 0, states[rows])
    decay, addend = _maps(tokens)
    state = found * decay + addend
    return _outputs(state, tokens.c), states.at[rows].set(state)


@jax.jit
def selective_prefill(
    tokens: ScanTokens,
    states: jax.Array,  # float32[S, I, N]
    rows: RowIndices,
) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I, N]
    """The tokens of prompts; steps of no token are 0, so that nothing changes."""
    chunks = chunks_of(rows.query_start_loc, len(tokens.x))
    each = (*map(chunks.take, (tokens.x, tokens.b, tokens.c, tokens.steps)),)

    def advance(
        state: jax.Array, one: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:  # [I, N], [I, CHUNK]
        x, b, c, steps = one
        maps = _maps(ScanTokens(x, b, c, steps, tokens.rates))
        since, own = jax.lax.associative_scan(_after, maps)
        all_states = own + since * state
        return all_states[-1], _outputs(all_states, c).T

    out, states = scan_chunks(rows, states, chunks, advance, each)
    return by_token(out, rows.query_start_loc, chunks, len(tokens.x)), states


def _maps(tokens: ScanTokens) -> tuple[jax.Array, jax.Array]:  # float32[T, I, N] each
    """The factor and the addend of the state at each token."""
    x, b = tokens.x.astype(jnp.float32), tokens.b.astype(jnp.float32)
    decay = jnp.exp(tokens.rates * tokens.steps[..., None])
    each = (*b.shape[:2], x.shape[1] // b.shape[1], b.shape[2])  # [T, H, I / H, N]
    b = jnp.broadcast_to(b[:, :, None], each).reshape(decay.shape)
    return decay, (tokens.steps * x)[..., None] * b


def _after(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """One map, then another one."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def _outputs(
    states: jax.Array,  # float32[T, I, N]
    c: jax.Array,  # [T, H, N]
) -> jax.Array:  # float32[T, I]
    by_head = states.reshape(*c.shape[:2], -1, c.shape[2])
    out = jnp.einsum("THPN,THN->THP", by_head, c.astype(jnp.float32), precision="highest")
    return out.reshape(states.shape[:2])
