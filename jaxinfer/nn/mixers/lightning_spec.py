"""The spec of a lightning attention mixer; its module is in ``nn.mixers.lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.nn.block import BlockSpec, StepShape, part
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.positions import Alibi
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class LightningConfig(BlockSpec):
    """Linear attention with a fixed decay of each head (Qin et al. 2024, arXiv:2401.04658).

    A head has a state [head_dim, head_dim]: each token multiplies it by exp(-slope) and adds its
    value times its key; the output is the state times the query, which ``scale`` multiplies. With
    ``silu`` queries, keys and values pass SiLU first; with ``qk_norm`` each query and key has an
    RMS norm, before ``rope``. The heads' outputs have an RMS norm over each of ``norm_groups``
    parts of them, with the epsilon ``norm_eps``, and are multiplied by the sigmoid of a gate.
    ``slopes`` are those of all heads. With ``spread`` a part of the norm is on all devices.
    """

    num_heads: int
    head_dim: int
    slopes: Alibi
    norm_eps: float
    norm_groups: int = 1
    scale: float = 1.0
    silu: bool = False
    qk_norm: bool = False
    rope: RopeConfig | None = None
    spread: bool = False

    @property
    def inner(self) -> int:
        """Elements of a token's queries, of its keys, of its values, and of its gate."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> Fused:
        """A token's projection: queries, keys, values, the gate."""
        return Fused("heads", (self.inner,) * 4, (self.num_heads,) * 4)

    def share(self, devices: int) -> LightningConfig:
        """See ``MixerSpec``."""
        spread = self.norm_groups == 1
        if not spread and self.norm_groups % devices:
            raise ConfigError(
                f"a norm of {self.norm_groups} groups of heads cannot be divided among {devices} "
                "devices"
            )
        return replace(
            self,
            num_heads=part(self.num_heads, devices, "heads of lightning attention"),
            norm_groups=1 if spread else self.norm_groups // devices,
            spread=spread,
        )

    def for_context(self, length: int) -> LightningConfig:
        """See ``MixerSpec``."""
        return replace(self, rope=self.rope and self.rope.for_context(length))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the heads' states, values by keys."""
        del dtype
        heads = (self.num_heads, self.head_dim, self.head_dim)
        entry = Entry("lightning", heads, jnp.dtype(jnp.float32), ("heads", None, None))
        return LayerState(per_slot=(entry,), align=CHUNK)

    def with_pages(self, dtype: jnp.dtype) -> None:
        """See ``MixerSpec``; there are no pages."""
        del dtype

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.head_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"lightning attention, {self.num_heads} heads of {self.head_dim}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").lightning_bytes(self, step)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.lightning").Lightning(self)
