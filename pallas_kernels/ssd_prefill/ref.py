"""The definition of ssd_prefill: the recurrence of Mamba-2's state space, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC

NO_LIMIT = (0.0, float("inf"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SsdPrefillArgs:
    """The arguments of ``ssd_prefill``, with H heads of width P and states [P, N].

    C = H * P + 2G * N channels: the inputs x of the heads, then the keys b and the queries c of the
    G groups. Head h has those of group h // (H / G).
    """

    mixed: jax.Array  # [T, C]
    steps: jax.Array | None  # [T, H], before the bias and the softplus; None: all steps are 1
    # logarithms of the rates, biases of the steps, factors by which inputs are added to outputs
    decay: jax.Array  # float32[3, H]
    states: jax.Array  # float32[S, H, P, N]
    query_start_loc: jax.Array  # int32[R + 1]
    begins: jax.Array  # int32[R]: the position of each row's first token; 0: the state is zeros
    reads: jax.Array  # int32[R]: where the state before that token is
    writes: jax.Array  # int32[R]: where the state after the last token goes
    # states that are stored besides: after so many tokens of the row, a multiple of ``CHUNK``; 0 is
    # none
    save_tokens: jax.Array | None = None  # int32[R, N]
    save_rows: jax.Array | None = None  # int32[R, N]
    limits: tuple[float, float] = field(default=NO_LIMIT, metadata=STATIC)  # of the steps

    @property
    def num_groups(self) -> int:
        """G."""
        return num_groups(self.mixed, self.states)


def num_groups(mixed: jax.Array | np.ndarray, states: jax.Array) -> int:
    """G, of tokens [T, C] and states [S, H, P, N]; see ``SsdPrefillArgs``."""
    _, heads, width, state_dim = states.shape
    return (mixed.shape[1] - heads * width) // (2 * state_dim)


def unfit_shapes(
    mixed: jax.Array,  # [T, C]
    steps: jax.Array | None,  # [T, H]
    decay: jax.Array,  # float32[3, H]
    states: jax.Array,  # float32[S, H, P, N]
) -> str | None:
    """Words for shapes that do not fit together, or None."""
    (tokens, channels), (_, heads, width, state_dim) = mixed.shape, states.shape
    groups = num_groups(mixed, states)
    if (
        groups > 0
        and channels == heads * width + 2 * groups * state_dim
        and heads % groups == 0
        and decay.shape == (3, heads)
        and (steps is None or steps.shape == (tokens, heads))
    ):
        return None
    of_steps = "" if steps is None else f", steps {steps.shape}"
    return f"tokens {mixed.shape}{of_steps}, decays {decay.shape} and states {states.shape}"


def ssd_prefill(args: SsdPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, H, P], the states
    """Tokens of no row yield zeros, and a row without tokens stores nothing."""
    x, b, c, sizes = token_inputs(args.mixed, args.steps, args.decay, args.states, args.limits)
    rates, _, skip = np.asarray(args.decay, np.float64)
    states = np.asarray(args.states, np.float64)
    before, out = states.copy(), np.zeros(x.shape)
    starts = np.asarray(args.query_start_loc)
    for row in np.flatnonzero(np.diff(starts)):
        state = before[args.reads[row]] if args.begins[row] else np.zeros(states.shape[1:])
        saved = {} if args.save_tokens is None else _saves(args, int(row))
        for token in range(starts[row], starts[row + 1]):
            state, out[token] = step(
                state, x[token], b[token], c[token], sizes[token], -np.exp(rates)
            )
            out[token] += skip[:, None] * x[token]
            if (passed := token + 1 - starts[row]) in saved:
                states[saved[passed]] = state
        states[args.writes[row]] = state
    return jnp.asarray(out, args.mixed.dtype), jnp.asarray(states, args.states.dtype)


def token_inputs(
    mixed: jax.Array | np.ndarray,  # [T, C]
    steps: jax.Array | None,  # [T, H]
    decay: jax.Array,  # float32[3, H]
    states: jax.Array,  # float32[S, H, P, N]
    limits: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """In float64 the inputs [T, H, P], keys and queries [T, H, N] and steps [T, H] of the heads."""
    _, heads, width, state_dim = states.shape
    groups, tokens = num_groups(mixed, states), np.asarray(mixed, np.float64)
    x, b, c = np.split(tokens, np.cumsum([heads * width, groups * state_dim]), axis=1)
    b, c = (
        one.reshape(len(tokens), groups, state_dim).repeat(heads // groups, 1) for one in (b, c)
    )
    sizes = np.ones((len(tokens), heads))
    if steps is not None:
        sizes = np.asarray(steps, np.float64) + np.asarray(decay, np.float64)[1]
        sizes = np.maximum(sizes, 0) + np.log1p(np.exp(-np.abs(sizes)))  # softplus
        sizes = np.clip(sizes, *limits)
    return x.reshape(len(tokens), heads, width), b, c, sizes


def step(
    state: np.ndarray,  # [H, P, N]
    x: np.ndarray,  # [H, P]
    b: np.ndarray,  # [H, N]
    c: np.ndarray,  # [H, N]
    sizes: np.ndarray,  # [H]
    rates: np.ndarray,  # [H], below 0
) -> tuple[np.ndarray, np.ndarray]:  # [H, P, N], [H, P]
    """The state after one token, and its product with the query."""
    decayed = state * np.exp(rates * sizes)[:, None, None]
    state = decayed + (sizes[:, None] * x)[:, :, None] * b[:, None]
    return state, np.einsum("hpn,hn->hp", state, c)


def _saves(args: SsdPrefillArgs, row: int) -> dict[int, int]:
    """Where a row's state is stored after so many tokens."""
    counts, rows = np.asarray(args.save_tokens)[row], np.asarray(args.save_rows)[row]
    return {int(count): int(to) for count, to in zip(counts, rows, strict=True) if count}
