"""Lightning attention: linear attention with a fixed decay of each head.

It is the state space of Mamba-2 (``ssd_prefill``) with steps of 1, whose inputs are the values,
and whose b and c are the keys and the queries. Parameters of ``Lightning``, with H heads of width
P and I = H * P:

    qkvz [D, 4I]: queries, keys, values, the gate of the output
    o    [I, D]    inner_norm [I]    qk_norms [2, P] with qk_norm
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.lightning_spec import LightningConfig
from jaxinfer.nn.mixers.recurrent import started
from jaxinfer.nn.mixers.ssd import SsdTokens, grouped_rms_norm, ssd
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.numerics import rms_norm, rotate


class Lightning(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: LightningConfig

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
        y, stream, _ = linear(stream, weight(self, "qkvz"), ctx, norm=norm)
        state, rows = started(c, state, y, ctx)
        qkv, gate = jnp.split(y, (3 * c.inner,), axis=1)
        tokens = self._tokens(qkv, norm.eps, ctx)
        out, states, _ = ssd(tokens, None, state["lightning"], rows, ctx)
        x, out = stream.x, out.reshape(len(out), -1).astype(jnp.float32)
        if only is not None:
            x, out, gate = stream.take(only), take_rows(out, only), take_rows(gate, only)
        across = ctx if c.spread else None
        out = grouped_rms_norm(out, param(self, "inner_norm"), c.norm_groups, c.norm_eps, across)
        out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(y.dtype)
        out = ctx.at("z", out.reshape(len(out), c.num_heads, -1)).reshape(out.shape)
        delta = block_output(out, weight(self, "o"), ctx)
        return x, delta, None if is_dense else {"lightning": states}

    def _tokens(self, qkv: jax.Array, eps: float, ctx: StepContext) -> SsdTokens:
        """The inputs of the state space, of the projection [T, 3I]."""
        c = self.config
        qkv = jax.nn.silu(qkv) if c.silu else qkv
        q, k, v = (one.reshape(len(one), -1, c.head_dim) for one in jnp.split(qkv, 3, axis=1))
        if c.qk_norm:
            norms = param(self, "qk_norms")
            q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
        if c.rope is not None:
            q, k = rotate(q, *ctx.angles[0]), rotate(k, *ctx.angles[0])
        q = q if c.scale == 1 else q * c.scale
        mixed = jnp.concatenate([one.reshape(len(one), -1) for one in (v, k, q)], axis=1)
        rates = jnp.log(c.slopes.own(c.num_heads, ctx.axis))
        return SsdTokens(mixed, None, jnp.stack((rates, *[jnp.zeros_like(rates)] * 2)))
