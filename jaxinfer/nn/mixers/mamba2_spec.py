"""The spec of a Mamba-2 mixer; its module is in ``nn.mixers.mamba2``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.nn.block import StepShape, kv_part, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerSpec):
    """A mixer with a state space of each head (Dao and Gu 2024, arXiv:2405.21060).

    A head of width ``head_dim`` has a state [head_dim, state_dim], which a step of the token
    decays, and to which it adds the head's input times a key b; the output is the state times a
    query c, plus the input times a parameter. Heads of one of ``num_groups`` groups share b and c.
    Inputs, b and c pass a causal convolution over ``conv_width`` tokens. Steps are limited to
    ``step_limit``.

    ``norm`` is the place of an RMS norm of the output, over each of ``norm_groups`` parts: after it
    is multiplied by SiLU of a gate, before that, or None. ``multipliers`` of the gate, the input,
    b, c and the step are those of Falcon-H1. With ``spread`` a part of the norm is on all devices.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    norm_eps: float
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    norm_groups: int = 1
    conv_bias: bool = True
    into_bias: bool = False
    o_bias: bool = False
    step_limit: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, float, float, float, float] | None = None
    spread: bool = False

    @property
    def inner(self) -> int:
        """Elements of a token's input, of its gate, and of its output."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of a token's b, and of its c."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> Fused:
        """The channels of the convolution: inputs, b, c."""
        units = (self.num_heads, self.num_groups, self.num_groups)
        return Fused("heads", (self.inner, self.keys, self.keys), units)

    @property
    def projected(self) -> Fused:
        """A token's projection: gate, inputs, b, c, steps."""
        inner, keys, heads = self.inner, self.keys, self.num_heads
        units = (heads, heads, self.num_groups, self.num_groups, heads)
        return Fused("heads", (inner, inner, keys, keys, heads), units)

    def share(self, devices: int) -> Mamba2Config:
        """See ``MixerSpec``. A group may be on several devices, as a KV head."""
        spread = self.norm is not None and self.norm_groups == 1
        if self.norm is not None and not spread and self.norm_groups % devices:
            raise ConfigError(
                f"a norm of {self.norm_groups} groups of heads cannot be divided among {devices} "
                "devices"
            )
        heads = part(self.num_heads, devices, "heads of Mamba-2")
        return replace(
            self,
            num_heads=heads,
            num_groups=kv_part(self.num_groups, devices),
            norm_groups=1 if self.norm is None or spread else self.norm_groups // devices,
            spread=spread,
        )

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the heads' states, and the last inputs of the convolution.

        The input at position p is at place p % conv_width, so that a token replaces one place.
        """
        heads = (self.num_heads, self.head_dim, self.state_dim)
        inputs = (self.conv_width, sum(self.channels.widths))
        return LayerState(
            per_slot=(
                Entry("ssm", heads, jnp.dtype(jnp.float32), ("heads", None, None)),
                Entry("conv", inputs, dtype, (None, self.channels)),
            ),
            align=CHUNK,
        )

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.head_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        heads = f"{self.num_heads} heads of {self.head_dim}"
        return f"Mamba-2, {heads} with states of {self.state_dim}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").mamba2_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.mamba2").Mamba2(self)
