"""The spec of attention whose values experts make; ``nn.mixers.value_experts`` has its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.around_spec import AroundAttention
from pallas_kernels.route.routing import Routing

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class ValueExpertsConfig(AroundAttention):
    """Attention with a mixture of value experts (K2 Horizon).

    The values of a token are the sum of the SiLU of its experts' projections times their weights.
    ``choice_bias`` is that of ``ExpertsConfig``.
    """

    count: int
    routing: Routing
    choice_bias: bool

    @property
    def inner(self) -> int:
        """The width of one expert's values of all KV heads."""
        return self.attention.num_kv_heads * self.attention.head_dim

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: in addition the values of all experts, in float32, too."""
        own = step.x.shape[0] * self.count * self.inner * (step.x.dtype.itemsize + 4)
        return self.attention.workspace(params, step) + own

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, values of {self.routing.chosen} of {self.count} experts"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.value_experts").ValueExpertsAttention(self)
