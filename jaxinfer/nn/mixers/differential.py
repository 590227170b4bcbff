"""Differential attention, on the kernels of attention. Parameters of ``Differential``:

qkv [D, (N + 2K) * H]   qkv_bias [(N + 2K) * H] with bias
  the two heads of a pair are adjacent, queries behind those of the same KV head
o   [N * H, D]          o_bias [D]              with bias
lambdas [4, H]: a query and a key of the first heads, then of the second
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.attention import QKNorm, attend, dense_attention
from jaxinfer.nn.mixers.differential_spec import DifferentialConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm, split_and_rotate


class Differential(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: DifferentialConfig

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
        c = self.config
        bias = param(self, "qkv_bias") if c.bias else None
        qkv, stream, _ = linear(stream, weight(self, "qkv"), ctx, norm=norm, bias=bias)
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        if state is None:
            out, state = _dense(heads, ctx, c, only)
        else:
            out, state = attend(
                _with_both_values(heads, c),
                state,
                ctx,
                num_kv_heads=2 * c.num_kv_heads,
                qk_norm=QKNorm(None, norm.eps),
                scale=c.scale,
                window=None,
                only=only,
            )
            out = out.reshape(len(out), c.num_kv_heads, 2, -1, c.head_dim).swapaxes(2, 3)
        out = ctx.at("z", _difference(out, param(self, "lambdas"), c))
        x = stream.x if only is None else stream.take(only)
        bias = param(self, "o_bias") if c.bias else None
        return x, block_output(out.reshape(len(out), -1), weight(self, "o"), ctx, bias=bias), state


def _with_both_values(
    heads: jax.Array,  # [T, N + 2K, H]
    config: DifferentialConfig,
) -> jax.Array:  # [T, 2 * (N + 2K), H]
    """Each key, and its queries, with the first value of its pair and again with the second."""
    k, (t, _, h) = config.num_kv_heads, heads.shape
    q, keys, values = jnp.split(heads, (config.num_heads, config.num_heads + k), axis=1)
    q = jnp.repeat(q.reshape(t, k, -1, h), 2, axis=1).reshape(t, -1, h)
    keys = jnp.repeat(keys, 2, axis=1)
    values = jnp.repeat(values.reshape(t, k // 2, 2, h), 2, axis=1).reshape(t, -1, h)
    return jnp.concatenate([q, keys, values], axis=1)


def _dense(
    heads: jax.Array,  # [T, N + 2K, H]
    ctx: StepContext,
    config: DifferentialConfig,
    only: jax.Array | None,  # int32[B]
) -> tuple[jax.Array, LayerArrays]:  # [T, N, 2H], or with only [B, N, 2H]
    """Attention of one whole sequence over itself: see ``attention.attend``."""
    q, k, v = split_and_rotate(heads, *ctx.angles[0], None, config.num_kv_heads, 0.0)
    q, k, v = ctx.at("q", q), ctx.at("k", k), ctx.at("v", v)
    both = jnp.repeat(v.reshape(len(v), -1, 2 * config.head_dim), 2, axis=1)
    out = dense_attention(q, k, both, ctx, config.scale, None)
    state = {"k": jnp.repeat(k, 2, axis=1), "v": both.reshape(len(v), -1, config.head_dim)}
    return out if only is None else out[only], state


def _difference(
    out: jax.Array,  # [T, N, 2H], or as many values in another shape
    lambdas: jax.Array,  # [4, H]
    config: DifferentialConfig,
) -> jax.Array:  # [T, N / 2, 2H]
    """The normalised difference of the heads of each pair, whose outputs are of both values."""
    c, weights = config, lambdas.astype(jnp.float32)
    first, second = jnp.exp(jnp.sum(weights[::2] * weights[1::2], axis=1))
    factor = (first - second + c.first).astype(out.dtype)
    queries = c.num_heads // c.num_kv_heads
    pairs = out.reshape(len(out), -1, 2, queries, 2 * c.head_dim)
    both = (pairs[:, :, 0] - factor * pairs[:, :, 1]).reshape(len(out), -1, 2 * c.head_dim)
    ones = jnp.ones(2 * c.head_dim, out.dtype)
    return (1 - c.first) * rms_norm(both, ones, c.norm_eps)
