"""RWKV-4: linear attention, and a network that reads two tokens. Parameters with width D:

of ``TimeMix``, with I channels: key, value, receptance [D, I]; o [I, D]
  mix float32[3, D]: the parts of the token in the inputs of these, the rest is the token before
  decay float32[2, I]: logarithms of the rates, what a token's own key has more
of ``ChannelMix``, with F columns: key [D, F], receptance [D, D], o [F, D], mix float32[2, D]

A token with the key k and the value v changes a channel's sums n and d, which are stored divided by
exp(m), to exp(-rate) n + exp(k) v and exp(-rate) d + exp(k).
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Addends, PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear, normalised
from jaxinfer.nn.mixers.recurrent import (
    PromptRows,
    convolved,
    started,
    with_kept,
)
from jaxinfer.nn.mixers.rwkv_spec import SHIFT, ChannelMixConfig, TimeMixConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.chunk_scan import RowIndices, by_token, chunks_of, scan_chunks

_NOTHING = -1e38  # the exponent of no token


class TimeMix(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: TimeMixConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``attention.Attention``."""
        stream, h = normalised(stream, norm, ctx)
        own_state, rows = started(self.config, state, h, ctx)
        before, kept = _shifted(h, own_state["conv"], rows, ctx)
        inputs = _mixed(h, before, param(self, "mix"))
        k, v, r = (
            linear(x, weight(self, name), ctx).y
            for x, name in zip(inputs, ("key", "value", "receptance"), strict=True)
        )
        out, sums = self._means(k, v, own_state["wkv"], rows, ctx)
        x = stream.x
        if only is not None:
            x, out, r = take_rows(x, only), take_rows(out, only), take_rows(r, only)
        out = (out * jax.nn.sigmoid(r.astype(jnp.float32))).astype(h.dtype)
        out = ctx.at("z", out[:, None])[:, 0]
        delta = block_output(out, weight(self, "o"), ctx)
        return x, delta, None if state is None else {"wkv": sums, "conv": kept}

    def _means(
        self,
        k: jax.Array,  # [T, I]
        v: jax.Array,  # [T, I]
        states: jax.Array,  # float32[S, I, 3]
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I, 3]
        """The outputs of decode rows, then of prompts, and the new states."""
        d, parts = ctx.num_decodes, []
        rates, first = param(self, "decay")
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        log_decay = jnp.broadcast_to(-jnp.exp(rates), k.shape)
        if d:
            slots = rows.slots[:d]
            found = _sums(jnp.where((ctx.positions[:d] == 0)[:, None, None], 0, states[slots]))
            one = (v[:d], jnp.ones_like(v[:d]), k[:d])
            parts.append(_mean(found, v[:d], k[:d] + first))
            after = jnp.stack(_after((*found, 0.0), (*one, log_decay[:d]))[:3], axis=-1)
            states = with_kept(states.at[slots].set(after), rows, d)
        if len(k) > d:
            prompts = PromptRows.of(rows.prompts(d))
            out, states = _prefill(k[d:], v[d:], log_decay[d:], first, states, prompts)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), states


class ChannelMix(nn.Module):
    """The network of a layer, with the norm before it."""

    config: ChannelMixConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``attention.Attention``."""
        stream, h = normalised(stream, norm, ctx)
        own_state, rows = started(self.config, state, h, ctx)
        before, kept = _shifted(h, own_state["conv"], rows, ctx)
        x = stream.x
        if only is not None:
            x, h, before = (take_rows(one, only) for one in (x, h, before))
        key, gate = _mixed(h, before, param(self, "mix"))
        hidden = jnp.square(jax.nn.relu(linear(key, weight(self, "key"), ctx).y))
        hidden = ctx.at("z", hidden[:, None])[:, 0]
        delta = block_output(hidden, weight(self, "o"), ctx)
        gate = jax.nn.sigmoid(linear(gate, weight(self, "receptance"), ctx).y)
        if isinstance(delta, Addends):
            delta = replace(delta, partials=delta.partials * gate)
        else:
            delta = delta * gate
        return x, delta, None if state is None else {"conv": kept}


def _shifted(
    h: jax.Array, kept: jax.Array, rows: Rows, ctx: StepContext
) -> tuple[jax.Array, jax.Array]:  # [T, D], [S, SHIFT, D]
    """The token before each one, zeros before the first."""
    taps = jnp.zeros((SHIFT, h.shape[1]), h.dtype).at[0].set(1)
    return convolved(h, taps, None, kept, rows, ctx, silu=False)


def _mixed(h: jax.Array, before: jax.Array, mix: jax.Array) -> list[jax.Array]:  # [T, D] each
    """The inputs of matrices: for each row of ``mix`` that part of the token."""
    h32, before32 = h.astype(jnp.float32), before.astype(jnp.float32)
    return [(h32 * own + before32 * (1 - own)).astype(h.dtype) for own in mix]


type _Sums = tuple[jax.Array, jax.Array, jax.Array]  # n, d, m


def _sums(state: jax.Array) -> _Sums:  # float32[..., 3]
    """The parts of a state; zeros are those of no token."""
    n, d, m = state[..., 0], state[..., 1], state[..., 2]
    return n, d, jnp.where(d == 0, _NOTHING, m)


def _mean(before: _Sums, v: jax.Array, k: jax.Array) -> jax.Array:
    """The mean of the values before a token and its own one, whose key is ``k``."""
    n, d, m = before
    most = jnp.maximum(m, k)
    old, new = jnp.exp(m - most), jnp.exp(k - most)
    return (old * n + new * v) / (old * d + new)


def _after(first: tuple, second: tuple) -> tuple:
    """The sums of some tokens, then of others: n, d, m, and the logarithm of their decay."""
    (n, d, m, decay), (n2, d2, m2, decay2) = first, second
    m = m + decay2
    most = jnp.maximum(m, m2)
    old, new = jnp.exp(m - most), jnp.exp(m2 - most)
    return old * n + new * n2, old * d + new * d2, most, decay + decay2


@jax.jit  # one trace serves every layer
def _prefill(
    k: jax.Array,  # float32[T, I]
    v: jax.Array,  # float32[T, I]
    log_decay: jax.Array,  # float32[T, I]
    first: jax.Array,  # float32[I]
    states: jax.Array,  # float32[S, I, 3]
    rows: RowIndices,
) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I, 3]
    """The tokens of prompts; where there is none, nothing is added and nothing decays."""
    chunks = chunks_of(rows.query_start_loc, len(k))
    each = (chunks.take(k), chunks.take(v), chunks.take(log_decay), chunks.is_token)

    def advance(
        state: jax.Array, one: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:  # [I, 3], [I, CHUNK]
        key, value, decay, is_token = one
        weights = jnp.broadcast_to(is_token[:, None], key.shape).astype(jnp.float32)
        exponents = jnp.where(is_token[:, None], key, _NOTHING)
        own = jax.lax.associative_scan(_after, (value, weights, exponents, decay))
        begin = _sums(state)
        *sums, _ = _after((*(part[None] for part in begin), 0.0), own)
        before = [
            jnp.concatenate((part[None], after[:-1]))
            for part, after in zip(begin, sums, strict=True)
        ]
        out = _mean((before[0], before[1], before[2]), value, key + first)
        return jnp.stack([part[-1] for part in sums], axis=-1), out.T

    out, states = scan_chunks(rows, states, chunks, advance, each)
    return by_token(out, rows.query_start_loc, chunks, len(k)), states
