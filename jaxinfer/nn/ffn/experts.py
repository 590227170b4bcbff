"""A mixture of experts: a router, experts for the tokens that chose them, a shared network.

Owns: ``Experts``. Parameters:

    router  [E, D]       router_bias  [E]      choice_bias float32[E]
    gate_up [E, 2F, D]: gate, up               gate_up_bias [E, 2F]
    down    [E, D, F]                          down_bias    [E, D]
    shared/gate_up, shared/down: see ``ffn.dense``
"""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.decoder_config import ExpertsConfig
from jaxinfer.nn.ffn.dense import FeedForward
from jaxinfer.nn.linear import Norm, Stream, added, normalised, weight
from pallas_kernels.experts.api import ExpertsArgs, experts
from pallas_kernels.experts.stack import Stack
from pallas_kernels.quantised import quantised
from pallas_kernels.route.api import RouteArgs, route

_INIT, _ZEROS = nn.initializers.normal(0.02), nn.initializers.zeros
_SEED_VALUES = 8  # of a token, from which ``_shifted`` draws
_GOLDEN = 0x9E3779B1  # 2 ** 32 / the golden ratio: Fibonacci hashing (Knuth 1973)


class Experts(nn.Module):
    """The mixture of experts of a layer, with the norm before it."""

    config: ExpertsConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, jax.Array]:  # [T, D], and [T, D] or float32[S, T, D]
        """The stream with its delta added, and the experts' weighted sum."""
        c, d, dtype = self.config, stream.x.shape[1], stream.x.dtype
        stream, h = normalised(stream, norm, ctx)
        choices, weights = self._routed(h, ctx)
        choices, weights = ctx.at("experts", choices), ctx.at("expert_weights", weights)
        own = c.count // _devices(ctx)
        if ctx.axis is not None:  # numbers of this device's experts; others are outside
            choices = choices - own * jax.lax.axis_index(ctx.axis)
        args = ExpertsArgs(
            x=h,
            choices=choices,
            weights=weights,
            gate_up=self._stack("gate_up", (own, 2 * c.width, d), dtype),
            down=self._stack("down", (own, d, c.width), dtype),
            gate_up_bias=self._bias("gate_up_bias", (own, 2 * c.width), dtype),
            down_bias=self._bias("down_bias", (own, d), dtype),
            activation=c.activation,
            split=ctx.axis is None,
        )
        out = experts(args, ctx.pinned("experts"))
        if ctx.axis is not None:
            out = jax.lax.psum(out, ctx.axis)
        if c.shared is not None:
            none = Norm(norm.weights, norm.row, norm.eps, "none")
            _, shared = FeedForward(c.shared, name="shared")(Stream(h), none, ctx)
            out = added(out, shared)
        return stream.x, out

    def _routed(self, h: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """The experts of each token and their weights, int32[T, k] and float32[T, k].

        Padding chooses -1, which is no expert.
        """
        c, dtype = self.config, h.dtype
        router = self.param("router", _INIT, (c.count, h.shape[1]), dtype)
        choice_bias = None
        if c.choice_bias:
            choice_bias = self.param("choice_bias", _ZEROS, (c.count,), jnp.float32)
        bias = self.param("router_bias", _ZEROS, (c.count,), dtype) if c.router_bias else None
        is_token = None if ctx.rows is None else ctx.rows.is_token
        args = RouteArgs(
            x=h,
            w=router,
            bias=bias,
            choice_bias=choice_bias,
            is_token=is_token,
            routing=c.routing,
        )
        choices, weights = route(args, ctx.pinned("route"))
        match c.dummy_routing:
            case "uniform":
                dummy = _shifted(choices, h, c.count)
            case "same":
                first = jnp.arange(choices.shape[1], dtype=choices.dtype)
                dummy = jnp.broadcast_to(first, choices.shape)
            case _:
                return choices, weights
        return dummy if is_token is None else jnp.where(is_token[:, None], dummy, -1), weights

    def _stack(self, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Stack:
        stack = weight(self, name, shape, dtype)
        return quantised(stack) if isinstance(stack, Mapping) else stack

    def _bias(self, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array | None:
        return self.param(name, _ZEROS, shape, dtype) if self.config.bias else None


def _devices(ctx: StepContext) -> int:
    return 1 if ctx.axis is None else jax.lax.axis_size(ctx.axis)


def _shifted(
    choices: jax.Array,  # int32[T, k]
    h: jax.Array,  # [T, D]
    count: int,
) -> jax.Array:  # int32[T, k]
    """The choices, all shifted by a pseudo-random number of experts that depends on the token.

    Each expert is then chosen with probability k / count whatever the router says, and different
    tokens choose independently. (With random weights the tokens of a batch may be so alike that
    most choose the same experts.) A token's experts depend on no other token.
    """
    bits = jax.lax.bitcast_convert_type(h[:, :_SEED_VALUES].astype(jnp.float32), jnp.uint32)
    hashed = jnp.zeros(len(h), jnp.uint32)
    for i in range(bits.shape[1]):
        hashed = (hashed ^ bits[:, i]) * jnp.uint32(_GOLDEN)
        hashed = hashed ^ (hashed >> 15)
    shift = (hashed % jnp.uint32(count)).astype(jnp.int32)
    return (choices + shift[:, None]) % count
