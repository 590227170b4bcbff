"""Builds the config of Gemma 3n from GGUF metadata.

Source: ``load_arch_hparams`` of llama.cpp's src/models/gemma3n.cpp, and its converter.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.families import FULL, REFERENCE, WINDOWED, windows
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.rope import rope_scaling

_INPUTS, _LAUREL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"
_CAP = 30.0  # llama.cpp's, of logits
_DIGITS = 6  # of shares, which the file has as float32 deviations


def gemma3n_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Gemma 3n (text)."""
    meta.only("tensor_data_layout", REFERENCE)
    meta.only("hidden_activation", "gelu_pytorch_tanh", "gelu")
    meta.only("attention.scale", 0, 1)
    heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", max(width // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        meta.only(key, head_dim)
    full = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base", 1e6)}
    local = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 1e4)}
    return {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "hidden_size": width,
        "intermediate_size": meta.each("feed_forward_length")[: meta.num_layers],
        "activation_sparsity_pattern": _shares(meta),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_kv_shared_layers": meta.count_if_set("attention.shared_kv_layers", 0),
        **windows(5)(meta),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": meta.number_if_set("final_logit_softcapping") or _CAP,
        "rope_parameters": {FULL: full | (rope_scaling(meta, head_dim) or {}), WINDOWED: local},
        "hidden_size_per_layer_input": meta.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _rows(meta, _INPUTS),
        "altup_num_inputs": meta.count("altup.num_inputs"),
        "altup_active_idx": meta.count_if_set("altup.active_idx", 0),
        "altup_correct_scale": meta.has_in_a_layer("altup_correct_scale.weight"),
        "laurel_rank": _rows(meta, _LAUREL),
    }


def _rows(meta: ArchitectureMetadata, name: str) -> int:
    """The number of rows of a tensor; raises ``CheckpointError`` if the file lacks it."""
    tensor = meta.header.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{meta.header.path} lacks the tensor {name}, which Gemma 3n has; download it again"
        )
    return tensor.shape[0]


def _shares(meta: ArchitectureMetadata) -> list[float]:
    """The share of each layer's gates that are 0: below so many deviations of a normal variable."""
    stored = meta.numbers("activation_sparsity_scale")
    if len(stored) < meta.num_layers:
        meta.refuse("activation_sparsity_scale", stored, "must be a number for each block")
    return [round(NormalDist().cdf(one), _DIGITS) for one in stored[: meta.num_layers]]
