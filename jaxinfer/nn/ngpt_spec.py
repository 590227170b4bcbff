"""Specs of a normalised transformer (nGPT, Loshchilov et al. 2024, arXiv:2410.01131) as Dory is.

Vectors have length 1 in place of a mean square of 1. The modules are in ``nn.ngpt``,
``nn.mixers.ngpt`` and ``nn.ffn.ngpt``. ``factor`` is what a stored parameter is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import AttentionConfig, FeedForwardConfig
from jaxinfer.nn.layer_spec import LayerEndConfig

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class NGPTResidual:
    """One stream of unit vectors, and behind it the one with which each pass begins.

    A block reads the unit vector of the stream, which then moves towards the unit vector of the
    block's output, in each component by the magnitude of a parameter times ``factor``.
    """

    is_invariant: ClassVar[bool] = False
    num_streams: ClassVar[int] = 2
    factor: float

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; the decoder's has no parameters."""
        module = import_module("jaxinfer.nn.ngpt")
        return module.UnitStream() if name == "residual" else module.Towards(self, name=name)


@dataclass(frozen=True)
class PassStartConfig(LayerEndConfig):
    """The end of a layer after which a pass through the recurrent layers begins: the unit vector of
    the stream is added to that with which the first pass began; the ``first`` one is kept.
    """

    first: bool = False

    def module(self) -> nn.Module:
        """See ``LayerEndConfig``."""
        return import_module("jaxinfer.nn.ngpt").PassStart(self)


@dataclass(frozen=True, kw_only=True)
class NGPTAttentionConfig(AttentionConfig):
    """Attention of queries and keys of length 1.

    Queries are multiplied after rope by the square of a parameter times ``query_factor``, and the
    gates of outputs before the sigmoid by that of another one times ``gate_factor``. The outputs of
    all heads, of all devices ``width`` elements, become a unit vector.
    """

    is_invariant: ClassVar[bool] = False
    is_invariant_on_gpu: ClassVar[bool] = False
    query_factor: float
    gate_factor: float
    width: int

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: also the heads and their gates in float32, before and after."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return super().workspace(params, step) + 2 * 4 * step.x.shape[0] * heads

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.ngpt").NGPTAttention(self)


@dataclass(frozen=True, kw_only=True)
class NGPTFeedForwardConfig(FeedForwardConfig):
    """A gated network of SiLU whose gates and ups are multiplied by parameters times ``factor``.

    The hidden values, on all devices ``whole`` of them, become a unit vector.
    """

    is_invariant: ClassVar[bool] = False
    is_invariant_on_gpu: ClassVar[bool] = False
    factor: float
    whole: int

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.ngpt").NGPTFeedForward(self)
