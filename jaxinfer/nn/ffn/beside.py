"""A mixture of experts beside a dense network. Parameters of ``DenseAndExperts``:

those of ``ffn.experts``      dense/gate_up, dense/down: see ``ffn.dense``
ffn_norms [4, D]: of the dense network's output, before the experts, of their output, and
  before the router
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.ffn.beside_spec import DenseAndExpertsConfig
from jaxinfer.nn.ffn.dense import FeedForward
from jaxinfer.nn.ffn.experts import Experts
from jaxinfer.nn.linear import Norm, Stream, normalised
from jaxinfer.nn.weight import param


class DenseAndExperts(nn.Module):
    """Both networks of a layer, with the norm before the dense one."""

    config: DenseAndExpertsConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, jax.Array]:  # [T, D] each
        """The stream with its delta added, and the sum of both outputs."""
        weights = param(self, "ffn_norms")
        of_dense, before, of_experts, of_router = (Norm(weights, i, norm.eps) for i in range(4))
        x, dense = FeedForward(self.config.dense, name="dense")(stream, norm, ctx)
        _, routed = normalised(Stream(x), of_router, ctx)
        routed = routed * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
        mixture = Experts(self.config.mixture)
        nn.share_scope(self, mixture)
        _, mixed = mixture(Stream(x), before, ctx, routed)
        none = jnp.zeros_like(x)
        _, dense = normalised(Stream(none, dense), of_dense, ctx)
        _, mixed = normalised(Stream(none, mixed), of_experts, ctx)
        return x, dense + mixed
