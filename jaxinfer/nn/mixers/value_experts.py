"""Attention whose values a mixture of experts makes, on the kernels of attention. Parameters of
``ValueExpertsAttention``:

    qk [D, (2N + K) * H]: gates, queries and keys, without a gate [D, (N + K) * H]
    qk_bias [(N + K) * H] with qkv_bias
    value_experts [D, E * K * H]    value_router [E, D]    value_choice_bias float32[E]
    o [N * H, D]    o_bias [D] with o_bias

Values of all experts are computed, and those of a token's choices are added.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, output
from jaxinfer.nn.mixers.heads import gated
from jaxinfer.nn.mixers.value_experts_spec import ValueExpertsConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.route.api import RouteArgs, route


class ValueExpertsAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: ValueExpertsConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``mixers.attention.Attention``."""
        c = self.config.attention
        bias, gates = param(self, "qk_bias") if c.qkv_bias else None, None
        if c.gate and bias is not None:
            bias = jnp.pad(bias, (c.num_heads * c.head_dim, 0))
        qk, stream, h = linear(stream, weight(self, "qk"), ctx, norm=norm, bias=bias, keep=True)
        if c.gate:
            gates, qk = jnp.split(qk, (c.num_heads * c.head_dim,), axis=1)
        heads = jnp.concatenate([qk, self._values(h, ctx)], axis=1)
        out, state = attend(
            heads.reshape(len(heads), -1, c.head_dim),
            state,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            only=only,
        )
        if gates is not None:
            own = gates if only is None else take_rows(gates, only)
            out = gated(out, own.reshape(out.shape), c.gate_act)
        return *output(self, c, stream, out, ctx, only), state

    def _values(self, h: jax.Array, ctx: StepContext) -> jax.Array:  # [T, D] -> [T, K * H]
        """The weighted sum of the values that a token's experts make."""
        own = self.config
        args = RouteArgs(
            x=h,
            w=param(self, "value_router"),
            choice_bias=param(self, "value_choice_bias") if own.choice_bias else None,
            is_token=None if ctx.rows is None else ctx.rows.is_token,
            routing=own.routing,
        )
        choices, weights = route(args, ctx.pinned("route"))  # int32[T, k], float32[T, k]
        of_each = jax.nn.one_hot(choices, own.count) * weights[..., None]  # [T, k, E]
        made = linear(h, weight(self, "value_experts"), ctx).y.astype(jnp.float32)
        made = jax.nn.silu(made).reshape(len(h), own.count, -1)
        return jnp.einsum("tke,tew->tw", of_each, made).astype(h.dtype)
