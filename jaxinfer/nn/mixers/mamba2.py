"""Mamba-2: a state space of each head. Parameters of ``Mamba2``, with H heads of width P, G groups
with states of width N, I = H * P, and W taps:

into [D, 2I + 2G * N + H]: gates, inputs, b, c, steps   into_bias with into_bias
conv [W, I + 2G * N]                                    conv_bias with conv_bias
o    [I, D]                                             o_bias    with o_bias
decay float32[3, H]: logarithms of the rates, biases of the steps, what adds inputs to outputs
inner_norm [I] with a norm
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from jaxinfer.nn.mixers.recurrent import started
from jaxinfer.nn.mixers.ssd import Conv, SsdTokens, grouped_rms_norm, ssd
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight


class Mamba2(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: Mamba2Config

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
        bias = param(self, "into_bias") if c.into_bias else None
        y, stream, _ = linear(stream, weight(self, "into"), ctx, norm=norm, bias=bias)
        if c.multipliers is not None:
            y = y * _by_part(c.multipliers, c.projected.widths, y.dtype)
        state, rows = started(c, state, y, ctx)
        gate, mixed, steps = jnp.split(y, (c.inner, -c.num_heads), axis=1)
        conv_bias = param(self, "conv_bias") if c.conv_bias else None
        conv = Conv(param(self, "conv"), conv_bias, state["conv"])
        # transformers limits steps of prompts alone, so that its states depend on the path
        tokens = SsdTokens(mixed, steps, param(self, "decay"), c.step_limit)
        out, states, kept = ssd(tokens, conv, state["ssm"], rows, ctx)
        x = stream.x
        if only is not None:
            x, out, gate = stream.take(only), take_rows(out, only), take_rows(gate, only)
        heads = (len(out), c.num_heads, c.head_dim)
        out = self._gated(out.reshape(len(out), -1).astype(jnp.float32), gate, ctx).astype(y.dtype)
        out = ctx.at("z", out.reshape(heads)).reshape(out.shape)
        o_bias = param(self, "o_bias") if c.o_bias else None
        delta = block_output(out, weight(self, "o"), ctx, bias=o_bias)
        if is_dense or kept is None:
            return x, delta, None
        return x, delta, {"ssm": states, "conv": kept}

    def _gated(self, out: jax.Array, gate: jax.Array, ctx: StepContext) -> jax.Array:
        """The outputs [T, I] times SiLU of their gates, with the norm; float32."""
        c, gate = self.config, jax.nn.silu(gate.astype(jnp.float32))
        if c.norm is None:
            return out * gate
        if c.norm == "after_gate":
            out = out * gate
        across = ctx if c.spread else None
        out = grouped_rms_norm(out, param(self, "inner_norm"), c.norm_groups, c.norm_eps, across)
        return out * gate if c.norm == "before_gate" else out


def _by_part(
    factors: tuple[float, ...], widths: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:  # [sum of widths]
    """A factor for each part of a projection, of which a device has an equal share."""
    pairs = zip(factors, widths, strict=True)
    return jnp.concatenate([jnp.full(width, factor, dtype) for factor, width in pairs])
