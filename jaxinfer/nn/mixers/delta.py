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

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
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
            out, _ = self._prompts(tokens, _empty(c, qkvz.dtype), _whole(len(qkvz)), ctx)
        else:
            out, state = self._step(tokens, state, ctx)
        out = ctx.at("z", out.reshape(-1, c.num_v_heads, c.v_dim)).reshape(out.shape)
        x = stream.x
        if only is not None:
            x, out = stream.take(only), take_rows(out, only)
        return x, block_output(out, weight(self, "o"), ctx), state

    def _with_gates(self, qkvz: jax.Array, ba: jax.Array, ctx: StepContext) -> _Tokens:
        """The tokens, with gates expanded from their latents."""
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
        c, d, parts = self.config, ctx.num_decodes, []
        if d:
            rows = tokens.take(slice(d))
            qkv, z = self._split(rows)
            args = DeltaDecodeArgs(
                qkv=qkv,
                gates=rows.gates,
                z=z,
                conv=param(self, "conv"),
                decay=param(self, "decay").reshape(-1),
                norm=param(self, "head_norm"),
                states=state["delta"],
                convs=state["conv"],
                positions=ctx.positions[:d],
                rows=ctx.rows.slots[:d],
                keeps=ctx.rows.keeps,
                eps=c.norm_eps,
                z_act=c.gate_act,
            )
            out, states, convs = delta_decode(args, ctx.pinned("delta_decode"))
            state = {"delta": states, "conv": convs}
            parts.append(out)
        if len(tokens.qkvz) > d:
            prompts = tokens.take(slice(d, None))
            out, state = self._prompts(prompts, state, ctx.rows.prompts(d), ctx)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), state

    def _prompts(
        self,
        given: _Tokens,
        state: LayerArrays,
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """The outputs of the tokens of prompts, and the new state."""
        c, qkvz, saves = self.config, given.qkvz, rows.saves
        tokens = len(qkvz)
        indices = {
            "query_start_loc": rows.query_start_loc,
            "begins": rows.begins,
            "reads": rows.slots if rows.reads is None else rows.reads,
            "writes": rows.slots,
            "save_tokens": None if saves is None else saves.num_tokens,
            "save_rows": None if saves is None else saves.state_rows,
        }
        conv = ShortConvArgs(x=qkvz, weights=param(self, "conv"), kept=state["conv"], **indices)
        mixed, convs = short_conv(conv, ctx.pinned("short_conv"))
        q, k, v = jnp.split(mixed, (c.keys, 2 * c.keys), axis=1)
        decay = param(self, "decay").reshape(-1)
        beta, log_decay = betas_and_decays(given.gates, decay, c.num_v_heads)
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

    def _split(self, tokens: _Tokens) -> tuple[jax.Array, jax.Array]:  # [T, C], [T, V * Dv]
        """The channels of the convolution, and the gate of the output."""
        if tokens.z is not None:
            return tokens.qkvz, tokens.z
        channels = sum(self.config.channels.widths)
        return tokens.qkvz[:, :channels], tokens.qkvz[:, channels:]


def _whole(num_tokens: int) -> Rows:
    """One new sequence of so many tokens, whose state is row 0."""
    zero = jnp.zeros(1, jnp.int32)
    return Rows(
        of_token=jnp.zeros(num_tokens, jnp.int32),
        is_token=jnp.ones(num_tokens, bool),
        slots=zero,
        begins=zero,
        last_tokens=zero + num_tokens - 1,
        query_start_loc=jnp.asarray((0, num_tokens), jnp.int32),
    )


def _empty(config: DeltaConfig, dtype: jnp.dtype) -> LayerArrays:
    """The state of one sequence, for the dense form."""
    entries = config.state(dtype).per_slot
    return {entry.name: jnp.zeros((1, *entry.shape), entry.dtype) for entry in entries}
