"""The rows of a step in chunks of 64 tokens, and a scan from each chunk's state to the next one's.

Plain XLA, for recurrences that compute a chunk at once. Differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens that are computed at a time; states are saved between chunks


class RowIndices(Protocol):
    """Where rows begin, and which states they read and store; the arguments of ops have them."""

    @property
    def query_start_loc(self) -> jax.Array:  # int32[R + 1]
        """The first token of each row."""
        ...

    @property
    def begins(self) -> jax.Array:  # int32[R]
        """The position of each row's first token; 0: a new sequence, whose state is zeros."""
        ...

    @property
    def reads(self) -> jax.Array:  # int32[R]
        """Where the state before that token is."""
        ...

    @property
    def writes(self) -> jax.Array:  # int32[R]
        """Where the state after the last token goes."""
        ...

    @property
    def save_tokens(self) -> jax.Array | None:  # int32[R, N]
        """After how many tokens, a multiple of ``CHUNK``, states are stored besides; 0 is none."""
        ...

    @property
    def save_rows(self) -> jax.Array | None:  # int32[R, N]
        """Where they go."""
        ...


class Chunks(NamedTuple):
    """The chunks of all rows, in order, and after them empty ones."""

    row: jax.Array  # int32[N]; R if it is empty
    number: jax.Array  # int32[N]: within its row
    tokens: jax.Array  # int32[N, CHUNK]: indices in the step
    is_token: jax.Array  # bool[N, CHUNK]
    first: jax.Array  # int32[R + 1]: the number of chunks before each row

    def take(self, x: jax.Array) -> jax.Array:  # [T, ...] -> float32[N, CHUNK, ...]
        """Values of the tokens of chunks; zeros where there is no token."""
        shape = (*self.is_token.shape, *(1,) * (x.ndim - 1))
        return jnp.where(self.is_token.reshape(shape), x[self.tokens], 0).astype(jnp.float32)


def chunks_of(query_start_loc: jax.Array, num_tokens: int) -> Chunks:
    """The chunks of rows that have these first tokens."""
    num_rows = len(query_start_loc) - 1
    counts = (query_start_loc[1:] - query_start_loc[:-1] + CHUNK - 1) // CHUNK
    first = jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(counts).astype(jnp.int32)))
    index = jnp.arange(num_tokens // CHUNK + num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(first[1:], index, side="right").astype(jnp.int32)
    of = jnp.minimum(row, num_rows - 1)
    number = index - first[of]
    tokens = (query_start_loc[of] + number * CHUNK)[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
    is_token = (row < num_rows)[:, None] & (tokens < query_start_loc[of + 1][:, None])
    return Chunks(row, number, jnp.minimum(tokens, num_tokens - 1), is_token, first)


# From the state [V, ...] before a chunk, and a chunk of a type of its own: the state after it, and
# its outputs [V, CHUNK, ...].
type Advance = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


def scan_chunks(
    rows: RowIndices,
    states: jax.Array,  # float32[P, V, ...]
    chunks: Chunks,
    advance: Advance,
    each: Any,
) -> tuple[jax.Array, jax.Array]:  # [N, V, CHUNK, ...], float32[P, V, ...]
    """Advance over the chunks, as ``each`` stacks them, from state to state.

    Returns the outputs, and the states with those that rows store.
    """

    class Carry(NamedTuple):
        state: jax.Array  # float32[V, ...]
        states: jax.Array  # float32[P, V, ...]

    def scan(carry: Carry, one: tuple[Any, ...]) -> tuple[Carry, jax.Array]:
        chunk, (is_first, is_new, read), end = one
        found = jnp.where(is_new, 0, carry.states[read])
        state, out = advance(jnp.where(is_first, found, carry.state), chunk)
        states = carry.states
        for to in end:
            states = states.at[to].set(state, mode="drop")
        return Carry(state, states), out

    empty, borders = jnp.zeros(states.shape[1:], jnp.float32), _borders(rows, len(states), chunks)
    carry, out = jax.lax.scan(scan, Carry(empty, states), (each, *borders))
    return out, carry.states


def by_token(
    out: jax.Array,  # [N, V, CHUNK, ...]
    query_start_loc: jax.Array,  # int32[R + 1]
    chunks: Chunks,
    num_tokens: int,
) -> jax.Array:  # [T, V, ...]
    """The outputs of chunks in the order of tokens; zeros for tokens of no row."""
    tokens, num_rows = jnp.arange(num_tokens, dtype=jnp.int32), len(query_start_loc) - 1
    row = jnp.searchsorted(query_start_loc[1:], tokens, side="right")
    of = jnp.minimum(row, num_rows - 1)
    within = tokens - query_start_loc[of]
    found = out[chunks.first[of] + within // CHUNK, :, within % CHUNK]
    is_token = (row < num_rows).reshape(-1, *(1,) * (found.ndim - 1))
    return jnp.where(is_token, found, 0)


def _borders(
    rows: RowIndices, num_states: int, chunks: Chunks
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """How the state of each chunk begins, and the rows to which it goes at the end; P: none."""
    num_rows, nowhere = len(rows.begins), num_states
    of = jnp.minimum(chunks.row, num_rows - 1)
    starts = (chunks.number == 0, rows.begins[of] == 0, rows.reads[of])
    is_last = (chunks.row < num_rows) & (
        chunks.number == chunks.first[of + 1] - chunks.first[of] - 1
    )
    ends = (jnp.where(is_last, rows.writes[of], nowhere),)
    if rows.save_tokens is not None and rows.save_rows is not None:
        saved = (chunks.first[:-1, None] + rows.save_tokens // CHUNK - 1).reshape(-1)
        saved = jnp.where(rows.save_tokens.reshape(-1) > 0, saved, len(of))
        empty = jnp.full(len(of), nowhere, jnp.int32)
        ends += (empty.at[saved].set(rows.save_rows.reshape(-1), mode="drop"),)
    return starts, ends
