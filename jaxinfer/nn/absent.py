"""Blocks that a layer does not have, as in decoders whose layers are a mixer or a network alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import jax.numpy as jnp

from jaxinfer.nn.decoder_config import FeedForwardSpec, MixerSpec
from jaxinfer.nn.state import LayerState


@dataclass(frozen=True)
class NoMixer(MixerSpec):
    """The mixer of a layer that has a network alone."""

    is_invariant: ClassVar[bool] = True
    is_invariant_on_gpu: ClassVar[bool] = True

    @property
    def is_absent(self) -> bool:
        """See ``BlockSpec``."""
        return True

    def share(self, devices: int) -> NoMixer:
        """See ``MixerSpec``."""
        del devices
        return self

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        del dtype
        return LayerState()

    def module(self) -> NoReturn:
        """Not called: see ``BlockSpec.is_absent``."""
        raise AssertionError("the layer has no mixer")


@dataclass(frozen=True)
class NoNetwork(FeedForwardSpec):
    """The feed-forward network of a layer that has a mixer alone."""

    is_invariant_on_gpu: ClassVar[bool] = True

    @property
    def is_absent(self) -> bool:
        """See ``BlockSpec``."""
        return True

    def share(self, devices: int) -> NoNetwork:
        """See ``MixerSpec``."""
        del devices
        return self

    def module(self) -> NoReturn:
        """Not called: see ``BlockSpec.is_absent``."""
        raise AssertionError("the layer has no network")
