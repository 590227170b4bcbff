"""xLSTM's matrix memory: linear attention with an input gate and a forget gate of each head.

Parameters, with H heads of K components of keys and V of values:

    qkvz  [D, H * (2K + 2V)]: queries, keys, values, the gates of the output
    gates [D, 2H]   gates_bias [2H]: of the input, of the memory
    head_norm [H * V]   o [H * V, D]
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.mlstm_spec import MlstmConfig
from jaxinfer.nn.mixers.recurrent import PromptRows, started, with_kept
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.chunk_scan import RowIndices, by_token, chunks_of, scan_chunks


class _Tokens(NamedTuple):
    """The inputs of tokens, in float32."""

    q: jax.Array  # [T, H, K], with the scale of scores
    k: jax.Array  # [T, H, K]
    v: jax.Array  # [T, H, V + 1]: values, and a 1 that counts the keys
    gates: jax.Array  # [T, H]: logarithms of the factors of inputs
    decays: jax.Array  # [T, H]: logarithms of those of the memory

    def part(self, tokens: slice) -> _Tokens:
        """Those of some tokens."""
        return _Tokens(*(one[tokens] for one in self))


class Mlstm(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: MlstmConfig

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
        c, is_dense = self.config, state is None
        y, stream, h = linear(stream, weight(self, "qkvz"), ctx, norm=norm, keep=True)
        own, rows = started(c, state, y, ctx)
        keys, values = c.num_heads * c.key_dim, c.num_heads * c.value_dim
        qkv, z = y[:, : 2 * keys + values], y[:, 2 * keys + values :]
        out, states = self._memory(self._tokens(qkv, h, ctx), own["mlstm"], rows, ctx)
        x = stream.x
        if only is not None:
            x, out, z = stream.take(only), take_rows(out, only), take_rows(z, only)
        mean = jnp.mean(out, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(out - mean), axis=-1, keepdims=True)
        out = ((out - mean) * jax.lax.rsqrt(square + c.norm_eps)).reshape(len(out), -1)
        out = out * param(self, "head_norm").astype(jnp.float32)
        out = (out * jax.nn.sigmoid(z.astype(jnp.float32))).astype(y.dtype)
        out = ctx.at("z", out.reshape(len(out), c.num_heads, -1)).reshape(out.shape)
        delta = block_output(out, weight(self, "o"), ctx)
        return x, delta, None if is_dense else {"mlstm": states}

    def _tokens(self, qkv: jax.Array, h: jax.Array, ctx: StepContext) -> _Tokens:
        """The inputs of the memory, of the projection and of the normalised tokens."""
        c, keys = self.config, self.config.num_heads * self.config.key_dim
        q, k, v = (
            one.astype(jnp.float32).reshape(len(one), c.num_heads, -1)
            for one in jnp.split(qkv, (keys, 2 * keys), axis=1)
        )
        gates, bias = linear(h, weight(self, "gates"), ctx).y, param(self, "gates_bias")
        gates = gates.astype(jnp.float32) + bias.astype(jnp.float32)
        gates = c.gate_cap * jnp.tanh(gates / c.gate_cap)
        into, forget = jnp.split(gates, 2, axis=1)
        v = jnp.concatenate((v, jnp.ones_like(v[..., :1])), axis=-1)
        return _Tokens(q * c.key_dim**-0.5, k, v, into, jax.nn.log_sigmoid(forget))

    def _memory(
        self,
        tokens: _Tokens,
        states: jax.Array,  # float32[S, H, K, V + 2]
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, jax.Array]:  # float32[T, H, V], float32[S, H, K, V + 2]
        """The outputs of decode rows, then of prompts, and the new states."""
        d, parts, eps = ctx.num_decodes, [], self.config.eps
        if d:
            slots = rows.slots[:d]
            is_new = (ctx.positions[:d] == 0)[:, None, None, None]
            own = tokens.part(slice(d))
            after = jax.vmap(_after_token)(jnp.where(is_new, 0, states[slots]), own)
            found = jnp.einsum("BHK,BHKV->BHV", own.q, after[..., :-1], precision="highest")
            parts.append(_divided(found, after[:, :, 0, -1], eps))
            states = with_kept(states.at[slots].set(after), rows, d)
        if len(tokens.q) > d:
            prompts = PromptRows.of(rows.prompts(d))
            out, states = _prefill(tokens.part(slice(d, None)), states, prompts, eps)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), states


def _after_token(state: jax.Array, token: _Tokens) -> jax.Array:  # float32[H, K, V + 2]
    """The state of a sequence after one more token, without a leading axis."""
    sums, most = state[..., :-1], state[:, 0, -1]
    new_most = jnp.maximum(token.decays + most, token.gates)
    old, new = jnp.exp(token.decays + most - new_most), jnp.exp(token.gates - new_most)
    added = (new[:, None] * token.k)[..., None] * token.v[:, None]
    return _state(old[:, None, None] * sums + added, new_most)


def _state(sums: jax.Array, most: jax.Array) -> jax.Array:  # float32[H, K, V + 2]
    """The state with sums [H, K, V + 1] and their maxima [H]."""
    column = jnp.broadcast_to(most[:, None, None], (*sums.shape[:2], 1))
    return jnp.concatenate((sums, column), axis=-1)


def _divided(found: jax.Array, most: jax.Array, eps: float) -> jax.Array:  # [..., V]
    """The outputs, of queries times sums [..., V + 1] and the maxima [...]."""
    least = jnp.exp(-most)[..., None]
    return found[..., :-1] / (jnp.maximum(jnp.abs(found[..., -1:]), least) + eps)


@jax.jit  # one trace serves every layer
def _prefill(
    tokens: _Tokens,
    states: jax.Array,  # float32[S, H, K, V + 2]
    rows: RowIndices,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # float32[T, H, V], float32[S, H, K, V + 2]
    """The tokens of prompts in chunks; where there is none, nothing is added and nothing decays."""
    chunks = chunks_of(rows.query_start_loc, len(tokens.q))
    each = _Tokens(*(jnp.moveaxis(chunks.take(one), 2, 1) for one in tokens))  # [N, H, CHUNK, ...]
    gates = jnp.where(chunks.is_token[:, None], each.gates, -jnp.inf)

    def advance(state: jax.Array, one: _Tokens) -> tuple[jax.Array, jax.Array]:
        """The state [H, K, V + 2] after a chunk, and its outputs [H, CHUNK, V]."""
        sums, most = state[..., :-1], state[:, 0, -1:]
        since = jnp.cumsum(one.decays, axis=1)
        pairs = since[..., :, None] - since[..., None, :] + one.gates[..., None, :]
        pairs = jnp.where(jnp.tril(jnp.ones(pairs.shape[1:], bool)), pairs, -jnp.inf)
        of_state = since + most
        own_most = jnp.maximum(of_state, jnp.max(pairs, axis=-1))
        p = _product("HiK,HjK->Hij", one.q, one.k) * jnp.exp(pairs - own_most[..., None])
        earlier = jnp.exp(of_state - own_most)[..., None] * _product("HiK,HKV->HiV", one.q, sums)
        out = _divided(_product("Hij,HjV->HiV", p, one.v) + earlier, own_most, eps)
        until = since[:, -1:] - since + one.gates
        last = since[:, -1] + most[:, 0]
        new_most = jnp.maximum(last, jnp.max(until, axis=1))
        k = one.k * jnp.exp(until - new_most[:, None])[..., None]
        kept = jnp.exp(last - new_most)[:, None, None] * sums
        return _state(kept + _product("HjK,HjV->HKV", k, one.v), new_most), out

    out, states = scan_chunks(rows, states, chunks, advance, each._replace(gates=gates))
    return by_token(out, rows.query_start_loc, chunks, len(tokens.q)), states


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest")
