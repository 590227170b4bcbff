"""The spec of two mixers of the same stream; its module is in ``nn.mixers.side_by_side``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import AttentionConfig, MixerSpec
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState

if TYPE_CHECKING:
    import flax.linen as nn


class Scales(NamedTuple):
    """The factors of a mixer's input and of its output."""

    into: float = 1.0
    out: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig(MixerSpec):
    """Attention, and beside it a mixer with a state for each sequence, as in Falcon-H1.

    Both read the same normalised stream, and their outputs are added.
    """

    attention: AttentionConfig
    other: MixerSpec
    attention_scales: Scales = Scales()
    other_scales: Scales = Scales()

    @property
    def rope(self) -> RopeConfig | None:
        """See ``MixerSpec``."""
        return self.attention.rope

    def for_context(self, length: int) -> SideBySideConfig:
        """See ``MixerSpec``."""
        return replace(self, attention=self.attention.for_context(length))

    def share(self, devices: int) -> SideBySideConfig:
        """See ``MixerSpec``."""
        attention, other = self.attention.share(devices), self.other.share(devices)
        return replace(self, attention=attention, other=other)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return replace(self.other.state(dtype), paged=self.attention.state(dtype).paged)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``; those of attention."""
        return self.attention.points()

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.attention.words()} beside {self.other.words()}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: that of the other mixer, and the scaled inputs and outputs of both."""
        own = 4 * step.x.size * step.x.dtype.itemsize
        return self.other.workspace(params, step) + own

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.side_by_side").SideBySide(self)
