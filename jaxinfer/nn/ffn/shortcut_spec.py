"""The spec of experts whose output a later layer adds; the module is in ``nn.ffn.shortcut``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.nn.decoder_config import ExpertsConfig, FeedForwardConfig, FeedForwardSpec

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class ShortcutExpertsConfig(FeedForwardSpec):
    """A dense network, and experts of the same tokens whose output the network of the next layer
    adds (ScMoE, Cai et al. 2024, arXiv:2404.05019), as in LongCat-Flash.

    The residual stream is a ``ShortcutResidual``.
    """

    dense: FeedForwardConfig
    mixture: ExpertsConfig

    @property
    def experts(self) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return self.mixture

    def with_experts(self, **fields: Any) -> ShortcutExpertsConfig:
        """See ``FeedForwardSpec``."""
        return replace(self, mixture=self.mixture.with_experts(**fields))

    def share(self, devices: int) -> ShortcutExpertsConfig:
        """See ``MixerSpec``."""
        return replace(self, dense=self.dense.share(devices), mixture=self.mixture.share(devices))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``FeedForwardSpec``; those of the dense network."""
        return self.dense.points()

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return f"{self.dense.words()} and {self.mixture.words()}"

    def workspace(self, *call: Any) -> int:
        """See ``FeedForwardSpec``."""
        return self.mixture.workspace(*call)

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.shortcut").ShortcutExperts(self)


@dataclass(frozen=True)
class ShortcutResidual:
    """The stream, and behind it the output of experts that is still to be added to it."""

    num_streams: int = 2

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; it has no parameters."""
        is_network = name == "ffn_residual"
        return import_module("jaxinfer.nn.ffn.shortcut").WithShortcut(is_network)
