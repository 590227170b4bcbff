"""The spec of a gated delta rule mixer; its module is in ``nn.mixers.delta``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(MixerSpec):
    """A mixer with the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next.

    Each value head has a state [k_dim, v_dim]; ``num_v_heads`` is a multiple of ``num_k_heads``.
    Queries, keys and values pass a causal convolution over ``conv_width`` tokens. ``norm_eps`` is
    the epsilon of the norm of each head's output, which is multiplied by ``gate_act`` of a gate.
    ``decay`` is of a head, or of each channel: a row of the head's state (Kimi Linear: 2025,
    arXiv:2510.26692). With ``gate_rank`` the gates of the decay and of the output are expanded from
    two latents of that width. With ``decay_floor`` the logarithm of a decay is that negative bound
    times a sigmoid, instead of the rate times a softplus (Ling 3). The strength of a correction, a
    sigmoid, is multiplied by ``beta_scale``: with 2 a state may have negative eigenvalues
    (arXiv:2411.12537).
    """

    is_invariant: ClassVar[bool] = True
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    norm_eps: float
    decay: Literal["head", "channel"] = "head"
    gate_act: Literal["silu", "sigmoid"] = "silu"
    gate_rank: int | None = None
    decay_floor: float | None = None
    beta_scale: float = 1.0

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.num_k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Elements of a token's values, and of the gate of its output."""
        return self.num_v_heads * self.v_dim

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.num_v_heads * (self.k_dim if self.decay == "channel" else 1)

    @property
    def channels(self) -> Fused:
        """The channels of the convolution: queries, keys, values."""
        return Fused("heads", (self.keys, self.keys, self.values))

    def share(self, devices: int) -> DeltaConfig:
        """See ``MixerSpec``."""
        keys = part(self.num_k_heads, devices, "key heads")
        return replace(self, num_k_heads=keys, num_v_heads=self.num_v_heads // devices)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the heads' states, and the last inputs of the convolution.

        The input at position p is at place p % conv_width, so that a token replaces one place.
        """
        heads = (self.num_v_heads, self.k_dim, self.v_dim)
        inputs = (self.conv_width, sum(self.channels.widths))
        return LayerState(
            per_slot=(
                Entry("delta", heads, jnp.dtype(jnp.float32), ("heads", None, None)),
                Entry("conv", inputs, dtype, (None, self.channels)),
            ),
            align=CHUNK,
        )

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_v_heads, self.v_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        keys, values = f"{self.num_k_heads} key heads of {self.k_dim}", f"of {self.v_dim}"
        rule = "the gated delta rule" + " by channel" * (self.decay == "channel")
        return f"{rule}, {keys} and {self.num_v_heads} value heads {values}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").delta_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.delta").Delta(self)
