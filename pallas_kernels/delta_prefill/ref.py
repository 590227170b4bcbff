"""The definition of delta_prefill: the recurrence of the gated delta rule, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaPrefillArgs:
    """The arguments of ``delta_prefill``. Value head j uses key head j // (V / K)."""

    q: jax.Array  # [T, K, Dk]
    k: jax.Array  # [T, K, Dk]
    v: jax.Array  # [T, V, Dv]
    # at most 0; of a head's whole state, or of its rows, which are the components of keys
    log_decay: jax.Array  # float32[T, V] or float32[T, V, Dk]
    beta: jax.Array  # float32[T, V]
    states: jax.Array  # float32[P, V, Dk, Dv]
    query_start_loc: jax.Array  # int32[R + 1]
    begins: jax.Array  # int32[R]: the position of each row's first token; 0: the state is zeros
    reads: jax.Array  # int32[R]: where the state before that token is
    writes: jax.Array  # int32[R]: where the state after the last token goes
    # states that are stored besides: after so many tokens of the row, a multiple of ``CHUNK``; 0 is
    # none
    save_tokens: jax.Array | None = None  # int32[R, N]
    save_rows: jax.Array | None = None  # int32[R, N]

    @property
    def by_channel(self) -> bool:
        """True if each component of keys has a decay of its own, as in Kimi Linear."""
        return self.log_decay.ndim == 3


def delta_prefill(args: DeltaPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, V, Dv], the states
    """Tokens of no row yield zeros, and a row without tokens stores nothing."""
    q, k, v, decay, beta, states = (
        np.asarray(x, np.float64)
        for x in (args.q, args.k, args.v, args.log_decay, args.beta, args.states)
    )
    each = v.shape[1] // q.shape[1]
    q, k = np.repeat(q, each, axis=1), np.repeat(k, each, axis=1)
    before, out = states.copy(), np.zeros(v.shape)
    starts = np.asarray(args.query_start_loc)
    for row in np.flatnonzero(np.diff(starts)):
        state = before[args.reads[row]] if args.begins[row] else np.zeros(states.shape[1:])
        saved = {} if args.save_tokens is None else _saves(args, int(row))
        for token in range(starts[row], starts[row + 1]):
            state, out[token] = step(state, q[token], k[token], v[token], decay[token], beta[token])
            if (passed := token + 1 - starts[row]) in saved:
                states[saved[passed]] = state
        states[args.writes[row]] = state
    return jnp.asarray(out, args.v.dtype), jnp.asarray(states, args.states.dtype)


def step(
    state: np.ndarray,  # [V, Dk, Dv]
    q: np.ndarray,  # [V, Dk]
    k: np.ndarray,  # [V, Dk]
    v: np.ndarray,  # [V, Dv]
    log_decay: np.ndarray,  # [V] or [V, Dk]
    beta: np.ndarray,  # [V]
) -> tuple[np.ndarray, np.ndarray]:  # [V, Dk, Dv], [V, Dv]
    """The state and the output after one token."""
    state = state * np.exp(log_decay).reshape(len(state), -1, 1)
    change = (v - np.einsum("vkd,vk->vd", state, k)) * beta[:, None]
    state = state + k[:, :, None] * change[:, None]
    return state, np.einsum("vkd,vk->vd", state, q)


def _saves(args: DeltaPrefillArgs, row: int) -> dict[int, int]:
    """Where a row's state is stored after so many tokens."""
    counts, rows = np.asarray(args.save_tokens)[row], np.asarray(args.save_rows)[row]
    return {int(count): int(to) for count, to in zip(counts, rows, strict=True) if count}
