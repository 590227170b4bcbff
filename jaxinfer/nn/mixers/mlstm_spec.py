"""The spec of xLSTM's matrix memory; its module is in ``nn.mixers.mlstm``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import StepShape, part
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.state import Entry, LayerState
from pallas_kernels.lib.chunk_scan import CHUNK

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True, kw_only=True)
class MlstmConfig(MixerSpec):
    """Linear attention with gates of each token and head (mLSTM, Beck et al. 2024,
    arXiv:2405.04517).

    A head has sums [key_dim, value_dim] of keys times values, and one of keys. A token multiplies
    them by a sigmoid of its forget gate, and adds its own times exp(input gate). The output is the
    query times the first, divided by the absolute value of the query times the second, or by 1 if
    that is less. Sums are kept divided by the exponential of a maximum m, and ``eps`` is added to
    the divisor in that form. Gates are c tanh(x / c) with c ``gate_cap``. The heads' outputs have a
    LayerNorm without bias, with the epsilon ``norm_eps``, and are multiplied by a sigmoid.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    eps: float
    norm_eps: float

    @property
    def projected(self) -> Fused:
        """A token's projection: queries, keys, values, the gates of the output."""
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        return Fused("heads", (keys, keys, values, values), (self.num_heads,) * 4)

    def share(self, devices: int) -> MlstmConfig:
        """See ``MixerSpec``."""
        return replace(self, num_heads=part(self.num_heads, devices, "heads of xLSTM"))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the sums with values, that of keys, and a column of m."""
        del dtype
        shape = (self.num_heads, self.key_dim, self.value_dim + 2)
        entry = Entry("mlstm", shape, jnp.dtype(jnp.float32), ("heads", None, None))
        return LayerState(per_slot=(entry,), align=CHUNK)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.value_dim)}

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"xLSTM, {self.num_heads} heads of {self.key_dim} by {self.value_dim}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: inputs and outputs of chunks, in float32 and in two orders, and what
        one chunk needs.
        """
        del params
        if not step.num_prompts:
            return 0
        chunks = step.x.shape[0] // CHUNK + step.num_prompts
        widths = 6 * self.key_dim + 6 * (self.value_dim + 2)
        matrices = 4 * CHUNK * CHUNK + 3 * self.key_dim * (self.value_dim + 2)
        return 4 * self.num_heads * (chunks * CHUNK * widths + matrices)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.mlstm").Mlstm(self)
