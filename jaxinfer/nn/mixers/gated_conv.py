"""The gated short convolution. Parameters of ``GatedConv``, with C channels and W taps:

into [D, 3C]: b, c, x    into_bias [3C]  with a bias
conv [W, C]              conv_bias [C]   with a bias
o    [C, D]              o_bias    [D]   with a bias
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.gated_conv_spec import GatedConvConfig
from jaxinfer.nn.mixers.recurrent import convolved, started
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight


class GatedConv(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: GatedConvConfig

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
        bias = {name: param(self, name) if c.bias else None for name in ("into_bias", "conv_bias")}
        w = weight(self, "into")
        y, stream, _ = linear(stream, w, ctx, norm=norm, bias=bias["into_bias"])
        before, after, x = jnp.split(y, 3, axis=1)
        state, rows = started(c, state, y, ctx)
        taps = param(self, "conv")
        mixed, kept = convolved(
            before * x, taps, bias["conv_bias"], state["conv"], rows, ctx, silu=False
        )
        out = ctx.at("z", (after * mixed)[:, None])[:, 0]
        own = stream.x
        if only is not None:
            own, out = stream.take(only), take_rows(out, only)
        o_bias = param(self, "o_bias") if c.bias else None
        y = block_output(out, weight(self, "o"), ctx, bias=o_bias)
        return own, y, None if is_dense else {"conv": kept}
