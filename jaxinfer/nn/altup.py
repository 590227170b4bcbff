"""Alternating updates of n residual streams. Parameters within those of a layer:

    altup_router [D, n]   altup_norm [1, D]   predict [n, n * n]   correct [n, n]
    laurel_left [D, R]    laurel_right [R, D]
    laurel_norms [2, D]: of attention's output, of the projection
    correct_scale [D] if the active stream is scaled
    end_gate [D, P]       end_projection [P, D]   end_norm [1, D]

and outside the layers:

    residual/into [n - 1, D, D]   residual/out [n - 1, D, D]: [stream, output, input]

Source: ``modeling_gemma3n`` of Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.altup_spec import AltUpEndConfig, AltUpMixerConfig
from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Carried, Norm, Stream, linear, normalised, whole
from jaxinfer.nn.residual import Add
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.numerics import rms_norm

_SMALLEST = 1e-5  # of the mean square of a projection that is scaled


class AltUpStreams(nn.Module):
    """The streams outside the layers: see ``nn.residual.Plain``."""

    count: int

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The streams that embeddings begin: themselves, and projections of their length."""
        made = jnp.einsum("TD,SED->TSE", x, param(self, "into"))
        others = _of_length(made, x[:, None])
        return Stream(jnp.concatenate((x, *jnp.unstack(others, axis=1), x), axis=1))

    def read(self, stream: Stream, only: jax.Array | None) -> tuple[Stream, Add]:
        """Blocks use ``AltUpBlock``."""
        raise NotImplementedError

    def end(self, stream: Stream) -> Stream:
        """The mean of the first stream and of projections of the others, of its length."""
        streams, _ = _split(stream.total(), self.count)
        first = streams[:, :1]
        made = jnp.einsum("TSD,SED->TSE", streams[:, 1:], param(self, "out"))
        whole_ones = jnp.concatenate((first, _of_length(made, first)), axis=1)
        return Stream(jnp.mean(whole_ones, axis=1, dtype=jnp.float32).astype(first.dtype))


@dataclass(frozen=True)
class AltUpBlock:
    """How a block uses the streams: see ``nn.residual.Plain``."""

    count: int
    is_network: bool

    def read(self, stream: Stream, only: jax.Array | None) -> tuple[Stream, Add]:
        """All streams for the mixer, and the active one's value for the network."""
        del only
        if not self.is_network:
            return stream, _after_mixer
        total = stream.total()
        width = total.shape[1] // (self.count + 1)
        predicted, own = total[:, :-width], total[:, -width:]

        def add(x: jax.Array, delta: Any) -> Stream:
            return Stream(jnp.concatenate((predicted, Stream(x, delta).total()), axis=1))

        return Stream(own), add


def _after_mixer(x: jax.Array, delta: Any) -> Stream:
    """The predicted streams, and the active one with the output of both parts of the mixer."""
    assert isinstance(delta, Carried)
    own = Stream(x, delta.output).total() * jnp.asarray(0.5**0.5, x.dtype)
    return Stream(jnp.concatenate((delta.later, own), axis=1))


class AltUpMixer(nn.Module):
    """The mixer of a layer: the prediction of streams, and attention of the active one."""

    config: AltUpMixerConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,  # [T, (n + 1) * D]
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, Carried, LayerArrays | None]:
        """See ``attention.Attention``; the active stream [T, D], and the predicted ones."""
        c, eps = self.config, norm.eps
        streams, _ = _split(stream.total(ctx.pins), c.count)
        ways = _ways(self, streams[:, c.active], eps, ctx) @ param(self, "predict")
        ways = ways.reshape(-1, c.count, c.count)  # [T, to, from]
        predicted = streams + jnp.einsum("TRS,TSD->TRD", ways, streams)
        _, h = normalised(Stream(predicted[:, c.active]), norm, ctx)
        attention: Any = c.attention.module()
        nn.share_scope(self, attention)
        _, out, state = attention(Stream(h), norm.as_none(), state, ctx, only)
        predicted = predicted.reshape(len(predicted), -1)
        if only is not None:
            predicted, h = take_rows(predicted, only), take_rows(h, only)
        laurel = linear(h, weight(self, "laurel_left"), ctx).y
        laurel = linear(laurel, weight(self, "laurel_right"), ctx).y
        weights, fixed = param(self, "laurel_norms"), ctx.pins.invariant
        out = Stream(jnp.zeros_like(h), whole(out)).total()
        own = rms_norm(out, weights[0], eps, fixed=fixed)
        own = own + h + rms_norm(laurel, weights[1], eps, fixed=fixed)
        active = predicted.reshape(len(h), c.count, -1)[:, c.active]
        return active, Carried(own, predicted), state


class AltUpEnd(nn.Module):
    """The end of a layer."""

    config: AltUpEndConfig

    @nn.compact
    def __call__(self, stream: Stream, eps: float, ctx: StepContext) -> Stream:
        """The streams after it; ``eps`` is that of the norms of the residual stream."""
        c = self.config
        assert c.activation is not None
        assert isinstance(ctx.layer_inputs, jax.Array), "layers have no inputs"
        predicted, own = _split(stream.total(ctx.pins), c.count)
        ways = _ways(self, own, eps, ctx) @ param(self, "correct") + 1
        change = own - predicted[:, c.active]
        streams = predicted + change[:, None] * ways[..., None]
        first = streams[:, c.active]
        if c.scaled:
            first = first * param(self, "correct_scale")
        hidden = linear(first, weight(self, "end_gate"), ctx).y
        hidden = ACTIVATIONS[c.activation](hidden) * ctx.layer_inputs
        out = linear(hidden, weight(self, "end_projection"), ctx).y
        out = rms_norm(out, param(self, "end_norm")[0], eps, fixed=ctx.pins.invariant)
        streams = streams.at[:, 1:].add(out[:, None])
        return Stream(jnp.concatenate((streams.reshape(len(own), -1), own), axis=1))


def _split(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:  # [T, n, D], [T, D]
    """The streams, and the value behind them."""
    width = x.shape[1] // (count + 1)
    return x[:, :-width].reshape(len(x), count, width), x[:, -width:]


def _ways(module: nn.Module, x: jax.Array, eps: float, ctx: StepContext) -> jax.Array:  # [T, n]
    """A token's weights of the streams: a small projection of it, between -1 and 1."""
    h = rms_norm(x, param(module, "altup_norm")[0], eps, fixed=ctx.pins.invariant)
    ways = (h * jnp.asarray(1 / x.shape[1], x.dtype)) @ param(module, "altup_router")
    return jnp.tanh(ways.astype(jnp.float32)).astype(x.dtype)


def _of_length(x: jax.Array, like: jax.Array) -> jax.Array:  # [T, S, D]
    """The vectors with the root mean square of others."""
    target = jnp.sqrt(jnp.mean(jnp.square(like), axis=-1, keepdims=True))
    own = jnp.maximum(jnp.mean(jnp.square(x), axis=-1, keepdims=True), _SMALLEST)
    return x * target / jnp.sqrt(own)
