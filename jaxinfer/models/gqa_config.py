"""The config of families with grouped-query attention and a gated feed-forward network.

The field names are Hugging Face's where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    LayerSpec,
)
from jaxinfer.nn.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config of one decoder.

    ``windows`` has the attention window of each layer in tokens; None for a layer without one.
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
    mlp_bias: bool  # gate, up and down have biases
    qk_norm: bool
    dtype: jnp.dtype
    local_rope: RopeConfig | None = None  # rope of layers with a window; None: ``rope``
    attention_scale: float | None = None  # factor on scores; None: head_dim ** -0.5
    post_norms: bool = False  # norms also after attention and feed-forward network
    norm_dtype: jnp.dtype | None = None  # dtype of norms; None: ``dtype``
    embed_scale: float | None = None  # factor on embeddings

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(self.windows)

    @property
    def lengths(self) -> tuple[int, int]:
        """See ``ModelConfig``."""
        return self.rope.lengths(self.max_position_embeddings)

    def for_context(self, length: int) -> DecoderConfig:
        """See ``ModelConfig``."""
        local = None if self.local_rope is None else self.local_rope.for_context(length)
        return replace(self, rope=self.rope.for_context(length), local_rope=local)

    @property
    def decoder(self) -> DecoderSpec:
        """See ``ModelConfig``."""
        ffn = FeedForwardConfig(
            width=self.intermediate_size,
            activation=self.activation,
            gated=True,
            bias=self.mlp_bias,
        )
        return DecoderSpec(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(
                LayerSpec(self._mixer(window), ffn, self.post_norms) for window in self.windows
            ),
            norm="rms",
            norm_eps=self.rms_norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            dtype=self.dtype,
            norm_dtype=self.norm_dtype,
            embed_scale=self.embed_scale,
        )

    def _mixer(self, window: int | None) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale or self.head_dim**-0.5,
            window=window,
            rope=self.rope if window is None else self.local_rope or self.rope,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
        )
