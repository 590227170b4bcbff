"""Windows of tokens that are compressed into one entry each: means with the weights of a softmax.

A component of an entry is the mean of the window's values, weighted by the softmax of their gates
(DeepSeek-V4, 2026). An unfinished window is kept as a running softmax, the *triple* of its largest
gate, the sum of its weights and the weighted sum of its values, whose sum is 0 if it has no token.
In shapes: W windows of N tokens, S series of C components each; with two series a window's entry is
made of its second one and of the first one of the window before it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows
from jaxinfer.nn.state import read_states, stored_states
from pallas_kernels.kv_append.xla import written

_NOTHING = -1e30  # the largest gate of no token


class Windows(NamedTuple):
    """The windows that a step's rows touch: one of each decode row, then those of prompts.

    Prompts' windows have the order of their rows, and unused ones follow.
    """

    number: jax.Array  # int32[D + W]: of a window in its sequence
    last: jax.Array  # int32[D + W]: the token that completes it; T if none in this step does
    row: jax.Array  # int32[W]: the prompt's row
    is_first: jax.Array  # bool[W]: whether it is its row's first one in the step
    tokens: jax.Array  # int32[W, N]: the tokens of prompts' windows
    is_token: jax.Array  # bool[W, N]: False outside the row
    first: jax.Array  # int32[R + 1]: the windows before each row's

    @property
    def num_decodes(self) -> int:
        """D: the decode rows."""
        return len(self.number) - len(self.row)


def windows_of(
    rows: Rows,
    positions: jax.Array,  # int32[T]
    num_decodes: int,
    size: int,
) -> Windows:
    """The windows of ``size`` tokens that the rows of a step touch."""
    d, count = num_decodes, len(positions)
    begins, starts = rows.begins[d:], rows.query_start_loc + d
    offset, num_rows = begins % size, len(begins)
    lens = starts[1:] - starts[:-1]
    counts = jnp.where(lens > 0, (offset + lens + size - 1) // size, 0)
    first = jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(counts).astype(jnp.int32)))
    # a row of n tokens touches at most n // size + 2
    index = jnp.arange((count - d) // size + 2 * num_rows if num_rows else 0, dtype=jnp.int32)
    row = jnp.searchsorted(first[1:], index, side="right").astype(jnp.int32)
    is_used, of = row < num_rows, jnp.minimum(row, max(num_rows - 1, 0))
    within = index - first[of]  # which of its row's
    tokens = (starts[of] - offset[of] + within * size)[:, None] + jnp.arange(size, dtype=jnp.int32)
    is_token = is_used[:, None] & (tokens >= starts[of][:, None])
    is_token &= tokens < starts[of + 1][:, None]
    number = begins[of] // size + within
    own, decodes = positions[:d], jnp.arange(d, dtype=jnp.int32)
    ends = jnp.where(rows.is_token[:d] & (own % size == size - 1), decodes, count)
    return Windows(
        number=jnp.concatenate((own // size, number)),
        last=jnp.concatenate((ends, jnp.where(is_token[:, -1], tokens[:, -1], count))),
        row=of,
        is_first=is_used & (within == 0),
        tokens=jnp.clip(tokens, 0, count - 1),
        is_token=is_token,
        first=first,
    )


def compressed(
    values: jax.Array,  # [T, S * C]
    gates: jax.Array,  # [T, S * C]
    bias: jax.Array,  # float32[N, S * C]
    states: jax.Array,  # float32[P, 2 * S - 1, 3, C]: see ``CompressorConfig.open_windows``
    windows: Windows,
    rows: Rows,
    positions: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:  # float32[D + W, C], float32[P, 2 * S - 1, 3, C]
    """The entries of windows, which count if the step completes them, and the new states."""
    d, size = windows.num_decodes, len(bias)
    series = (states.shape[1] + 1) // 2
    values, gates = values.astype(jnp.float32), gates.astype(jnp.float32)
    before = read_states(states, rows)  # [B, 2 * S - 1, 3, C]
    before, last = before[:, :series], before[:, series:]  # its second part has 0 or 1 triples
    parts = []
    if d:
        gate = (gates[:d] + bias[positions[:d] % size]).reshape(d, series, -1)
        one = jnp.stack((gate, jnp.ones_like(gate), values[:d].reshape(gate.shape)), axis=2)
        parts.append((_merged(before[:d], one), last[:d]))
    if len(windows.row):
        own = _triples(values[windows.tokens], gates[windows.tokens] + bias, windows.is_token)
        own = own.reshape(len(own), 3, series, -1).swapaxes(1, 2)  # [W, S, 3, C]
        is_first = windows.is_first[:, None, None, None]
        own = _merged(jnp.where(is_first, before[d:][windows.row], 0.0), own)
        shifted = jnp.pad(own[:-1, : series - 1], ((1, 0), *((0, 0),) * 3))
        parts.append((own, jnp.where(is_first, last[d:][windows.row], shifted)))
    own, last = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    whole = own[:, -1] if series == 1 else _merged(last[:, 0], own[:, -1])  # [D + W, 3, C]
    entries = whole[:, 2] / jnp.where(whole[:, 1] == 0, 1.0, whole[:, 1])
    is_whole = (windows.last < len(values))[:, None, None, None]
    kept = jnp.where(is_whole, own[:, : series - 1], last)
    after = jnp.concatenate((jnp.where(is_whole, 0.0, own), kept), axis=1)
    return entries, _stored(states, after, windows, rows, size)


def with_windows(
    pool: jax.Array,  # [P, S, H / pieces]
    entries: jax.Array,  # [D + W, H]
    windows: Windows,
    page_table: jax.Array,  # int32[B, M]
    num_tokens: int,  # of the step
    pieces: int = 1,
) -> jax.Array:  # [P, S, H / pieces]
    """The pool with the entries, in so many pieces, of the windows that the step completes.

    The barrier keeps XLA from copying it.
    """
    size, decodes = pool.shape[1], jnp.arange(windows.num_decodes, dtype=jnp.int32)
    rows = jnp.concatenate((decodes, len(decodes) + windows.row))
    at = windows.number[:, None] * pieces + jnp.arange(pieces, dtype=jnp.int32)  # [X, pieces]
    slots = page_table[rows[:, None], at // size] * size + at % size
    slots = jnp.where(windows.last[:, None] < num_tokens, slots, 0).reshape(-1)
    new = written(pool, entries.reshape(len(slots), -1), slots)
    return jax.lax.optimization_barrier(new)


def _stored(
    states: jax.Array,  # float32[P, ...]
    after: jax.Array,  # float32[D + W, ...]: the state after each window, or the row's end in it
    windows: Windows,
    rows: Rows,
    size: int,
) -> jax.Array:  # float32[P, ...]
    """The states with those of rows after their last tokens and where they are saved."""
    d = windows.num_decodes
    ends = jnp.concatenate((jnp.arange(d, dtype=jnp.int32), d + windows.first[1:] - 1))
    saved = None
    if rows.saves is not None:  # at borders of windows
        count = rows.begins[d:, None] % size + rows.saves.num_tokens  # int32[R, N]
        saved = after[d + windows.first[:-1, None] + jnp.maximum(count - 1, 0) // size]
    return stored_states(states, rows, after[jnp.maximum(ends, 0)], saved)


def _triples(
    values: jax.Array,  # float32[W, N, S * C]
    gates: jax.Array,  # float32[W, N, S * C]
    is_token: jax.Array,  # bool[W, N]
) -> jax.Array:  # float32[W, 3, S * C]
    """The triples of windows' tokens."""
    seen = is_token[..., None]
    most = jnp.max(jnp.where(seen, gates, _NOTHING), axis=1)
    p = jnp.where(seen, jnp.exp(jnp.where(seen, gates, _NOTHING) - most[:, None]), 0.0)
    return jnp.stack((most, p.sum(1), (p * jnp.where(seen, values, 0.0)).sum(1)), axis=1)


def _merged(
    a: jax.Array,  # float32[..., 3, C]
    b: jax.Array,  # float32[..., 3, C]
) -> jax.Array:  # float32[..., 3, C]
    """The triples of the tokens of both."""
    m_a, m_b = (jnp.where(x[..., 1, :] == 0, _NOTHING, x[..., 0, :]) for x in (a, b))
    most = jnp.maximum(m_a, m_b)
    of_a, of_b = jnp.exp(m_a - most)[..., None, :], jnp.exp(m_b - most)[..., None, :]
    sums = of_a * a[..., 1:, :] + of_b * b[..., 1:, :]
    return jnp.concatenate((most[..., None, :], sums), axis=-2)
