"""Specs of experts whose routers pass a state from layer to layer, and of the stream that carries
it; the modules are in ``nn.ffn.router_states``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import ExpertsConfig, FeedForwardSpec

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class ExpertsByStatesConfig(FeedForwardSpec):
    """A mixture of experts, whose router reads what a network of two layers makes of a state of
    ``width`` elements (ZAYA).

    The state is a projection of the token, and with ``adds`` that of the last layer times a
    parameter. The residual stream is a ``StatesResidual``.
    """

    is_invariant: ClassVar[bool] = False
    mixture: ExpertsConfig
    width: int
    adds: bool

    @property
    def experts(self) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return self.mixture

    def with_experts(self, **fields: Any) -> Self:
        """See ``FeedForwardSpec``."""
        return replace(self, mixture=self.mixture.with_experts(**fields))

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return f"{self.mixture.words()}, chosen by states of {self.width}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``FeedForwardSpec``: that of experts, the normalised tokens, and the states."""
        states = 6 * step.x.shape[0] * self.width * step.x.dtype.itemsize
        more = 2 * step.x.size * step.x.dtype.itemsize
        return self.mixture.workspace(params, step) + states + more

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.router_states").ExpertsByStates(self)


@dataclass(frozen=True)
class StatesResidual:
    """The stream, and behind it the router's state with zeros up to the stream's width.

    Embeddings, and of each block the stream and the output, have a bias and a factor.
    """

    is_invariant: ClassVar[bool] = True
    num_streams: int = 2

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``."""
        module = import_module("jaxinfer.nn.ffn.router_states")
        if name == "residual":
            return module.StatesOutside(name=name)
        return module.StatesInLayer(name == "ffn_residual", name=name)
