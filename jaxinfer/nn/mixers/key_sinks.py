"""Attention to the context and to keys that are parameters. Parameters of ``KeySinksAttention``:

    qkv [D, (N + K) * H + K * V]    qkv_bias [(N + K) * H + K * V] with qkv_bias
    k_norm [H]    sink_keys [S, K * H]    sink_values [S, K * V] with values
    o [N * V, D]    o_bias [D] with o_bias

The parameters of a query are one key to the kernels of attention: its score is the logarithm of the
sum of the exponentials of theirs, and its value the mean of theirs, weighted by a softmax.
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import HeadTerms, QKNorm, attend, output
from jaxinfer.nn.mixers.heads import widened
from jaxinfer.nn.mixers.key_sinks_spec import KeySinksConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm, split_and_rotate, split_heads


class KeySinksAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: KeySinksConfig

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
        c, k = self.config.attention, self.config.attention.num_kv_heads
        bias = param(self, "qkv_bias") if c.qkv_bias else None
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm, bias=bias)
        heads = widened(qkv, c).reshape(len(qkv), -1, c.head_dim)
        q, keys, v = split_heads(heads, k)
        heads = jnp.concatenate([q, self._normalised(keys, ctx), v], axis=1)
        q, keys, v = split_and_rotate(heads, *ctx.angles[0], None, k, norm.eps)
        out, state = attend(
            jnp.concatenate([q, keys, v], axis=1),
            state,
            replace(ctx, angles=()),
            num_kv_heads=k,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            terms=self._sinks(q, ctx),
            only=only,
        )
        return *output(self, c, stream, out, ctx, only), state

    def _normalised(self, keys: jax.Array, ctx: StepContext) -> jax.Array:  # [..., K, H]
        eps = self.config.norm_eps
        return rms_norm(keys, param(self, "k_norm"), eps, fixed=ctx.pins.invariant)

    def _sinks(self, q: jax.Array, ctx: StepContext) -> HeadTerms:  # of q [T, N, H]
        """The parameters as one key of each query and head."""
        c, own, (t, n, h) = self.config.attention, self.config, q.shape
        keys = param(self, "sink_keys").reshape(own.count, -1, h)
        keys, grouped = self._normalised(keys, ctx), q.reshape(t, keys.shape[1], -1, h)
        scores = jnp.einsum("tkgh,skh->tkgs", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * c.scale
        values = jnp.zeros((t, n, h), q.dtype)
        if own.with_values:
            shares = jax.nn.softmax(scores, axis=-1)
            stored = param(self, "sink_values").reshape(own.count, -1, c.value_dim)
            made = jnp.einsum("tkgs,skv->tkgv", shares, stored.astype(jnp.float32))
            made = made.reshape(t, n, -1).astype(q.dtype)
            values = jnp.pad(made, ((0, 0), (0, 0), (0, h - c.value_dim)))
        logits = jax.nn.logsumexp(scores, axis=-1).reshape(t, n)
        return HeadTerms(sinks=logits, sink_values=values)
