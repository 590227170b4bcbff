"""The spec of a mixture of experts beside a dense network; its module is in ``nn.ffn.beside``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import ExpertsConfig, FeedForwardConfig, FeedForwardSpec

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class DenseAndExpertsConfig(FeedForwardSpec):
    """A dense network and a mixture of experts of the same stream, as in Gemma 4.

    Each has a norm of its own before it and one of its output; the outputs are added. The router
    has a third norm of the stream.
    """

    dense: FeedForwardConfig
    mixture: ExpertsConfig

    @property
    def experts(self) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return self.mixture

    def with_experts(self, **fields: Any) -> Self:
        """See ``FeedForwardSpec``."""
        return replace(self, mixture=self.mixture.with_experts(**fields))

    def share(self, devices: int) -> Self:
        """See ``MixerSpec``."""
        return replace(self, dense=self.dense.share(devices), mixture=self.mixture.share(devices))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``FeedForwardSpec``; those of the dense network."""
        return self.dense.points()

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return f"{self.dense.words()} and {self.mixture.words()}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``FeedForwardSpec``."""
        return self.mixture.workspace(params, step)

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.beside").DenseAndExperts(self)
