"""The dense feed-forward network, gated (SwiGLU, GeGLU, ...) or plain.

Owns: ``FeedForward``. Parameters:

    gated  gate_up [D, 2F]: gate, up   gate_up_bias [2F]   down [F, D]   down_bias [D]
    plain  up      [D, F]              up_bias      [F]    down [F, D]   down_bias [D]
    down_norm [F] with a norm of what ``down`` multiplies
    act_params [4] with xIELU: its alpha of positive and of negative values, beta and epsilon
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.activations import xielu
from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.decoder_config import FeedForwardConfig
from jaxinfer.nn.linear import (
    Norm,
    Stream,
    above_cutoff,
    block_output,
    divided_rms_norm,
    linear,
    normalised,
    scaled,
)
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_mlp.api import MlpArgs, is_fused, quantised_mlp


class FeedForward(nn.Module):
    """The feed-forward network of a layer, with the norm before it."""

    config: FeedForwardConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext, *, summed: bool = True
    ) -> tuple[jax.Array, PlainOutput]:  # [T, D]
        """The stream with its delta added, and the network's output; of several devices, unless it
        is ``summed``, only what this one adds to it.
        """
        c, name = self.config, "gate_up" if self.config.gated else "up"
        w, down = weight(self, name), weight(self, "down")
        bias = param(self, f"{name}_bias") if c.bias is True else None
        gelu = c.activation == "gelu_tanh" and w.is_dense
        swiglu = c.gated and (c.activation == "silu" or gelu) and bias is None  # in one kernel
        swiglu = swiglu and c.gate_scale == c.out_scale == 1.0
        swiglu = swiglu and all(one is None for one in (c.gate_cutoff, c.limit, c.swiglu))
        swiglu = swiglu and not ctx.uses("mlp_pre", "mlp_linear")
        fusible = swiglu and not ctx.uses("mlp_post") and c.norm is None and not c.bias
        if fusible and all(isinstance(one.matrix, Quantised) for one in (w, down)):
            x, split = stream.x, ctx.splits
            args = MlpArgs(x=x, gate_up=w.matrix, down=down.matrix, split=split, pins=ctx.pins)
            if is_fused(args):
                stream, h = normalised(stream, norm, ctx)
                y = quantised_mlp(replace(args, x=h))
                return stream.x, ctx.addends(y) if summed else y
        static = {"swiglu": swiglu, "gelu": swiglu and gelu}
        hidden, stream, _ = linear(stream, w, ctx, norm=norm, bias=bias, **static)
        if c.activation == "xielu":
            activation = partial(xielu, params=param(self, "act_params"))
        else:
            activation = ACTIVATIONS[c.activation]
        if c.gated and not swiglu:
            gate, up = jnp.split(hidden, 2, axis=-1)
            gate = gate if c.gate_scale == 1.0 else gate * c.gate_scale
            gate = gate if c.gate_cutoff is None else above_cutoff(gate, c.gate_cutoff, ctx)
            gate, up = ctx.at("mlp_pre", gate), ctx.at("mlp_linear", up)
            if c.swiglu is not None:
                hidden = c.swiglu(gate, up)
            elif c.limit is not None:
                hidden = jnp.minimum(activation(gate), c.limit) * jnp.clip(up, -c.limit, c.limit)
            else:
                hidden = activation(gate) * up
        elif not c.gated:
            hidden = activation(ctx.at("mlp_pre", hidden))
        hidden = ctx.at("mlp_post", hidden)
        if c.norm is not None:
            hidden = divided_rms_norm(hidden, param(self, "down_norm"), c.norm, ctx)
        bias = param(self, "down_bias") if c.bias else None
        if summed:
            return stream.x, scaled(block_output(hidden, down, ctx, bias=bias), c.out_scale)
        assert bias is None, "each device would add the bias"
        return stream.x, scaled(linear(hidden, down, ctx, partial=True).y, c.out_scale)
