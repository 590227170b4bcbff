"""Specs of alternating updates, whose modules are in ``nn.altup``: the residual streams, the mixer
that reads them, and the end of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import AttentionConfig, MixerSpec
from jaxinfer.nn.layer_spec import LayerEndConfig
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True)
class AltUpResidual:
    """Alternating updates (Baykal et al. 2023, arXiv:2301.13310) of ``count`` streams.

    A layer predicts all streams from all, its blocks compute the active one, and its end corrects
    the others by the difference. Behind the streams is the active one's new value, while a layer
    computes it. Streams begin as projections of embeddings, and end as the mean of projections.
    """

    is_invariant: ClassVar[bool] = False
    count: int

    @property
    def num_streams(self) -> int:
        """See ``ResidualSpec``."""
        return self.count + 1

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``."""
        module = import_module("jaxinfer.nn.altup")
        if name == "residual":
            return module.AltUpStreams(self.count, name=name)
        return module.AltUpBlock(self.count, name == "ffn_residual")


@dataclass(frozen=True, kw_only=True)
class AltUpMixerConfig(MixerSpec):
    """The prediction of ``count`` streams, attention of the ``active`` one, and beside attention a
    projection of rank ``laurel_rank`` (learned augmented residual: Menghani, Kumar and Kumar 2024,
    arXiv:2411.07501).
    """

    attention: AttentionConfig | SharedAttentionConfig
    count: int
    active: int
    laurel_rank: int

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> AltUpMixerConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> AltUpMixerConfig:
        """See ``MixerSpec``; every device has all streams."""
        return replace(self, attention=self.attention.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return self.attention.state(dtype)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return self.attention.points()

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()}, of {self.count} streams"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: that of attention, the predicted streams and their products."""
        own = 4 * (self.count + 1) * step.x.size * step.x.dtype.itemsize
        return self.attention.workspace(params, step) + own

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.altup").AltUpMixer(self)


@dataclass(frozen=True)
class AltUpEndConfig(LayerEndConfig):
    """The correction of ``count`` streams, and a block that adds what the layer's input makes of
    the ``active`` one to all but the first.

    The active stream is multiplied by a parameter before that block, if it is ``scaled``.
    """

    count: int = 0
    active: int = 0
    scaled: bool = True

    def module(self) -> nn.Module:
        """See ``LayerEndConfig``."""
        return import_module("jaxinfer.nn.altup").AltUpEnd(self)
