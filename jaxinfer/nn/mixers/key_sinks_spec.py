"""The spec of attention to keys that are parameters; ``nn.mixers.key_sinks`` has its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.around_spec import AroundAttention

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class KeySinksConfig(AroundAttention):
    """Attention to the context and to ``count`` keys of each KV head that are parameters, with
    values (``with_values``) or zeros (openPangu Pro MoE v2).

    All keys have an RMS norm with epsilon ``norm_eps`` before rope, which those parameters lack.
    """

    count: int
    with_values: bool
    norm_eps: float

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: in addition rotated heads, scores of parameters, and their values."""
        c = self.attention
        each = 3 * c.num_heads * c.head_dim + 2 * c.num_heads * self.count
        return c.workspace(params, step) + 4 * step.x.shape[0] * each

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, {self.count} keys are parameters"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.key_sinks").KeySinksAttention(self)
