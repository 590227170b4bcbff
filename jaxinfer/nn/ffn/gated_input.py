"""Experts behind a gated norm. Parameters: those of ``ffn.experts``, ffn_gate_in, ffn_gate_out."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.ffn.gated_input_spec import GatedInputConfig
from jaxinfer.nn.linear import Norm, Stream
from jaxinfer.nn.norm_gate import gated_norm


class GatedInput(nn.Module):
    """The experts of a layer, with the norm and the gate before them."""

    config: GatedInputConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, PlainOutput]:  # [T, D]
        """See ``ffn.experts.Experts``."""
        experts: Any = self.config.mixture.module()
        nn.share_scope(self, experts)
        stream, h = gated_norm(self, "ffn_gate", stream, norm, ctx)
        _, delta = experts(Stream(h), norm.as_none(), ctx)
        return stream.x, delta
