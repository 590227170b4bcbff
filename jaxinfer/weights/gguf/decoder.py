"""The keys of config.json that most decoders share, from GGUF metadata."""

from __future__ import annotations

from typing import Any

from jaxinfer.core.errors import UnknownArchitectureError
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.rope import rope_scaling


def decoder_config(
    meta: ArchitectureMetadata,
    *,
    partial: bool = False,
    dense: bool = True,
    scaled: bool = False,
    eps: str = "rms_norm_eps",
    activations: tuple[str, ...] = ("silu", "swish"),
    heads: int | None = None,
    kv_heads: int | None = None,
    value_dim: bool = False,
) -> dict[str, Any]:
    """The keys of config.json of decoders whose heads have keys and values of their own width.

    With ``partial`` heads may rotate in part; without ``dense`` the file may lack the width of
    dense networks, or the caller has read it; with ``scaled`` the caller reads the scale of scores,
    with ``value_dim`` the width of values; with ``heads`` and ``kv_heads`` it has read their
    numbers. ``eps`` is the key
    of the epsilon, by default of RMS norms, others are of LayerNorms; ``activations`` are names of
    the one that llama.cpp computes, Hugging Face's first. Raises ``CheckpointError`` for a value
    that is not supported, and ``UnknownArchitectureError`` for experts, if no key of theirs was
    read before.
    """
    heads = heads or meta.count("attention.head_count")
    hidden_size = meta.count("embedding_length")
    if not meta.is_read("expert_count") and meta.number_if_set("expert_count"):
        raise UnknownArchitectureError(
            f"{meta.header.path} is a mixture of experts, which no known family covers"
        )
    head_dim = meta.count("attention.key_length", max(hidden_size // heads, 1))
    own = () if value_dim else ("attention.value_length",)
    for key in (*own, "attention.head_dim"):  # the latter is Ollama's
        meta.only(key, head_dim)
    if not scaled:
        meta.only("attention.scale", 0, head_dim**-0.5)
    meta.only("hidden_activation", *activations)
    rotated = meta.count("rope.dimension_count", head_dim) if partial else head_dim
    if rotated > head_dim or rotated % 2:
        words = f"must be an even number up to {head_dim}, the width of a head"
        meta.refuse("rope.dimension_count", rotated, words)
    width = "feed_forward_length"
    has_width = dense or (meta.has(width) and not meta.is_read(width))
    return {
        "hidden_size": hidden_size,
        **({"intermediate_size": meta.count(width)} if has_width else {}),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        eps: meta.number(f"attention.layer_norm_{'rms_' * eps.startswith('rms')}epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(meta, rotated),
        "hidden_act": activations[0],
        **({"partial_rotary_factor": rotated / head_dim} if partial else {}),
    }
