"""The sizes and switches of ``nn.decoder``: a family's oddities are values in it.

Owns: ``DecoderConfig``. Must not know: families, Flax: see ``models.gqa.decoder``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxinfer.nn.kv import KVSpec, LayerKVSpec
from jaxinfer.nn.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder; field names are Hugging Face's where it has one.

    ``windows`` holds one entry per layer: how far back it looks, None for everything.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    activation: str  # of the gate: a name in ``ACTIVATIONS``
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool  # of gate, up and down
    qk_norm: bool
    dtype: jnp.dtype

    @property
    def num_hidden_layers(self) -> int:
        """L."""
        return len(self.windows)

    @property
    def lengths(self) -> tuple[int, int]:
        """See ``ModelConfig``."""
        return self.rope.lengths(self.max_position_embeddings)

    def for_context(self, length: int) -> DecoderConfig:
        """See ``ModelConfig``."""
        return replace(self, rope=self.rope.for_context(length))

    @property
    def kv_spec(self) -> KVSpec:
        """What the layers keep per token."""
        k, h = self.num_key_value_heads, self.head_dim
        return KVSpec(tuple(LayerKVSpec(k, h, window) for window in self.windows), self.dtype)
