"""The spec of experts whose output a later layer adds; the module is in ``nn.ffn.shortcut``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.nn.ffn.beside_spec import DenseAndExpertsConfig

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class ShortcutExpertsConfig(DenseAndExpertsConfig):
    """A dense network, and experts of the same tokens whose output the network of the next layer
    adds (ScMoE, Cai et al. 2024, arXiv:2404.05019), as in LongCat-Flash.

    The residual stream is a ``ShortcutResidual``.
    """

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.shortcut").ShortcutExperts(self)


@dataclass(frozen=True)
class ShortcutResidual:
    """The stream, and behind it the output of experts that is still to be added to it."""

    is_invariant: ClassVar[bool] = True
    num_streams: int = 2

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; it has no parameters."""
        is_network = name == "ffn_residual"
        return import_module("jaxinfer.nn.ffn.shortcut").WithShortcut(is_network)
