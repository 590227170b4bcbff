"""Experts whose routers pass a state from layer to layer. Parameters of ``ExpertsByStates``, with
states of R elements:

those of ``ffn.experts``, whose router is [E, R]
router_in [D, R]      router_in_bias [R]     router_scale [R] if the last layer's state is added
router_norm [R]       router_first [R, R]    router_first_bias [R]
router_second [R, R]  router_second_bias [R]

and of the stream: NAME_residual/factors [4, D] of each block, the biases and factors of the output
and of the stream, and outside the layers residual/factors [2, D], those of embeddings.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.ffn.experts import Experts
from jaxinfer.nn.ffn.router_states_spec import ExpertsByStatesConfig
from jaxinfer.nn.linear import Carried, Norm, Stream, normalised
from jaxinfer.nn.residual import Add
from jaxinfer.nn.weight import param, take_rows
from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.numerics import rms_norm


class ExpertsByStates(nn.Module):
    """The mixture of a layer, with the norm before it."""

    config: ExpertsByStatesConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,  # [T, 2D]
        norm: Norm,
        ctx: StepContext,
    ) -> tuple[jax.Array, Carried]:  # [T, D]
        """The stream without the state, and the experts' sum with the new state."""
        c, gelu = self.config, ACTIVATIONS["gelu"]
        x, before = jnp.split(stream.total(ctx.pins), 2, axis=1)
        _, h = normalised(Stream(x), norm, ctx)
        own = h @ param(self, "router_in") + param(self, "router_in_bias")
        if c.adds:
            own = own + before[:, : c.width] * param(self, "router_scale")
        routed = rms_norm(own, param(self, "router_norm"), norm.eps, fixed=ctx.pins.invariant)
        for name in ("router_first", "router_second"):
            routed = gelu(routed @ param(self, name) + param(self, f"{name}_bias"))
        mixture = Experts(c.mixture)
        nn.share_scope(self, mixture)
        _, out = mixture(Stream(h), norm.as_none(), ctx, routed)
        return x, Carried(out, jnp.pad(own, ((0, 0), (0, x.shape[1] - c.width))))


class StatesOutside(nn.Module):
    """The stream outside the layers: see ``nn.residual.Plain``."""

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream that embeddings begin, and no state."""
        bias, factor = param(self, "factors")
        return Stream(jnp.concatenate(((x + bias) * factor, jnp.zeros_like(x)), axis=1))

    def read(self, stream: Stream, only: jax.Array | None) -> tuple[Stream, Add]:
        """Blocks use ``StatesInLayer``."""
        raise NotImplementedError

    def end(self, stream: Stream) -> Stream:
        """The input [T, D] of the final norm."""
        return Stream(jnp.split(stream.total(), 2, axis=1)[0])


class StatesInLayer(nn.Module):
    """How a block uses the stream: see ``nn.residual.Plain``."""

    is_network: bool

    @nn.compact
    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """The stream for the mixer, with the state for the network."""
        out_bias, out_factor, bias, factor = param(self, "factors")
        total = stream.total()
        x, state = jnp.split(total, 2, axis=1)
        kept = state if only is None else take_rows(state, only)

        def add(x: jax.Array, delta: Any) -> Stream:
            later = kept
            if isinstance(delta, Carried):
                delta, later = delta.output, delta.later
            out = Stream(jnp.zeros_like(x), delta).total()
            own = (out + out_bias) * out_factor + (x + bias) * factor
            return Stream(jnp.concatenate((own, later), axis=1))

        return Stream(total if self.is_network else x), add
