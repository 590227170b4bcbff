"""The spec of a Mamba mixer; its module is in ``nn.mixers.mamba``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class MambaConfig(MixerSpec):
    """A mixer with a selective state space of each channel (Gu and Dao 2023, arXiv:2312.00752).

    Each of ``inner`` channels has a state of ``state_dim`` numbers, each with a rate of its own. A
    token's steps, of all channels, are expanded from ``rank`` numbers. These, the key b and the
    query c are projected from the channels after a causal convolution over ``conv_width`` tokens.
    ``inner_norms`` are RMS norms of the three, "plain" ones without weights. With ``num_heads``, of
    equally many consecutive channels, each makes its own steps, b and c of its channels (Zamba).
    """

    inner: int
    state_dim: int
    rank: int
    conv_width: int
    num_heads: int | None = None
    inner_norms: Literal["weights", "plain"] | None = None
    norm_eps: float = 1e-6
    bias: bool = False
    conv_bias: bool = True

    def share(self, devices: int) -> MambaConfig:
        """See ``MixerSpec``."""
        heads = self.num_heads and part(self.num_heads, devices, "heads of Mamba")
        inner = part(self.inner, devices, "channels of Mamba")
        return replace(self, inner=inner, num_heads=heads)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the channels' states, and the last inputs of the convolution.

        The input at position p is at place p % conv_width, so that a token replaces one place.
        """
        states = (self.inner, self.state_dim)
        return LayerState(
            per_slot=(
                Entry("ssm", states, jnp.dtype(jnp.float32), ("heads", None)),
                Entry("conv", (self.conv_width, self.inner), dtype, (None, "heads")),
            ),
            align=CHUNK,
        )

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (1, self.inner)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"Mamba, {self.inner} channels with states of {self.state_dim}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").mamba_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.mamba").Mamba(self)
