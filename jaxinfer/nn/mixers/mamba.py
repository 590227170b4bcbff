"""Mamba: a selective state space of each channel. Parameters of ``Mamba``, with I channels, states
of width N, R numbers for steps, of all channels or of a head's, and W taps:

into [D, 2I]: inputs, gates     into_bias [2I]  with a bias
conv [W, I]                     conv_bias [I]   with conv_bias
x    [I, R + 2N]: steps, b, c   dt [R, I]
o    [I, D]                     o_bias    [D]   with a bias
rates float32[I, N]: logarithms
decay float32[2, I]: biases of the steps, what adds inputs to outputs
inner_norm [R + 2N] with weights of norms
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.mamba_spec import MambaConfig
from jaxinfer.nn.mixers.recurrent import (
    PromptRows,
    convolved,
    started,
    with_kept,
)
from jaxinfer.nn.mixers.selective_scan import ScanTokens, selective_decode, selective_prefill
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight


class Mamba(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: MambaConfig

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
        bias = param(self, "into_bias") if c.bias else None
        y, stream, _ = linear(stream, weight(self, "into"), ctx, norm=norm, bias=bias)
        state, rows = started(c, state, y, ctx)
        x, gate = jnp.split(y, 2, axis=1)
        conv_bias = param(self, "conv_bias") if c.conv_bias else None
        x, kept = convolved(x, param(self, "conv"), conv_bias, state["conv"], rows, ctx, silu=True)
        out, states = self._mixed(x, state["ssm"], rows, ctx)
        own = stream.x
        if only is not None:
            own, out, gate = stream.take(only), take_rows(out, only), take_rows(gate, only)
        out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(y.dtype)
        out = ctx.at("z", out[:, None])[:, 0]
        o_bias = param(self, "o_bias") if c.bias else None
        delta = block_output(out, weight(self, "o"), ctx, bias=o_bias)
        return own, delta, None if is_dense else {"ssm": states, "conv": kept}

    def _tokens(self, x: jax.Array, ctx: StepContext) -> ScanTokens:  # [T, I]
        """The inputs of the scan."""
        c, float32 = self.config, jnp.float32
        if c.num_heads is None:  # every device needs the sums over all channels
            found = ctx.across(linear(x, weight(self, "x"), ctx).y)[:, None]
        else:
            found = self._by_head(x.reshape(len(x), c.num_heads, -1), "x", "THP,HPO->THO", 0)
        widths = (c.rank, c.rank + c.state_dim)
        parts = jnp.split(found, widths, axis=2)  # [T, H, R], [T, H, N], [T, H, N]
        if c.inner_norms is not None:
            weights = jnp.ones(found.shape[2], float32)
            if c.inner_norms == "weights":
                weights = param(self, "inner_norm").astype(float32)
            pairs = zip(parts, jnp.split(weights, widths), strict=True)
            parts = [_normalised(part, own, c.norm_eps) for part, own in pairs]
        steps, b, of_c = parts
        biases = param(self, "decay")[0]
        if c.num_heads is None:
            steps = linear(steps[:, 0], weight(self, "dt"), ctx).y.astype(float32)
        else:
            steps = self._by_head(steps, "dt", "THR,RHP->THP", 1).astype(float32)
            steps = steps.reshape(x.shape)
        rates = -jnp.exp(param(self, "rates"))
        return ScanTokens(x, b, of_c, jax.nn.softplus(steps + biases), rates)

    def _by_head(self, x: jax.Array, name: str, equation: str, channels: int) -> jax.Array:
        """Each head's input times its part of a matrix, whose axis ``channels`` is divided."""
        assert (heads := self.config.num_heads) is not None
        w = param(self, name)
        shape = list(w.shape)
        shape[channels : channels + 1] = [heads, -1]
        y = jnp.einsum(equation, x, w.reshape(shape), preferred_element_type=jnp.float32)
        return y.astype(x.dtype)

    def _mixed(
        self,
        x: jax.Array,  # [T, I]
        states: jax.Array,  # float32[S, I, N]
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I, N]
        """The outputs of decode rows, then of prompts, and the new states."""
        d, parts, tokens = ctx.num_decodes, [], self._tokens(x, ctx)
        if d:
            first = tokens.take(slice(d))
            positions, slots = ctx.positions[:d], rows.slots[:d]
            out, states = selective_decode(first, states, positions, slots)
            states = with_kept(states, rows, d)
            parts.append(out)
        if len(x) > d:
            rest = tokens.take(slice(d, None))
            out, states = selective_prefill(rest, states, PromptRows.of(rows.prompts(d)))
            parts.append(out)
        out = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        return out + param(self, "decay")[1] * x.astype(jnp.float32), states


def _normalised(x: jax.Array, weights: jax.Array, eps: float) -> jax.Array:  # [T, H, W]
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weights).astype(x.dtype)
