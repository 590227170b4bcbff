"""The spec of experts behind a gated norm; its module is in ``nn.ffn.gated_input``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import ExpertsConfig, FeedForwardSpec

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class GatedInputConfig(FeedForwardSpec):
    """A mixture of experts, before which a gate of ``rank`` follows the norm (``nn.norm_gate``)."""

    mixture: ExpertsConfig
    rank: int

    @property
    def experts(self) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return self.mixture

    def with_experts(self, **fields: Any) -> Self:
        """See ``FeedForwardSpec``."""
        return replace(self, mixture=self.mixture.with_experts(**fields))

    def share(self, devices: int) -> Self:
        """See ``MixerSpec``."""
        return replace(self, mixture=self.mixture.share(devices))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``FeedForwardSpec``."""
        return self.mixture.points()

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return self.mixture.words()

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``FeedForwardSpec``."""
        return self.mixture.workspace(params, step)

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.gated_input").GatedInput(self)
