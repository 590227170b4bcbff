"""A mixture of experts: a router, experts for the tokens that chose them, a shared network.

Owns: ``Experts``. Parameters:

    router  [E, D]       router_bias  [E]      choice_bias float32[E]      expert_scale [E]
    expert_table int32[V, k] with experts of token ids
    gate_up [E, 2F, D]: gate, up, or [E, F, D] without gates        gate_up_bias [E, 2F]
    down    [E, D, F]                          down_bias    [E, D], or [D] of their sum
    shared/gate_up, shared/down: see ``ffn.dense``     shared_gate [D, 1] with a shared gate
    into_latent [D, L], from_latent [L, D] with a latent, which experts have in place of D
    latent_norm [L], output_norm [L] with norms of the latent and of each expert's output
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext, TokenIds
from jaxinfer.nn.decoder_config import ExpertsConfig
from jaxinfer.nn.ffn.dense import FeedForward
from jaxinfer.nn.linear import (
    Norm,
    Stream,
    added,
    added_partials,
    linear,
    normalised,
    whole,
)
from jaxinfer.nn.weight import Matmul, param, weight
from pallas_kernels.experts.api import ExpertsArgs, experts
from pallas_kernels.experts.stack import size_of
from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.route.api import RouteArgs, route


class Experts(nn.Module):
    """The mixture of experts of a layer, with the norm before it."""

    config: ExpertsConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        ctx: StepContext,
        routed: jax.Array | None = None,  # [T, D]
    ) -> tuple[jax.Array, PlainOutput]:  # [T, D]
        """The stream with its delta added, and the experts' weighted sum.

        The router's input is ``routed``, or the experts' if that is None.
        """
        c, fixed = self.config, ctx.pins.invariant
        stream, h = normalised(stream, norm, ctx, before_gemm=False)
        choices, weights = self._routed(h if routed is None else routed, ctx)
        choices, weights = ctx.at("experts", choices), ctx.at("expert_weights", weights)
        keeps = c.zero_experts and c.zero_keeps
        kept = _kept(h, choices, weights, c.count, ctx) if keeps else None
        down_bias = param(self, "down_bias") if c.bias else None
        if c.bias == "sum" and down_bias is not None:  # the weights add up to 1
            held, _, _ = size_of(weight(self, "down").matrix)
            down_bias = jnp.broadcast_to(down_bias, (held, h.shape[1]))
        if ctx.axis is not None and not c.slices:  # of this device's experts; others are outside
            held = c.count // jax.lax.axis_size(ctx.axis)
            choices = choices - held * jax.lax.axis_index(ctx.axis)
        elif ctx.axis is not None and down_bias is not None:  # one device adds it
            down_bias = jnp.where(jax.lax.axis_index(ctx.axis) == 0, down_bias, 0)
        x = h if c.latent is None else linear(h, weight(self, "into_latent"), ctx).y
        if c.norms is not None:
            x = rms_norm(x, param(self, "latent_norm"), c.norms.latent_eps, fixed=fixed)
        shares = weights[..., None]  # float32[T, k, 1]
        if c.weighs_inputs or c.norms is not None:  # a choice has a row of its own
            own = shares if c.weighs_inputs else jnp.ones_like(shares)
            x = (x[:, None] * own.astype(x.dtype)).reshape(-1, x.shape[1])
            choices = choices.reshape(-1, 1)
            weights = jnp.ones_like(choices, weights.dtype)
        args = ExpertsArgs(
            x=x,
            choices=choices,
            weights=weights,
            gate_up=weight(self, "gate_up").matrix,
            down=weight(self, "down").matrix,
            gate_up_bias=param(self, "gate_up_bias") if c.bias is True else None,
            down_bias=down_bias,
            activation=c.activation,
            split=ctx.splits and c.latent is None,
        )
        out = experts(args, ctx.pinned("experts"))
        if c.norms is not None:
            scale, eps = param(self, "output_norm"), c.norms.output_eps
            made = rms_norm(out * scale.astype(out.dtype), jnp.ones_like(scale), eps, fixed=fixed)
            made = made.reshape(len(h), -1, out.shape[1]).astype(jnp.float32) * shares
            out = made.sum(1).astype(h.dtype)
        elif c.weighs_inputs and c.routing.chosen > 1:
            out = out.reshape(*out.shape[:-2], len(h), c.routing.chosen, -1).sum(-2)
        if c.latent is not None:
            out = linear(out, weight(self, "from_latent"), ctx).y
        out = out if kept is None else added_partials(out, kept)
        shared, is_separate = (
            None,
            c.shared is not None and bool(c.shared.bias),
        )  # else one sum over devices
        if c.shared is not None:
            none = Norm(norm.weights, norm.row, norm.eps, "none")
            _, own = FeedForward(c.shared, name="shared")(Stream(h), none, ctx, summed=is_separate)
            shared = whole(own)
            if c.shared_gate:
                gate = weight(self, "shared_gate").matmul(h, Matmul(ctx.pins, wide=True))
                shared = _weighted(shared, gate)
            if c.shared_scale != 1.0:
                shared = shared * c.shared_scale
            if not is_separate:
                out = added_partials(out, shared)
        mixed = ctx.addends(out)
        return stream.x, added(mixed, shared) if shared is not None and is_separate else mixed

    def _routed(self, h: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """The experts of each token and their weights, int32[T, k] and float32[T, k].

        Padding chooses -1, which is no expert.
        """
        c, is_uniform = self.config, self.config.dummy_routing == "uniform"
        is_token, given = None if ctx.rows is None else ctx.rows.is_token, None
        if c.by_id:
            assert isinstance(ctx.layer_inputs, TokenIds), "the layer has no token ids"
            given = param(self, "expert_table")[ctx.layer_inputs.ids]
        args = RouteArgs(
            x=h,
            w=param(self, "router"),
            bias=param(self, "router_bias") if c.router_bias else None,
            choice_bias=param(self, "choice_bias") if c.choice_bias else None,
            expert_scale=param(self, "expert_scale") if c.expert_scale else None,
            given=given,
            is_token=is_token,
            routing=c.routing._replace(shifted_among=c.count) if is_uniform else c.routing,
        )
        choices, weights = route(args, ctx.pinned("route"))
        if c.dummy_routing != "same":
            return choices, weights
        first = jnp.arange(choices.shape[1], dtype=choices.dtype)
        dummy = jnp.broadcast_to(first, choices.shape)
        return dummy if is_token is None else jnp.where(is_token[:, None], dummy, -1), weights


def _kept(
    h: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    count: int,
    ctx: StepContext,
) -> jax.Array:  # [T, D]
    """The output of zero experts, which are the choices from ``count`` on; of one device."""
    own = jnp.sum(jnp.where(choices >= count, weights, 0), axis=1, keepdims=True)
    if ctx.axis is not None:
        own = jnp.where(jax.lax.axis_index(ctx.axis) == 0, own, 0)
    return (h.astype(jnp.float32) * own).astype(h.dtype)


def _weighted(
    out: jax.Array,  # [T, D] or float32[S, T, D]
    logits: jax.Array,  # float32[T, 1]
) -> jax.Array:  # as ``out``
    """The output of a network, or its split-K partials, times the sigmoid of a logit."""
    return (out.astype(jnp.float32) * jax.nn.sigmoid(logits)).astype(out.dtype)
