"""What a decoder is made of, as data: its layers, each a mixer and a feed-forward network.

A family's oddities are values here: which norms a layer has, what is scaled, how it rotates. The
specs need no Flax: ``module`` imports what it makes, since Flax takes half as long as JAX to import
and an engine whose steps are compiled already does not need it.

Owns: ``DecoderSpec``, ``LayerSpec``, and the specs of the parts in ``nn.mixers`` and ``nn.ffn``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol

import jax.numpy as jnp

from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState, StateLayout, keys_and_values, state_layout

if TYPE_CHECKING:
    import flax.linen as nn


class MixerSpec(Protocol):
    """How a layer mixes tokens. Hashable; ``module`` is called as ``mixers.attention`` is."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation that the layer's context has the angles of."""
        ...

    def state(self, dtype: jnp.dtype) -> LayerState:
        """What the layer remembers."""
        ...

    def module(self) -> nn.Module:
        """The module, whose parameters are the layer's."""
        ...


class FeedForwardSpec(Protocol):
    """What a layer does to each token. Hashable; ``module`` is called as ``ffn.dense`` is."""

    def module(self) -> nn.Module:
        """The module, whose parameters are the layer's."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention. ``window`` is how far back it looks, None for everything; ``scale``
    multiplies the scores.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        return keys_and_values(self.num_kv_heads, self.head_dim, dtype, self.window)

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.attention").Attention(self)


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """A dense feed-forward network; ``activation`` is a name in ``ACTIVATIONS``."""

    width: int
    activation: str
    gated: bool
    bias: bool = False

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.dense").FeedForward(self)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: each part has a norm before it, and with ``post_norms`` one behind it as well."""

    mixer: MixerSpec
    ffn: FeedForwardSpec
    post_norms: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder. ``embed_scale`` multiplies embeddings, ``num_positions`` is the length of a table
    of learned positions (None without), ``norm_dtype`` that of norms where it is not ``dtype``.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: Literal["rms", "layer"]
    norm_eps: float
    tie_word_embeddings: bool
    dtype: jnp.dtype
    norm_dtype: jnp.dtype | None = None
    embed_scale: float | None = None
    num_positions: int | None = None

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The kinds of rotation, each once."""
        found = (layer.mixer.rope for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @cached_property
    def layout(self) -> StateLayout:
        """Where the layers' state is."""
        return state_layout([layer.mixer.state(self.dtype) for layer in self.layers])

    def module(self) -> nn.Module:
        """The module, which is cheap and holds no arrays."""
        return import_module("jaxinfer.nn.decoder").Decoder(self)
