"""A mixture of experts beside a dense network. Parameters of ``DenseAndExperts``:

those of ``ffn.experts``      dense/gate_up, dense/down: see ``ffn.dense``
ffn_norms [4, D]: of the dense network's output, before the experts, of their output, and
  before the router
"""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.ffn.beside_spec import DenseAndExpertsConfig
from jaxinfer.nn.ffn.dense import FeedForward
from jaxinfer.nn.ffn.experts import Experts
from jaxinfer.nn.linear import Norm, Outputs, Stream, normalised_by, whole
from jaxinfer.nn.weight import param


class DenseAndExperts(nn.Module):
    """Both networks of a layer, with the norm before the dense one."""

    config: DenseAndExpertsConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, Outputs]:  # [T, D]
        """The stream with its delta added, and both outputs with their norms."""
        weights = param(self, "ffn_norms")
        of_dense, before, of_experts, of_router = (Norm(weights, i, norm.eps) for i in range(4))
        stream, (h, own, routed) = normalised_by(stream, (norm, before, of_router), ctx)
        _, dense = FeedForward(self.config.dense, name="dense")(Stream(h), norm.as_none(), ctx)
        mixture = Experts(self.config.mixture)
        nn.share_scope(self, mixture)
        _, mixed = mixture(Stream(own), before.as_none(), ctx, routed)
        return stream.x, Outputs((whole(dense), whole(mixed)), (of_dense, of_experts))
