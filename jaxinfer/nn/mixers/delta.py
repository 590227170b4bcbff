"""The gated delta rule: a state for each head that every token decays and corrects.

Parameters of ``Delta``, with K key heads of width Dk, V value heads of width Dv, W taps, and G
decays, of a head (V) or of its channels (V * Dk):

    qkvz [D, 2K * Dk + 2V * Dv]: queries, keys, values, the gate of the output
    ba   [D, V + G]: the gates of the correction and of the decay
    conv [W, 2K * Dk + V * Dv]   head_norm [Dv]   o [V * Dv, D]
    decay float32[2, V] or float32[V + G]: logarithms of the rates, biases of their steps

and where gates have latents of width R, instead of the first two:

    qkv  [D, 2K * Dk + V * Dv]   ba [D, V + 2R]: the gate of the correction, and the latents
    decay_b [R, G]               gate_b [R, V * Dv]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.recurrent import PromptRows, empty_state, whole_sequence
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.delta_decode.api import DeltaDecodeArgs, delta_decode
from pallas_kernels.delta_decode.xla import betas_and_decays, gated_norm, unit
from pallas_kernels.delta_prefill.api import DeltaPrefillArgs, delta_prefill
from pallas_kernels.short_conv.api import ShortConvArgs, short_conv


class _Tokens(NamedTuple):
    """The products of tokens with the weights."""

    qkvz: jax.Array  # [T, C + V * Dv], or [T, C] where z is separate; C: channels
    gates: jax.Array  # [T, V + G]
    z: jax.Array | None  # [T, V * Dv]

    def take(self, tokens: slice) -> _Tokens:
        z = None if self.z is None else self.z[tokens]
        return _Tokens(self.qkvz[tokens], self.gates[tokens], z)


class _Places(NamedTuple):
    """Where tokens of different sequences are, and where their states are."""

    positions: jax.Array  # int32[B]
    rows: jax.Array  # int32[B]
    keeps: jax.Array | None  # int32[B]: where they are stored besides


class Delta(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: DeltaConfig

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
        c = self.config
        w = weight(self, "qkvz" if c.gate_rank is None else "qkv")
        # both products are of the normalised token, as quantised files keep the small one in floats
        qkvz, stream, h = linear(stream, w, ctx, norm=norm, keep=True)
        tokens = self._with_gates(qkvz, linear(h, weight(self, "ba"), ctx).y, ctx)
        if state is None:
            empty = empty_state(c.state(qkvz.dtype))
            out, _ = self._prompts(tokens, empty, whole_sequence(len(qkvz)), ctx)
        else:
            out, state = self._step(tokens, state, ctx)
        out = ctx.at("z", out.reshape(-1, c.num_v_heads, c.v_dim)).reshape(out.shape)
        x = stream.x
        if only is not None:
            x, out = stream.take(only), take_rows(out, only)
        return x, block_output(out, weight(self, "o"), ctx), state

    def _with_gates(self, qkvz: jax.Array, ba: jax.Array, ctx: StepContext) -> _Tokens:
        """The tokens, with gates expanded from their latents, and bounded ones of decays."""
        tokens, c = self._expanded(qkvz, ba, ctx), self.config
        if c.decay_floor is None:
            return tokens
        return tokens._replace(gates=_bounded(tokens.gates, param(self, "decay"), c))

    def _expanded(self, qkvz: jax.Array, ba: jax.Array, ctx: StepContext) -> _Tokens:
        """The tokens, with gates expanded from their latents, if they have some."""
        c, rank = self.config, self.config.gate_rank
        if rank is None:
            return _Tokens(qkvz, ba, None)
        b, of_decay, of_output = jnp.split(ba, (-2 * rank, -rank), axis=1)
        # of one token a GPU's XLA would pass the address within ``ba`` to the kernel, and Mosaic's
        # take only multiples of 256 bytes
        of_decay, of_output = jax.lax.optimization_barrier((of_decay, of_output))
        if ctx.axis is not None:  # of the heads of this device, which has all latents
            start = jax.lax.axis_index(ctx.axis) * c.num_v_heads
            b = jax.lax.dynamic_slice_in_dim(b, start, c.num_v_heads, axis=1)
        decays = linear(of_decay, weight(self, "decay_b"), ctx).y
        z = linear(of_output, weight(self, "gate_b"), ctx).y
        return _Tokens(qkvz, jnp.concatenate((b, decays), axis=1), z)

    def _step(
        self, tokens: _Tokens, state: LayerArrays, ctx: StepContext
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """The outputs of decode rows, then of prompts, and the new state."""
        assert ctx.rows is not None
        d, parts = ctx.num_decodes, []
        if d:
            where = _Places(ctx.positions[:d], ctx.rows.slots[:d], ctx.rows.keeps)
            out, state = self._decode(tokens.take(slice(d)), state, where, ctx)
            parts.append(out)
        if len(tokens.qkvz) > d:
            prompts, rows = tokens.take(slice(d, None)), ctx.rows.prompts(d)
            if ctx.pins.invariant:  # sums over chunks would have other bits
                out, state = self._one_by_one(prompts, state, rows, ctx)
            else:
                out, state = self._prompts(prompts, state, rows, ctx)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), state

    def _decode(
        self, tokens: _Tokens, state: LayerArrays, where: _Places, ctx: StepContext
    ) -> tuple[jax.Array, LayerArrays]:  # [B, V * Dv]
        """The outputs of tokens of different sequences, and the new state."""
        c, (qkv, z) = self.config, self._split(tokens)
        args = DeltaDecodeArgs(
            qkv=qkv,
            gates=tokens.gates,
            z=z,
            conv=param(self, "conv"),
            decay=self._decays(),
            norm=param(self, "head_norm"),
            states=state["delta"],
            convs=state["conv"],
            positions=where.positions,
            rows=where.rows,
            keeps=where.keeps,
            eps=c.norm_eps,
            z_act=c.gate_act,
            beta_scale=c.beta_scale,
        )
        out, states, convs = delta_decode(args, ctx.pinned("delta_decode"))
        return out, {"delta": states, "conv": convs}

    def _one_by_one(
        self, tokens: _Tokens, state: LayerArrays, rows: Rows, ctx: StepContext
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """As ``_prompts``, with one ``delta_decode`` for each token."""
        indices, num_states = PromptRows.of(rows), len(state["delta"])
        starts = indices.query_start_loc
        moved = jnp.where(starts[1:] > starts[:-1], indices.writes, num_states)
        state = {
            name: array.at[moved].set(array[indices.reads], mode="drop")
            for name, array in state.items()
        }
        slots = rows.slots[jnp.minimum(rows.of_token, len(rows.slots) - 1)]
        positions, keeps = ctx.positions[ctx.num_decodes :], slots
        if rows.saves is not None:
            saves = rows.saves.num_tokens > 0
            last = jnp.where(saves, starts[:-1, None] + rows.saves.num_tokens - 1, len(keeps))
            keeps = keeps.at[last].set(rows.saves.state_rows, mode="drop")

        def one(i: jax.Array, carry: tuple[jax.Array, LayerArrays]) -> tuple[Any, LayerArrays]:
            def of(array: jax.Array) -> jax.Array:  # [1, ...]
                return jax.lax.dynamic_slice_in_dim(array, i, 1)

            out, state = carry
            where = _Places(of(positions), of(slots), of(keeps))
            y, state = self._decode(jax.tree.map(of, tokens), state, where, ctx)
            return jax.lax.dynamic_update_slice_in_dim(out, y, i, 0), state

        out = jnp.zeros((len(slots), self.config.values), tokens.qkvz.dtype)
        return jax.lax.fori_loop(0, starts[-1], one, (out, state))

    def _prompts(
        self,
        given: _Tokens,
        state: LayerArrays,
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """The outputs of the tokens of prompts, and the new state."""
        c, qkvz, tokens = self.config, given.qkvz, len(given.qkvz)
        indices = PromptRows.of(rows)._asdict()
        conv = ShortConvArgs(x=qkvz, weights=param(self, "conv"), kept=state["conv"], **indices)
        mixed, convs = short_conv(conv, ctx.pinned("short_conv"))
        q, k, v = jnp.split(mixed, (c.keys, 2 * c.keys), axis=1)
        beta, log_decay = betas_and_decays(given.gates, self._decays(), c.num_v_heads)
        beta = beta if c.beta_scale == 1 else beta * c.beta_scale
        args = DeltaPrefillArgs(
            q=(unit(q.reshape(tokens, -1, c.k_dim)) * c.k_dim**-0.5).astype(qkvz.dtype),
            k=unit(k.reshape(tokens, -1, c.k_dim)).astype(qkvz.dtype),
            v=v.reshape(tokens, -1, c.v_dim),
            log_decay=log_decay,
            beta=beta,
            states=state["delta"],
            **indices,
        )
        out, states = delta_prefill(args, ctx.pinned("delta_prefill"))
        _, z = self._split(given)
        out, z = out.astype(jnp.float32), z.reshape(out.shape)
        out = gated_norm(out, z, param(self, "head_norm"), c.norm_eps, c.gate_act)
        out = out.reshape(tokens, -1).astype(qkvz.dtype)
        return out, {"delta": states, "conv": convs}

    def _decays(self) -> jax.Array:  # float32[V + G]
        """Logarithms of the rates, and biases of the steps: none where gates are bounded."""
        decay = param(self, "decay").reshape(-1)
        return decay if self.config.decay_floor is None else jnp.zeros_like(decay)

    def _split(self, tokens: _Tokens) -> tuple[jax.Array, jax.Array]:  # [T, C], [T, V * Dv]
        """The channels of the convolution, and the gate of the output."""
        if tokens.z is not None:
            return tokens.qkvz, tokens.z
        channels = sum(self.config.channels.widths)
        return tokens.qkvz[:, :channels], tokens.qkvz[:, channels:]


def _bounded(
    gates: jax.Array,  # [T, V + G]
    decay: jax.Array,  # float32[V + G]
    config: DeltaConfig,
) -> jax.Array:  # float32[T, V + G]
    """The gates for which the ops, whose decay is exp(-softplus(gate)) with rates of 1 and without
    biases, have the bounded one: the inverse of a softplus of the bound times a sigmoid.
    """
    heads, floor = config.num_v_heads, config.decay_floor
    assert floor is not None
    gates, rates = gates.astype(jnp.float32), jnp.exp(decay[:heads])
    steps = (gates[:, heads:] + decay[heads:]).reshape(len(gates), heads, -1)
    size = -floor * jax.nn.sigmoid(rates[:, None] * steps).reshape(len(gates), -1)
    size = jnp.maximum(size, jnp.finfo(jnp.float32).tiny)  # of which the logarithm is finite
    inverse = size + jnp.log(-jnp.expm1(-size))
    return jnp.concatenate((gates[:, :heads], inverse), axis=1)
