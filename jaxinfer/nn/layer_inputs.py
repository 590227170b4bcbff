"""The inputs that single layers have, and the end of a layer, which uses them.

Parameters of ``LayerInputs``, for L layers of P elements:

    embed [V, L * P]   projection [D, L * P]   norm [P]

and of ``LayerEnd`` within those of the layer:

    end_scale [1]      with an activation end_gate [D, P]   end_projection [P, D]   end_norm [1, D]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext, TokenIds
from jaxinfer.nn.layer_spec import LayerEndConfig, LayerInputsConfig
from jaxinfer.nn.linear import Norm, Outputs, Stream, linear
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.numerics import rms_norm


class LayerInputs(nn.Module):
    """The inputs of all layers."""

    config: LayerInputsConfig

    @nn.compact
    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        x: jax.Array,  # [T, D]: their embeddings in the residual stream
        ctx: StepContext,
    ) -> jax.Array:  # [T, L, P]
        """See ``LayerInputsConfig``."""
        c = self.config
        shape = (len(token_ids), c.num_layers, c.width)
        token_ids = jnp.where(
            token_ids < c.num_tokens, token_ids, 0
        )  # others have row 0 (Gemma 3n)
        own = weight(self, "embed", by_output=True).take_of(token_ids, ctx).astype(x.dtype)
        own = own * jnp.asarray(c.width**0.5, x.dtype)
        made = linear(x, weight(self, "projection"), ctx).y
        made = (made * jnp.asarray(x.shape[1] ** -0.5, x.dtype)).reshape(shape)
        made = rms_norm(made, param(self, "norm"), c.norm_eps, fixed=ctx.pins.invariant)
        return (made + own.reshape(shape)) * jnp.asarray(0.5**0.5, x.dtype)


@dataclass(frozen=True)
class OwnTokenIds:
    """The ids of tokens as the input of all layers."""

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        x: jax.Array,  # [T, D]
        ctx: StepContext,
    ) -> TokenIds:
        """See ``TokenIdsConfig``."""
        del x, ctx
        return TokenIds(token_ids)


class LayerEnd(nn.Module):
    """The end of a layer."""

    config: LayerEndConfig

    @nn.compact
    def __call__(self, stream: Stream, eps: float, ctx: StepContext) -> Stream:
        """The stream after it; ``eps`` is that of the norms of the residual stream."""
        factor, end = param(self, "end_scale"), stream.delta
        if self.config.activation is None and isinstance(end, Outputs):
            return Stream(stream.x, replace(end, factor=factor))
        x = stream.total(ctx.pins)
        if self.config.activation is not None:
            assert isinstance(ctx.layer_inputs, jax.Array), "the layers have no inputs"
            hidden = linear(x, weight(self, "end_gate"), ctx).y
            hidden = ACTIVATIONS[self.config.activation](hidden) * ctx.layer_inputs
            out = linear(hidden, weight(self, "end_projection"), ctx).y
            norm = Norm(param(self, "end_norm"), 0, eps)
            return Stream(x, Outputs((out,), (norm,), factor=factor))
        return Stream(x * factor)
