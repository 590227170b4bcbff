"""Attention whose queries and keys pass convolutions, on the kernels of attention.

Parameters of ``ConvolvedAttention``, with C = (N + K) * H channels and W taps:

    qkv [D, C + K * H]: queries, keys, values, values for the next token
    conv [W, C]    conv_bias [C]    heads_conv [N + K, 2H, H]: of the token before, of the token
    heads_conv_bias [C]             key_scale [K]             o [N * H, D]
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, output
from jaxinfer.nn.mixers.convolved_spec import ConvolvedAttentionConfig
from jaxinfer.nn.mixers.recurrent import convolved, started
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight

_OWN = ("conv", "before")  # arrays with an entry for each sequence


class ConvolvedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: ConvolvedAttentionConfig

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
        config, c = self.config, self.config.attention
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm)
        ends = (config.channels, config.channels + config.delayed)
        mixed, current, following = jnp.split(qkv, ends, axis=1)
        arrays, rows = started(config, state, qkv, ctx)
        first, conv = convolved(
            mixed, param(self, "conv"), None, arrays["conv"], rows, ctx, silu=False
        )
        both = jnp.concatenate((first, following), axis=1)
        # a convolution that returns the token before
        taps = jnp.zeros((2, both.shape[1]), both.dtype).at[0].set(1)
        shifted, before = convolved(both, taps, None, arrays["before"], rows, ctx, silu=False)
        last, delayed = jnp.split(shifted, ends[:1], axis=1)
        heads = self._of_pairs(last, first) + _residual(mixed, config)
        heads = _rotated_first(self._normalised(heads), config)
        v = jnp.concatenate((current, delayed), axis=1).reshape(len(qkv), -1, c.head_dim)
        pages = None if state is None else {k: a for k, a in state.items() if k not in _OWN}
        out, pages = attend(
            jnp.concatenate((heads, v), axis=1),
            pages,
            ctx,
            num_kv_heads=c.num_kv_heads,
            qk_norm=QKNorm(None, norm.eps),
            scale=c.scale,
            window=c.window,
            only=only,
        )
        if state is not None and pages is not None:
            pages = {**pages, "conv": conv, "before": before}
        return *output(self, c, stream, out, ctx, only), pages

    def _of_pairs(self, last: jax.Array, first: jax.Array) -> jax.Array:  # [T, C] -> [T, N + K, H]
        """The convolution of whole heads, of which that of channels has its bias here: at the
        beginning of a sequence it is all that the token before has.
        """
        bias, width = param(self, "conv_bias"), self.config.attention.head_dim
        pairs = [(one + bias).reshape(len(one), -1, width) for one in (last, first)]
        taps = param(self, "heads_conv")
        made = jnp.einsum("TGI,GIO->TGO", jnp.concatenate(pairs, axis=2), taps)
        return made + param(self, "heads_conv_bias").reshape(-1, width)

    def _normalised(self, heads: jax.Array) -> jax.Array:  # [T, N + K, H]
        """Heads of the length sqrt(H), keys times a parameter of each."""
        c, wide = self.config.attention, heads.astype(jnp.float32)
        length = jnp.linalg.norm(wide, axis=-1, keepdims=True)
        factor = c.head_dim**0.5 / jnp.maximum(length, float(jnp.finfo(heads.dtype).eps))
        ones = jnp.ones(c.num_heads, jnp.float32)
        scales = jnp.concatenate((ones, param(self, "key_scale").astype(jnp.float32)))
        return (wide * factor * scales[:, None]).astype(heads.dtype)


def _residual(mixed: jax.Array, config: ConvolvedAttentionConfig) -> jax.Array:  # [T, N + K, H]
    """The means of queries and their keys, and the means of these of each key."""
    c = config.attention
    heads = mixed.reshape(len(mixed), -1, c.head_dim)
    q, k = jnp.split(heads, (c.num_heads,), axis=1)
    group = c.num_heads // c.num_kv_heads
    q = (q + jnp.repeat(k, group, axis=1)) * 0.5
    k = q.reshape(len(q), c.num_kv_heads, group, -1).mean(axis=2)
    return jnp.concatenate((q, k), axis=1)


def _rotated_first(heads: jax.Array, config: ConvolvedAttentionConfig) -> jax.Array:
    """The components of heads as the kernels rotate them: see ``models.sources.RotaryRows``."""
    rope, width = config.rope, config.attention.head_dim
    if rope is None or rope.width == width:
        return heads
    half, rest = rope.width // 2, (width - rope.width) // 2
    ends = (half, 2 * half, 2 * half + rest)
    first, second, third, fourth = jnp.split(heads, ends, axis=2)
    return jnp.concatenate((first, third, second, fourth), axis=2)
